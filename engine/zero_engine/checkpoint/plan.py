"""What a rank reads: from wanted runs of elements to blocks of files, as a pure function.

A change of world size, or of ZeRO stage, is nothing but this intersection of intervals. The
unit of reading is a block, because the block is the unit of verification: each touched block is
read once, with one scattered read that puts the wanted bytes straight into the target tensors
and the others (only in blocks at the edge of a run) into scratch memory. Runs that are adjacent
in the file share their blocks, so they are merged by construction.

Must always hold: every wanted element comes from exactly one part of one read; the parts of a
read are in ascending order and do not overlap.

Called by `reader`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from zero_engine.checkpoint.fragments import Fragments, Ints


@dataclass(frozen=True, slots=True)
class Want:
    """Elements [start, start + length) of the `tensor`-th tensor of the manifest."""

    tensor: int
    start: int
    length: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [at, at + length) of the `want`-th target lie at `offset` in the file."""

    offset: int
    length: int
    want: int
    at: int


@dataclass(frozen=True, slots=True)
class BlockRead:
    """Read one block of one file whole: its parts to their targets, the rest to scratch."""

    file: int
    block: int
    parts: tuple[Part, ...]


def plan(
    wants: Sequence[Want], fragments: Fragments, n_tensors: int, block_bytes: int
) -> list[BlockRead]:
    """The reads that fill all wants, by file and position.

    A block that two wants share byte by byte (a tied tensor wanted under two names) is read
    once for each.

    Args:
        wants: In bounds of their tensors; empty ones are skipped.
        fragments: Sorted by (tensor, start), covering every tensor once.
        n_tensors: How many tensors the fragments know.
        block_bytes: Of the manifest.
    """
    first = np.searchsorted(fragments.tensor, np.arange(n_tensors + 1))
    blocks: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for number, want in enumerate(wants):
        for file, part in _parts(number, want, fragments, first):
            for piece in _cut(part, block_bytes):
                blocks[file, piece.offset // block_bytes].append(piece)
    return [
        BlockRead(file, block, layer)
        for (file, block), parts in sorted(blocks.items())
        for layer in _layers(parts)
    ]


def _parts(
    number: int, want: Want, fragments: Fragments, first: Ints
) -> Iterator[tuple[int, Part]]:
    """(file, part) for each fragment that the want meets."""
    begin, end = int(first[want.tensor]), int(first[want.tensor + 1])
    starts = fragments.start[begin:end]
    stop = want.start + want.length
    low = begin + int(np.searchsorted(starts, want.start, side="right")) - 1
    high = begin + int(np.searchsorted(starts, stop, side="left"))
    for row in range(low, high) if want.length else ():
        at, size = int(fragments.start[row]), int(fragments.length[row])
        left, right = max(want.start, at), min(stop, at + size)
        yield (
            int(fragments.file[row]),
            Part(
                offset=int(fragments.offset[row]) + (left - at) * want.itemsize,
                length=(right - left) * want.itemsize,
                want=number,
                at=(left - want.start) * want.itemsize,
            ),
        )


def _cut(part: Part, block_bytes: int) -> Iterator[Part]:
    """The part, cut where blocks end."""
    offset, end = part.offset, part.offset + part.length
    while offset < end:
        stop = min(end, (offset // block_bytes + 1) * block_bytes)
        yield Part(offset, stop - offset, part.want, part.at + offset - part.offset)
        offset = stop


def _layers(parts: list[Part]) -> list[tuple[Part, ...]]:
    """The parts of one block, sorted, in as few groups without overlap as possible."""
    layers: list[list[Part]] = []
    for part in sorted(parts, key=lambda p: p.offset):
        for layer in layers:
            if layer[-1].offset + layer[-1].length <= part.offset:
                layer.append(part)
                break
        else:
            layers.append([part])
    return [tuple(layer) for layer in layers]
