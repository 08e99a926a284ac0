"""The norm of gradients, with the same bits however their elements are divided among ranks.

Owns the definition of the norm, which is a format: a checkpoint records its version, which
`zero_comm.sums.order` has. Must always hold:

- The elements of a parameter, flattened in row-major order, form blocks of BLOCK elements; zeros
  fill up the last one. The norm of a block is taken in fp32, or in fp64 if a gradient has that.
- The squares of these norms are added without rounding errors that depend on their order. Each
  square is split into LEVELS integers: multiples of fixed powers of two that lie 2**WIDTH apart.
  Sums of integers are exact. After ReproBLAS (Demmel and Nguyen).
- What lies below the LEVELS steps of the largest square of all is dropped, and so the relative
  error of the sum is at most 2**-60 for each block. The norm is rounded once.

A rank sends the sums of its blocks, ROW integers, whatever the size of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

BLOCK = 64
"""Elements."""
NORM_ROWS = 16
"""Blocks that are normed together at least: for fewer rows a GPU adds the elements of one in
another order, and how many rows a rank has depends on the world size."""
SHARD_GRAIN = BLOCK * NORM_ROWS
"""Elements; of shards that begin at multiples of it, blocks are normed where they lie."""
WIDTH, LEVELS = 20, 4
ROW = 1 + LEVELS
"""Integers that describe a sum: its highest level, then a multiple of the step of each level."""

_LOW, _HIGH = -48, 48
"""The highest level of a sum lies between: beyond, fp64 holds no multiples of its steps. The
square of a finite fp32 number is at the levels -15 to 12."""
_INF, _NAN = 1 << 20, 1 << 21
"""In the place of the highest level: some block is infinite; some block is no number."""
_CHUNK = {"cpu": 1 << 15}
"""Squares that are added at once, by the type of the device: what a cache holds."""


def block_norms(flat: Tensor) -> Tensor:
    """The norm of each block of a flat tensor; zeros fill up the last block.

    The bits of a norm depend on its block alone, not on how many others there are.
    """
    blocks = -(-flat.numel() // BLOCK)
    missing = max(blocks, NORM_ROWS) * BLOCK - flat.numel()
    rows = pad(flat, (0, missing)) if missing else flat
    return vector_norm(rows.view(-1, BLOCK), dim=1)[:blocks]


def sum_of_squares(norms: Tensor) -> Tensor:
    """The sum of the squares of block norms [n], to be given to `merged`: [ROW] in int64.

    They are in fp32 or fp64; nothing waits for their device.
    """
    device = norms.device
    largest = norms.max() if norms.numel() else norms.new_zeros(())
    largest = largest.double().square()
    exponent = torch.frexp(largest).exponent.long()
    # The lowest level whose step times 2**(WIDTH - 1) is above the largest square.
    level = torch.where(largest > 0, torch.div(exponent, WIDTH, rounding_mode="floor"), _LOW)
    top = level.clamp(_LOW, _HIGH)
    levels = top - torch.arange(LEVELS, device=device)
    numbers = _rounding(device)[levels - _LOW + LEVELS - 1]
    # Each block adds the bits of number + multiple to its level: the numbers are taken off here,
    # in advance, and all of it wraps modulo 2**64. Exact below 2**63: for 2**44 blocks.
    sums = numbers.view(torch.int64) * -norms.numel()
    every = list(zip(numbers.unbind(), sums.unbind(), strict=True))
    for part in norms.split(_CHUNK.get(device.type, 1 << 20)):
        rest = part.double().square()
        rounded = torch.empty_like(rest)
        for down, (number, total) in enumerate(every):
            torch.add(rest, number, out=rounded)
            total.add_(rounded.view(torch.int64).sum())
            # What this level has rounded away goes to the next one; behind the last it is dropped.
            if down + 1 < LEVELS:
                rest -= rounded.sub_(number)
    top = torch.where(largest.isinf() | (level > _HIGH), _INF, top)
    return torch.cat([torch.where(largest.isnan(), _NAN, top).view(1), sums])


@cache
def _rounding(device: torch.device) -> Tensor:
    """Numbers that round to multiples of the step of each level, from the lowest on."""
    # Beside such a number fp64 holds multiples of the step alone, so adding it rounds to them; and
    # the bits of a sum, as an integer, are those of the number plus the multiple.
    exponents = range(WIDTH * (_LOW - LEVELS + 1), WIDTH * _HIGH + 1, WIDTH)
    numbers = [math.ldexp(1.5, 52 + each) for each in exponents]
    return torch.tensor(numbers, dtype=torch.double, device="cpu").to(device)


def merged(rows: Sequence[Sequence[int]]) -> float:
    """The norm of everything, from the `sum_of_squares` of every rank, in any order.

    Infinite if a block is, also one whose norm is beyond its dtype; NaN if a block is.
    """
    top = max((row[0] for row in rows), default=_LOW)
    if top >= _INF:
        return math.nan if top == _NAN else math.inf
    lowest = top - LEVELS + 1
    total = 0
    for highest, *multiples in rows:
        for down, multiple in enumerate(multiples):
            level = highest - down
            if level >= lowest:
                total += multiple << WIDTH * (level - lowest)
    return _root(total, WIDTH * lowest)


def _root(total: int, exponent: int) -> float:
    """The square root of total * 2**exponent, an even one, rounded once."""
    shift = max(0, 128 - total.bit_length()) // 2
    root = math.isqrt(total << 2 * shift)
    if root * root != total << 2 * shift:  # its last bit says so, far behind those of an fp64
        root = root << 1 | 1
        shift += 1
    return math.ldexp(root, exponent // 2 - shift)
