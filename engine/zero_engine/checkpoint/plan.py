"""What a rank reads: from wanted runs of elements to ranges of files, as a pure function.

A change of world size, or of ZeRO stage, is nothing but this intersection of intervals. The
unit of reading is a block, because the block is the unit of verification: touched blocks that
follow each other are read together, with one scattered read that puts the wanted bytes straight
into the target tensors and the others (at the edges of a run) into scratch memory. So the number
of reads does not depend on how short the blocks are.

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

READ_BYTES = 4 << 20
"""Of one read: a disk needs no longer ones to be at its fastest."""


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
class Read:
    """Read some blocks of one file whole: the parts to their targets, the rest to scratch."""

    file: int
    blocks: range
    parts: tuple[Part, ...]


def plan(
    wants: Sequence[Want],
    fragments: Fragments,
    n_tensors: int,
    block_bytes: int,
    most_bytes: int = READ_BYTES,
) -> list[Read]:
    """The reads that fill all wants, by file and position.

    What two wants share byte by byte (a tied tensor wanted under two names) is read once for
    each, after the rest of its file.

    Args:
        wants: In bounds of their tensors; empty ones are skipped.
        fragments: Sorted by (tensor, start), covering every tensor once.
        n_tensors: How many tensors the fragments know.
        block_bytes: Of the manifest.
        most_bytes: Of one read; but one block at least.
    """
    first = np.searchsorted(fragments.tensor, np.arange(n_tensors + 1))
    files: dict[int, list[Part]] = defaultdict(list)
    for number, want in enumerate(wants):
        for file, part in _parts(number, want, fragments, first):
            files[file].append(part)
    most_blocks = max(most_bytes // block_bytes, 1)
    return [
        read
        for file, parts in sorted(files.items())
        for layer in _layers(parts)
        for read in cut(file, layer, block_bytes, most_blocks)
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


def _layers(parts: list[Part]) -> list[list[Part]]:
    """The parts of one file, sorted, in as few groups without overlap as possible."""
    layers: list[list[Part]] = []
    for part in sorted(parts, key=lambda p: p.offset):
        for layer in layers:
            if layer[-1].offset + layer[-1].length <= part.offset:
                layer.append(part)
                break
        else:
            layers.append([part])
    return layers


def cut(file: int, parts: Sequence[Part], block_bytes: int, most_blocks: int) -> Iterator[Read]:
    """Parts of one file, ascending and without overlap, as reads of consecutive blocks."""
    first = stop = 0
    held: list[Part] = []
    for part in parts:
        while part.length:
            block = part.offset // block_bytes
            if held and (block > stop or block >= first + most_blocks):
                yield Read(file, range(first, stop), tuple(held))
                held = []
            if not held:
                first = block
            head, part = _split(part, (first + most_blocks) * block_bytes)  # noqa: PLW2901
            held.append(head)
            stop = (head.offset + head.length - 1) // block_bytes + 1
    if held:
        yield Read(file, range(first, stop), tuple(held))


def _split(part: Part, at: int) -> tuple[Part, Part]:
    """The part before a byte of the file, and the part from there on."""
    size = min(part.length, at - part.offset)
    rest = Part(part.offset + size, part.length - size, part.want, part.at + size)
    return Part(part.offset, size, part.want, part.at), rest
