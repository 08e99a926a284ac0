"""What ranks tell each other in words: JSON, of whatever length. Collective.

Not torch's own object collectives, which unpickle what arrives and so run what a stranger sends.
Called by `owner_steps` and `owner_state`; where there is no engine, by `comm` and the plug-in for
transformers' Trainer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.collectives import Collectives


def tell(own: Any, what: str, collectives: Collectives, device: torch.device) -> list[Any]:
    """What every rank tells, by rank.

    Args:
        own: What this rank tells; JSON can hold it.
        what: For messages.
        collectives: The ranks.
        device: Of their exchanges.
    """
    return _exchange(own, what, collectives.everybodys, device)


def tell_group(own: Any, what: str) -> list[Any]:
    """As `tell`, over torch's default group: there need be no engine, and no wait of its own."""

    def everybodys(row: Tensor, what: str) -> Tensor:
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        return torch.stack(rows)

    reaches_cpus = dist.get_backend_config().startswith("cpu:")
    device = torch.device("cpu" if reaches_cpus else "cuda")
    return _exchange(own, what, everybodys, device)


def _exchange(
    own: Any, what: str, everybodys: Callable[[Tensor, str], Tensor], device: torch.device
) -> list[Any]:
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = torch.tensor([text.numel()], device=device)
    lengths = everybodys(sizes, f"length of {what}").flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    told = everybodys(padded, what).cpu()
    return [json.loads(bytes(row[:n].tolist())) for row, n in zip(told, lengths, strict=True)]
