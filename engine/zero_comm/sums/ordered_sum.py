"""The reduce-scatter's order of addition at an owner: a chain over blocks, a tree inside a block.

Owns the owner's half of `plan`. Only siblings are added to each other and only whole blocks to the
chain, however many micro-batches come at once, so the sum depends on their indices alone. What is
pending is log2(block) pieces at most.

What is to be added is decided before (`next_sums`, a pure function), then done by `fold`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from zero_comm.sums.additions import ROUNDED, TOTAL, Addition, Memory, lead
from zero_comm.sums.buffer_pool import BufferPool
from zero_comm.sums.fold import run_additions
from zero_comm.sums.plan import Piece
from zero_comm.sums.quantization import rounded
from zero_comm.sums.spill import KeptSums, Spill

# ---- what is added to what ----


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a sum."""

    count: int = 0
    """Micro-batches so far."""
    pending: tuple[tuple[Piece, Memory], ...] = ()
    """By start; a piece that begins the sum is in TOTAL."""
    chain: Memory | None = None
    """The blocks before; TOTAL between two calls."""


@dataclass(slots=True)
class _Stack:
    """The additions of one call, as they are decided."""

    block: int
    pending: list[tuple[Piece, Memory]]
    chain: Memory | None
    rounds: bool = False
    """Each block is rounded before it is added to the chain."""
    rounded: set[Memory] = field(default_factory=set)
    """Blocks that whoever gave them has rounded."""
    additions: list[Addition] = field(default_factory=list)

    def push(self, piece: Piece, memory: Memory) -> None:
        """Give the next piece; add siblings."""
        self.pending.append((piece, memory))
        while len(self.pending) > 1:
            (left, _), (right, _) = self.pending[-2:]
            size = 1 << left.level
            are_siblings = left.level == right.level and right.start == left.start ^ size
            if not are_siblings or size >= self.block:
                break
            self._unite()

    def _unite(self) -> None:
        (left, at), (_, other) = self.pending[-2:]
        self.pending[-2:] = [(Piece(left.start, left.level + 1), at)]
        self.additions.append(Addition(at, at, other))

    def end_block(self) -> None:
        """Add what there is of a block to the chain: what is absent adds nothing."""
        while len(self.pending) > 1:
            self._unite()
        for _, memory in self.pending:
            if self.rounds and memory not in self.rounded:
                self.additions.append(Addition(memory, memory, ROUNDED))
            if self.chain is None:
                self.chain = memory
            else:
                self.additions.append(Addition(self.chain, self.chain, memory))
        self.pending.clear()


@lru_cache(maxsize=1024)
def next_sums(
    progress: Progress,
    levels: tuple[int, ...],
    block: int,
    *,
    last: bool,
    rounds: bool = False,
    given_rounded: bool = False,
) -> tuple[tuple[Addition, ...], Progress]:
    """Plan the additions for the next pieces; returns them and the new state.

    The pieces follow each other; one of level 0 is the gradient of one micro-batch. `last`: there
    are no more in this step. `rounds`: each block is rounded before it is added to the chain, but
    those that come as one piece not if `given_rounded`.
    """
    stack = _Stack(block, list(progress.pending), progress.chain, rounds)
    given, stop = len(levels), progress.count
    for index, level in enumerate(levels):
        # Whoever completes a block has rounded it, and a block is rounded once.
        if given_rounded and 1 << level == block:
            stack.rounded.add(Memory("given", index))
        stack.push(Piece(stop, level), Memory("given", index))
        stop += 1 << level
        if stop % block == 0:
            stack.end_block()
    if last:
        stack.end_block()
    used = {memory.number for _, memory in stack.pending if memory.kind == "kept"}
    # Homes in which no pending piece is.
    free = (index for index in range(len(used) + given) if index not in used)
    pending = []
    for piece, memory in stack.pending:
        home = memory
        if memory.kind == "given":
            # The piece that begins the sum lies where the sum is going to be.
            begins = piece.start == 0 and stack.chain is None
            home = TOTAL if begins else Memory("kept", next(free))
            lead(stack.additions, memory, home)
        pending.append((piece, home))
    # The first block was given whole, and nothing has been added to it yet.
    if stack.chain is not None and stack.chain.kind == "given":
        lead(stack.additions, stack.chain, TOTAL)
    chain = None if stack.chain is None else TOTAL
    if not progress.count:
        # The total may be the memory of one of them: all of it is read before that is written.
        stack.additions.sort(key=lambda addition: addition.target == TOTAL)
    done = Progress(stop, tuple(pending), chain)
    return tuple(stack.additions), done


