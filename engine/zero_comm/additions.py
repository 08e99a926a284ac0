"""The additions of one call: what is added to what, and doing it one after the other.

Owns the names of memory, and the plain way to run additions, on a CPU piece of memory by piece of
memory, while that is in its cache. Must always hold: each is one addition in fp32 of two numbers,
which are widened first, in the order of the list.

`ordered_sum` and `held_pieces` decide what is added; `fold` runs it, on a GPU in one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_comm.buffer_pool import BufferPool
from zero_comm.quantization import unpack

_PIECE = 1 << 18
"""Elements whose fp32 copy is still in a CPU's cache when it is added."""


class Memory(NamedTuple):
    """Where a number lies."""

    kind: str
    """"total", "kept" or "given"; what is given is used up, and nobody reads it afterwards."""
    number: int = 0


TOTAL = Memory("total")


class Addition(NamedTuple):
    """target = left + right, or a copy of left; the target is left's memory, or nobody's."""

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
    *,
    packed: bool = False,
) -> None:
    """As `fold.run_additions`; on a CPU piece of memory after piece of memory."""
    pieces: Iterable[Mapping[Memory, Tensor]] = (memory,)
    if not packed and not next(iter(memory.values())).is_cuda:  # packed ones only as a whole
        columns = [tensor.split(_PIECE) for tensor in memory.values()]
        pieces = (dict(zip(memory, row, strict=True)) for row in zip(*columns, strict=True))
    for piece in pieces:
        _Worker(piece, dtype, pool, packed=packed).run(additions)


class _Worker:
    """The additions on one piece of memory; what is narrower than fp32 is widened first."""

    def __init__(
        self, memory: Mapping[Memory, Tensor], dtype: torch.dtype, pool: BufferPool, *, packed: bool
    ) -> None:
        self._memory = memory
        self._dtype = dtype
        self._pool = pool
        self._packed = packed
        self._wide: dict[Memory, Tensor] = {}

    def run(self, additions: Sequence[Addition]) -> None:
        """Do them in their order."""
        for target, left, right in additions:
            if right is None:
                self._widen(self._memory[left], self._memory[target])
                continue
            one, other = self._number(left), self._number(right)
            torch.add(one, other, out=one if target == left else self._memory[target])
            for read in {left, right} - {target}:
                if read in self._wide:
                    self._pool.give(self._wide.pop(read))

    def _number(self, memory: Memory) -> Tensor:
        """In fp32. Copying first is several times faster than adding bf16 to fp32 directly."""
        tensor = self._memory[memory]
        if memory.kind != "given" or (tensor.dtype == self._dtype and not self._packed):
            return tensor
        if memory not in self._wide:
            numel = self._memory[TOTAL].numel() if self._packed else tensor.numel()
            self._wide[memory] = self._widen(tensor, self._pool.take(numel, self._dtype))
        return self._wide[memory]

    def _widen(self, gradient: Tensor, into: Tensor) -> Tensor:
        if self._packed and gradient.dtype == torch.uint8:
            return unpack(gradient.view(1, -1), into.view(1, -1)).view(-1)
        return into.copy_(gradient)
