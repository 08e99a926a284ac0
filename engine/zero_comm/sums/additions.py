"""The additions of one call: what is added to what, and doing it one after the other.

Each is one addition in fp32 of two numbers, which are widened first, in the order of the list, or
in fp64 of fp64 numbers; or the rounding of one number. `ordered_sum` and `node.HeldPieces` decide
what is added; `fold` runs it, on a GPU in one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_comm.sums.buffer_pool import BufferPool
from zero_comm.sums.quantization import rounded

SUMS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
"""Dtypes of gradients that can be summed -> that of the sum. A complex number is two of them."""

_PIECE = 1 << 18
"""Elements whose fp32 copy is still in a CPU's cache when it is added; a multiple of the blocks
that are rounded together."""


class Memory(NamedTuple):
    """Where a number lies."""

    kind: str
    """"total", "kept" or "given"; what is given is used up, and nobody reads it afterwards."""
    number: int = 0


TOTAL = Memory("total")
ROUNDED = Memory("rounded")
"""In the place of what is added: the number is rounded to int8 and back."""


class Addition(NamedTuple):
    """target = left + right, or left rounded, or a copy of left.

    The target is left's memory, or nobody's.
    """

    target: Memory
    left: Memory
    right: Memory | None


def lead(additions: list[Addition], source: Memory, home: Memory) -> None:
    """Let the last addition that writes `source` write `home` instead; none does: copy it."""
    for index in reversed(range(len(additions))):
        if additions[index].target == source:
            additions[index] = additions[index]._replace(target=home)
            return
    additions.append(Addition(home, source, None))


def run_one_by_one(
    additions: Sequence[Addition],
    memory: Mapping[Memory, Tensor],
    dtype: torch.dtype,
    pool: BufferPool,
) -> None:
    """See `fold.run_additions`; on a CPU piece of memory after piece of memory."""
    pieces: Iterable[Mapping[Memory, Tensor]] = (memory,)
    # On a CPU the fp32 copy of a piece is added while it is in the cache.
    if not next(iter(memory.values())).is_cuda:
        columns = [tensor.split(_PIECE) for tensor in memory.values()]
        pieces = (dict(zip(memory, row, strict=True)) for row in zip(*columns, strict=True))
    for piece in pieces:
        _Worker(piece, dtype, pool).run(additions)


class _Worker:
    """The additions on one piece of memory; what is narrower than fp32 is widened first."""

    def __init__(
        self, memory: Mapping[Memory, Tensor], dtype: torch.dtype, pool: BufferPool
    ) -> None:
        self._memory = memory
        self._dtype = dtype
        self._pool = pool
        self._wide: dict[Memory, Tensor] = {}

    def run(self, additions: Sequence[Addition]) -> None:
        """Do them in their order."""
        for target, left, right in additions:
            if right is None:
                self._memory[target].copy_(self._memory[left])
                continue
            one = self._number(left)
            into = one if target == left else self._memory[target]
            if right == ROUNDED:
                rounded(one, into)
            else:
                torch.add(one, self._number(right), out=into)
            # What has been added to another number is read no more.
            for read in {left, right} - {target}:
                if read in self._wide:
                    self._pool.give(self._wide.pop(read))

    def _number(self, memory: Memory) -> Tensor:
        """The number, in the dtype of sums."""
        tensor = self._memory[memory]
        if memory.kind != "given" or tensor.dtype == self._dtype:
            return tensor
        # Copying first is several times faster than adding bf16 to fp32 directly.
        if memory not in self._wide:
            self._wide[memory] = self._pool.take(tensor.numel(), self._dtype).copy_(tensor)
        return self._wide[memory]