@lru_cache(maxsize=1024)
def next_pieces(
    start: int, count: int, block: int
) -> tuple[tuple[Addition, ...], tuple[tuple[Piece, Memory], ...]]:
    """How the gradients of `count` consecutive micro-batches become as few pieces as possible.

    `block` is B.

    Returns:
        What is to be done, and where each piece lies then: a sum not where a gradient was, whose
        memory can be used again.
    """
    stack = _Stack(block, [], None)
    for index in range(count):
        stack.push(Piece(start + index, 0), Memory("given", index))
    pieces = []
    for number, (piece, memory) in enumerate(stack.pending):
        home = memory if piece.level == 0 else Memory("kept", number)
        if home != memory:
            lead(stack.additions, memory, home)
        pieces.append((piece, home))
    return tuple(stack.additions), tuple(pieces)


# ---- doing it ----


def form_pieces(
    gradients: Sequence[Tensor], start: int, block: int, pool: BufferPool
) -> list[tuple[Piece, Tensor]]:
    """Add the gradients [n] of consecutive micro-batches, at least one, as far as a sender may.

    They are used up; `block` is B. Returns sums in fp32, in memory of the pool, and single
    gradients where and as they are.
    """
    additions, pieces = next_pieces(start, len(gradients), block)
    memory = {Memory("given", number): each for number, each in enumerate(gradients)}
    for _, home in pieces:
        if home not in memory:
            memory[home] = pool.take(gradients[0].numel(), torch.float32)
    if additions:
        run_additions(additions, memory, torch.float32, pool)
    return [(piece, memory[home]) for piece, home in pieces]


