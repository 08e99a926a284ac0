"""What ranks tell each other in words: JSON, of whatever length. Collective.

Called by `owner_steps` and `owner_state`.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from zero_engine.exchange.collectives import Collectives


def tell(own: Any, what: str, collectives: Collectives, device: torch.device) -> list[Any]:
    """What every rank tells, by rank.

    Args:
        own: What this rank tells; JSON can hold it.
        what: For messages.
        collectives: The ranks.
        device: Of their exchanges.
    """
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = torch.tensor([text.numel()], device=device)
    lengths = collectives.everybodys(sizes, f"length of {what}").flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    told = collectives.everybodys(padded, what).cpu()
    return [json.loads(bytes(row[:n].tolist())) for row, n in zip(told, lengths, strict=True)]
