"""Reads what several ranks have alike once: each reads a part, and gives it to the others.

Under DDP every rank has all of the state, under HSDP every replica of a shard has that shard. Must
always hold: the parts of the ranks that have a tensor alike are all of it, and each of them knows
all parts; they are exchanged after every rank has verified its own.

A part is consecutive tensors: they are consecutive in the files as well, whoever has saved them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from zero_checkpoint.format.dtypes import byte_view
from zero_checkpoint.format.pieces import Piece, TensorId, cut
from zero_comm.exchange.collectives import Collectives, Pending, wait

_UNDER_WAY = 4
"""Exchanges at once: the ranks need not wait for each other after each tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """The part of a tensor that this rank has."""

    id: TensorId
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: Sequence[int]
    """Where the box begins in each dimension."""
    data: Tensor
    """Its elements, contiguous."""
    ranks: tuple[int, ...]
    """All ranks that have the same box, this one included, in ascending order."""

    def pieces(self) -> Iterator[Piece]:
        """The pieces that the box consists of, in the order of its elements."""
        return cut(self.id, self.shape, self.offsets, self.data)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """The exchange of one interval of each rank's part."""

    what: str
    ranks: tuple[int, ...]
    rows: dict[int, Tensor]
    """By rank, the bytes that it has read; none of a rank whose part has fewer intervals."""


class SharedReads:
    """The reads of one load.

    Attributes:
        pieces: What this rank reads.
    """

    def __init__(self, boxes: Iterable[Box], rank: int, world: int) -> None:
        """Divide the boxes of `rank` among the ranks that have the same."""
        self._rank, self._world = rank, world
        alike: dict[tuple[tuple[int, ...], torch.device], list[Box]] = defaultdict(list)
        for box in boxes:
            alike[box.ranks, box.data.device].append(box)
        pieces: list[Piece] = []
        self._rounds: list[_Round] = []
        for (ranks, device), group in alike.items():
            parts = divide([(b.data.numel(), b.data.element_size()) for b in group], len(ranks))
            for number, start, stop in parts[ranks.index(rank)]:
                pieces += clip(group[number].pieces(), start, stop)
            who = "all ranks" if len(ranks) == world else f"ranks {', '.join(map(str, ranks))}"
            # An exchange has the n-th interval of every rank's part.
            for turn, intervals in enumerate(zip_longest(*parts) if len(ranks) > 1 else ()):
                rows = {
                    each: byte_view(group[interval[0]].data.view(-1)[slice(*interval[1:])])
                    for each, interval in zip(ranks, intervals, strict=True)
                    if interval is not None
                }
                what = f"loaded state of {who} on {device.type}, {turn}"
                self._rounds.append(_Round(what=what, ranks=ranks, rows=rows))
        self.pieces = tuple(pieces)

    def exchange(self, collectives: Collectives) -> None:
        """Give the others what this rank has read, and take what they have. Collective.

        Raises:
            PeerLost: A peer is lost; the state is half of this checkpoint.
            LeavingNow: This rank was asked to leave.
        """
        under_way: deque[Pending] = deque()
        for each in self._rounds:
            under_way.append(self._begin(each, collectives))
            if len(under_way) == _UNDER_WAY:
                wait(under_way.popleft())
        while under_way:
            wait(under_way.popleft())

    def _begin(self, each: _Round, collectives: Collectives) -> Pending:
        if len(each.ranks) == self._world:
            return collectives.share(each.rows, each.what)
        own = each.rows.get(self._rank)
        held = {} if own is None else dict.fromkeys(each.ranks, own)
        return collectives.exchange_pieces(held, each.rows, each.what)


def divide(tensors: Sequence[tuple[int, int]], parts: int) -> list[list[tuple[int, int, int]]]:
    """Divide tensors into parts of consecutive elements, of nearly as many bytes each.

    A tensor is its elements, and the bytes of one of them; a part has (tensor, start, stop) of each
    interval, none of which is empty.
    """
    total = sum(size * width for size, width in tensors)
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
    begin = 0
    for number, (size, width) in enumerate(tensors):
        start = 0
        while start < size:
            part = (begin + start * width) * parts // total
            end = -(-total * (part + 1) // parts)  # the first byte of the next part
            stop = min(-(-(end - begin) // width), size)
            found[part].append((number, start, stop))
            start = stop
        begin += size * width
    return found


def clip(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Elements [start, stop) of what pieces come to in their order."""
    at = 0
    for piece in pieces:
        length = piece.data.numel()
        low, high = max(start - at, 0), min(stop - at, length)
        if low < high:
            yield Piece(piece.id, piece.start + low, piece.data[low:high])
        at += length