class OrderedSum:
    """The sum of one interval over the micro-batches of a step.

    Attributes:
        total: [n] fp32; the sum once it is settled.
        block: B; it may change between two steps.
        spill: Keeps what is pending or early between two calls.
        rounds: Whether the sum of each block is rounded to int8 and back, once it is complete.
    """

    def __init__(
        self, total: Tensor, block: int, spill: Spill | None = None, *, rounds: bool = False
    ) -> None:
        self.total = total
        self.block = block
        self.spill = spill or Spill(total.device)
        self.rounds = rounds
        self._progress = Progress()
        self._kept: dict[Memory, KeptSums] = {}
        self._early: dict[int, KeptSums] = {}

    def add_pieces(
        self,
        given: Iterable[tuple[Piece, Tensor]],
        pool: BufferPool,
        *,
        first: bool,
        last: bool = False,
    ) -> None:
        """Add pieces in any order; those whose predecessors have not come yet are kept until then.

        Args:
            given: Pieces of [n], without a gap in all that a step is given; used up. Whole blocks
                have been rounded, if this sum rounds them.
            pool: As for `add`.
            first: They are the first of their step.
            last: They are the last of their step; so nothing is kept.
        """
        if first:
            self._forget_early()
        come = {piece.start: (piece, each) for piece, each in given}
        at, ready = 0 if first else self._progress.count, list[tuple[Piece, Tensor]]()
        while (found := come.pop(at, None) or self._take_early(at, pool)) is not None:
            ready.append(found)
            at += 1 << found[0].level
        # What is left is early, and in memory that somebody else uses again.
        for piece, each in come.values():
            self._keep_early(piece, each.to(self.total.dtype, copy=True), pool)
        self.spill.balance(self._early.values(), pool)
        if ready:
            levels = [piece.level for piece, _ in ready]
            self.add([each for _, each in ready], pool, first=first, last=last, levels=levels)
        elif first:
            self._progress = Progress()
            self._forget_kept()

    def _take_early(self, start: int, pool: BufferPool) -> tuple[Piece, Tensor] | None:
        """The piece that begins there, kept no longer; None if none is kept."""
        kept = self._early.pop(start, None)
        return None if kept is None else (kept.piece, self.spill.take(kept, pool))

    def _keep_early(self, piece: Piece, number: Tensor, pool: BufferPool) -> None:
        """Keep a piece, added to its siblings as far as they are there."""
        while 1 << piece.level < self.block:
            start = piece.start ^ 1 << piece.level
            if start not in self._early or self._early[start].piece.level != piece.level:
                break
            sibling = self._take_early(start, pool)
            assert sibling is not None
            (left, one), (_, other) = sorted([(piece, number), sibling], key=lambda each: each[0])
            piece, number = Piece(left.start, left.level + 1), one.add_(other)
            if self.rounds and 1 << piece.level == self.block:
                rounded(number, number)
        self._early[piece.start] = self.spill.keep(piece, number)

    def _forget_early(self) -> None:
        while self._early:
            self.spill.drop(self._early.popitem()[1])

    def _forget_kept(self) -> None:
        while self._kept:
            self.spill.drop(self._kept.popitem()[1])

    def add(
        self,
        given: Sequence[Tensor],
        pool: BufferPool,
        *,
        first: bool,
        last: bool = False,
        levels: Sequence[int] | None = None,
    ) -> None:
        """Add the gradients of the next micro-batches, or pieces of them.

        Args:
            given: At least one of [n]; used up.
            pool: Of memory for their copies in fp32.
            first: They are the first of their step; the total may be the memory of one of them.
            last: They are the last of their step, as far as is known; so nothing is kept pending.
            levels: Of each, as a `Piece`, of which whole blocks have been rounded, if this sum
                rounds them; None: the gradient of one micro-batch each, as it was computed.
        """
        before = Progress() if first else self._progress
        if first:
            self._forget_kept()
        additions, self._progress = next_sums(
            before,
            tuple(levels or [0] * len(given)),
            self.block,
            last=last,
            rounds=self.rounds,
            given_rounded=levels is not None,
        )
        memory = {TOTAL: self.total}
        # Only what is read here comes back from host memory.
        for home in [home for home in self._kept if any(home in each for each in additions)]:
            memory[home] = self.spill.take(self._kept.pop(home), pool)
        pending = [(piece, home) for piece, home in self._progress.pending if home != TOTAL]
        for _, home in pending:
            if home not in memory and home not in self._kept:
                memory[home] = torch.empty_like(self.total)
        for index, each in enumerate(given):
            memory[Memory("given", index)] = each
        run_additions(additions, memory, self.total.dtype, pool)
        for piece, home in pending:
            if home in memory:
                self._kept[home] = self.spill.keep(piece, memory[home])
        self.spill.balance(self._kept.values(), pool)

    @property
    def count(self) -> int:
        """Micro-batches of this step so far, or of the last one before the first of a step."""
        return self._progress.count

    def settle(self) -> None:
        """Put the sum of all that has been given into `total`; what comes later is added to it.

        Not while a piece waits for its predecessors.
        """
        assert not self._early
        value = self.value()
        if value is not self.total:
            self.total.copy_(value)
        self._forget_kept()
        self._progress = Progress(self._progress.count, chain=TOTAL)

    def drop(self) -> None:
        """Let everything that has been given so far count as zero."""
        self._forget_early()
        self._forget_kept()
        self.total.zero_()
        self._progress = Progress(self._progress.count, chain=TOTAL)

    def value(self) -> Tensor:
        """The sum of all that has been given so far, as if the step ended; not to be written to.

        Without pieces that wait for their predecessors.
        """
        # From the right, as `_Stack.end_block`: the bits are those of a step that ends here.
        value: Tensor | None = None
        for _, memory in reversed(self._progress.pending):
            piece = self.total if memory == TOTAL else self._kept[memory].tensor
            piece = piece.to(self.total.device)
            value = piece if value is None else piece + value
        if value is None:
            return self.total
        if self.rounds:
            value = rounded(value, torch.empty_like(value))
        return value if self._progress.chain is None else self.total + value

    def kept(self) -> Iterator[Tensor]:
        """The pieces that are pending or early, beside the total."""
        return (kept.tensor for kept in (*self._kept.values(), *self._early.values()))
