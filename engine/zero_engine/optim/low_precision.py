"""State that rests in 16 bits and is stepped in fp32.

Must always hold: the optimizer sees fp32 copies, which are rounded once, when they have been
stepped. So what comes of a step depends neither on how kernels round, nor on stage, world size or
tier.

Called by `sub_groups` and `rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Moments:
    """What the optimizer's state rests in, if it is fp32 to the optimizer."""

    dtype: torch.dtype = torch.float32

    def resting(self, dtype: torch.dtype) -> torch.dtype:
        """What state of a dtype rests in."""
        return self.dtype if dtype == torch.float32 else dtype

    def as_stepped(self, state: Tensor) -> Tensor:
        """As the optimizer is to see it; what it keeps in 16 bits of its own accord, as it is."""
        return state if self.dtype == torch.float32 else widened(state)


def widened(resting: Tensor) -> Tensor:
    """In fp32: a copy only where it rests in 16 bits."""
    return resting.float() if resting.dtype in _LOW_PRECISION else resting


def brought(values: Tensor, place: Tensor) -> Tensor:
    """`place`, which now holds the values: nobody need refer to a copy any more."""
    if values.data_ptr() != place.data_ptr():
        place.copy_(values)
    return place
