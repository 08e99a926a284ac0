"""The pieces that a sender holds of one gradient between the micro-steps of a step.

Owns the sender's half of `plan`: what comes to a rank, or to its slice of a node, is
added to what is held, as the plan says, and passed on when the plan says so. Must always hold: only
siblings are added to each other, in fp32; the gradient of a single micro-batch keeps its dtype.

`node` has one of each kind for every gradient; what they hold rests where `spill` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero_comm.sums.additions import Addition, Memory, lead
from zero_comm.sums.buffer_pool import BufferPool
from zero_comm.sums.fold import run_additions
from zero_comm.sums.plan import Formed, Piece
from zero_comm.sums.spill import Kept, Spill


class HeldPieces:
    """What one rank holds of a gradient: of all of it, or of the slice that it adds up."""

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        self._held: dict[int, Kept] = {}

    def clear(self) -> None:
        """Drop what is held, of a step that has not ended."""
        while self._held:
            self._spill.drop(self._held.popitem()[1])

    def __iter__(self) -> Iterator[Tensor]:
        """What is held."""
        return (kept.tensor for kept in self._held.values())

    def add(
        self, given: Sequence[Tensor], formed: Formed, pool: BufferPool
    ) -> list[tuple[Piece, Tensor]]:
        """Add what comes to what is held.

        Args:
            given: What the plan takes, in its order; used up, and not held afterwards.
            formed: What the plan says of this micro-step.
            pool: Of the memory of sums, and of what is held.

        Returns:
            What is passed on: sums in memory of the pool, single gradients also where they were.
        """
        fetched = self._fetch(formed, pool)
        memory: dict[Memory, Tensor] = {}
        at: dict[int, Memory] = {}
        for start, tensor in fetched.items():
            # A gradient that nothing has been added to is as narrow as one that is given.
            at[start] = Memory("kept" if tensor.dtype == torch.float32 else "given", start)
            memory[at[start]] = tensor
        for piece, tensor in zip(formed.takes, given, strict=True):
            at[piece.start] = Memory("given", piece.start)
            memory[at[piece.start]] = tensor
        additions = [
            Addition(at[left.start], at[left.start], at.pop(right.start))
            for left, right in ((merge.left, merge.right) for merge in formed.merges)
        ]
        keeps = [piece for piece in formed.keeps if piece.start not in self._held]
        for piece in (*formed.gives, *keeps):
            source = at[piece.start]
            is_sum = any(addition.target == source for addition in additions)
            is_given = source.kind == "given" and piece.start not in fetched
            # Not where the gradient was, whose memory can be used again.
            if (is_sum and source.kind == "given") or (is_given and piece in keeps):
                at[piece.start] = home = Memory("kept", piece.start)
                dtype = torch.float32 if is_sum else memory[source].dtype
                memory[home] = pool.take(memory[source].numel(), dtype)
                lead(additions, source, home)
        if additions:
            run_additions(additions, memory, torch.float32, pool)
        passed = [(piece, memory[at[piece.start]]) for piece in formed.gives]
        for piece in keeps:
            self._held[piece.start] = self._spill.keep(piece, memory[at[piece.start]])
        used = {id(tensor) for tensor in (*self, *(tensor for _, tensor in passed))}
        for tensor in fetched.values():
            if id(tensor) not in used:
                pool.give(tensor)
        self._spill.balance(self._held.values(), pool)
        return passed

    def _fetch(self, formed: Formed, pool: BufferPool) -> dict[int, Tensor]:
        """What is held of the pieces that are added or passed on, by start; held no longer."""
        merged = (piece for merge in formed.merges for piece in (merge.left, merge.right))
        wanted = {piece.start for piece in (*merged, *formed.gives)}
        return {
            start: self._spill.take(self._held.pop(start), pool)
            for start in tuple(self._held)
            if start in wanted
        }
