"""All-gather of objects, as JSON of any length. Collective."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_objects(own: Any, what: str, everybodys: Callable[[Tensor, str], Tensor]) -> list[Any]:
    """The objects of all ranks, by rank; what JSON can hold.

    An exchange of the CPUs, named `what`.
    """
    return _exchange(own, what, everybodys, torch.device("cpu"))


def gather_objects_of_group(own: Any, what: str) -> list[Any]:
    """See `gather_objects`, over torch's default group, without an engine and its waits."""

    def everybodys(row: Tensor, what: str) -> Tensor:
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        return torch.stack(rows)

    # NCCL by itself connects no host memory.
    reaches_cpus = dist.get_backend_config().startswith("cpu:")
    device = torch.device("cpu" if reaches_cpus else "cuda")
    return _exchange(own, what, everybodys, device)


def _exchange(
    own: Any, what: str, everybodys: Callable[[Tensor, str], Tensor], device: torch.device
) -> list[Any]:
    # Not torch's object collectives: they unpickle what arrives, and so would run what a stranger
    # sends.
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = torch.tensor([text.numel()], device=device)
    lengths = everybodys(sizes, f"length of {what}").flatten().tolist()
    # Rows of one length: an all-gather takes no others.
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    rows = everybodys(padded, what).cpu()
    return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]
