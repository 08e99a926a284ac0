"""A number of the bits of a tensor, to notice that two tensors differ.

Owns how bits are added. Must always hold: a device may add in any order, since these are integers;
and every place has an odd weight at random.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE = 1 << 20
"""Numbers that are looked at together, so that it takes no memory to speak of."""
_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""By the bytes of an element; larger ones are several integers of 32 bits."""
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 over the golden ratio (multiplicative hashing, Knuth vol. 3, 6.4)."""


def bit_sum(tensor: Tensor) -> Tensor:
    """A whole number, [] in int64 on its device, that differs, almost surely, if a bit does."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.detach().contiguous().flatten()
    bits = flat.view(_INTEGERS.get(flat.element_size(), torch.int32))
    places = torch.arange(min(_PIECE, bits.numel()), device=bits.device) * _GOLDEN
    found = bits.new_zeros((), dtype=torch.int64)
    for number, piece in enumerate(bits.split(_PIECE)):
        # What differs, differs by a pattern: in one exponent, or in the signs of all. Under equal
        # weights such differences could add up to nothing.
        weights = places[: piece.numel()] + number
        found += (piece.long() * (weights ^ (weights >> 32) | 1)).sum()
    return found
