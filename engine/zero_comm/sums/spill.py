"""Pieces that a rank keeps between micro-steps: on the device, beyond a budget in host memory.

`ordered_sum` keeps what is pending or early at its owner, `node.HeldPieces` what a sender holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_comm.sums.buffer_pool import BufferPool
from zero_comm.sums.plan import Piece


@dataclass(slots=True, eq=False)
class KeptSums:
    """A piece that is kept."""

    piece: Piece
    tensor: Tensor
    """In host memory if it is away."""
    is_away: bool = False


class Spill:
    """The pieces of all gradients that one rank keeps.

    Attributes:
        budget_bytes: What may stay on the device between micro-steps; None: all.
        here_bytes: What is there.
    """

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        """Keep nothing yet; at most `budget_bytes` on the device between micro-steps, None: all."""
        self.budget_bytes = budget_bytes
        self._kept: set[KeptSums] = set()
        # Pinned for a GPU, which then copies while the host goes on. Without one these are copies
        # of memory in memory, which save nothing and show that the order is kept.
        self._host = BufferPool(torch.device("cpu"), pin=device.type == "cuda")
        self.here_bytes = 0

    def keep(self, piece: Piece, tensor: Tensor) -> KeptSums:
        """Keep a piece; it stays where it is until the next `balance`."""
        kept = KeptSums(piece, tensor)
        self._kept.add(kept)
        self.here_bytes += tensor.nbytes
        return kept

    def balance(self, kept: Iterable[KeptSums], pool: BufferPool) -> None:
        """Send away what is beyond the budget, of one gradient; the pool gets the memory."""
        if self.budget_bytes is None or self.here_bytes <= self.budget_bytes:
            return
        # Those of the highest level first: they are needed last.
        for each in sorted(kept, key=lambda each: each.piece.level, reverse=True):
            if not each.is_away and self.here_bytes > self.budget_bytes:
                here, each.is_away = each.tensor, True
                each.tensor = self._host.take(here.numel(), here.dtype)
                # On the current stream, after what writes the piece and before what reads it: no
                # host waits.
                each.tensor.copy_(here, non_blocking=True)
                self.here_bytes -= here.nbytes
                pool.give(here)

    def take(self, kept: KeptSums, pool: BufferPool) -> Tensor:
        """Keep a piece no longer, and use it on the device; a copy lies in memory of the pool."""
        here = kept.tensor
        if kept.is_away:
            here = pool.take(kept.tensor.numel(), kept.tensor.dtype)
            here.copy_(kept.tensor, non_blocking=True)
        self.drop(kept)
        return here

    def drop(self, kept: KeptSums) -> None:
        """Keep a piece no longer."""
        self._kept.remove(kept)
        if kept.is_away:
            self._host.give(kept.tensor)  # the next copy to it runs after those from it
        else:
            self.here_bytes -= kept.tensor.nbytes

    def here(self) -> Iterator[Tensor]:
        """The bytes that are kept on the device."""
        return (kept.tensor for kept in self._kept if not kept.is_away)

    def away(self) -> Iterator[Tensor]:
        """The bytes that are kept in host memory."""
        return (kept.tensor for kept in self._kept if kept.is_away)
