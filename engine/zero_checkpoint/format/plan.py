"""What a rank reads: from wanted runs of elements to ranges of files, as a pure function.

A change of world size, or of ZeRO stage, is nothing but this intersection of intervals. The
unit of reading is a block, because the block is the unit of verification: touched blocks that
follow each other are read together, with one scattered read that puts the wanted bytes straight
into the target tensors and the others (at the edges of a run) into scratch memory. So the number
of reads does not depend on how short the blocks are. What follows each other both in the file and
in memory is one part, so neither does it depend on how small the tensors are.

Must always hold: every wanted element comes from exactly one part of one read; the parts of a
read are in ascending order and do not overlap.

Called by `reader`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zero_checkpoint.format.extents import Extents
from zero_checkpoint.format.fragments import Fragments, Ints, run_lengths

READ_BYTES = 4 << 20
"""Of one read: a disk needs no longer ones to be at its fastest."""


class Part(NamedTuple):
    """Bytes [at, at + length) of the `want`-th target lie at `offset` in the file.

    They may reach beyond the end of that target, into those that follow it in memory.
    """

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
    wants: Extents,
    fragments: Fragments,
    n_tensors: int,
    block_bytes: int,
    most_bytes: int = READ_BYTES,
) -> list[Read]:
    """The reads that fill all wants, by file and position.

    What two wants share byte by byte (a tied tensor wanted under two names) is read once for
    each, after the rest of its file.

    Args:
        wants: Of the manifest's tensors, in bounds; empty ones are skipped.
        fragments: Sorted by (tensor, start), covering every tensor once.
        n_tensors: How many tensors the fragments know.
        block_bytes: Of the manifest.
        most_bytes: Of one read; but one block at least.
    """
    files: dict[int, list[Part]] = defaultdict(list)
    for file, *part in _joined(_intersect(wants, fragments, n_tensors), wants).T.tolist():
        files[file].append(Part(*part))
    most_blocks = max(most_bytes // block_bytes, 1)
    return [
        read
        for file, parts in files.items()
        for layer in _layers(parts)
        for read in cut(file, layer, block_bytes, most_blocks)
    ]


def _intersect(wants: Extents, fragments: Fragments, n_tensors: int) -> Ints:
    """What each want has in common with each fragment.

    The tensors are laid end to end, as the fragments cover them: on that one axis a want is an
    interval, and those fragments that it meets follow each other.

    Args:
        wants: As given to `plan`.
        fragments: As given to `plan`.
        n_tensors: As given to `plan`.

    Returns:
        [file and fields of `Part`, parts], by file and offset.
    """
    tensor, start, count, itemsize, _, _ = wants
    end = np.cumsum(fragments.length)
    begin = end - fragments.length
    origin = np.append(begin, 0)[np.searchsorted(fragments.tensor, np.arange(n_tensors))]
    low = origin[tensor] + start
    high = low + count
    first = np.searchsorted(end, low, side="right")
    met = np.where(count > 0, np.searchsorted(begin, high, side="left") - first, 0)
    want = np.repeat(np.arange(len(met)), met)
    row = np.arange(len(want)) + np.repeat(first - (np.cumsum(met) - met), met)
    left, right = np.maximum(low[want], begin[row]), np.minimum(high[want], end[row])
    file, width = fragments.file[row], itemsize[want]
    offset = fragments.offset[row] + (left - begin[row]) * width
    parts = np.stack([file, offset, (right - left) * width, want, (left - low[want]) * width])
    return parts[:, np.lexsort((offset, file))]


def _joined(parts: Ints, wants: Extents) -> Ints:
    """Parts that follow each other both in a file and in memory, as one."""
    file, offset, length, want, at = parts
    memory, address = wants.memory[want], wants.address[want] + at
    follows = (
        (file[1:] == file[:-1])
        & (offset[1:] == offset[:-1] + length[:-1])
        & (memory[1:] == memory[:-1])
        & (address[1:] == address[:-1] + length[:-1])
    )
    heads, lengths = run_lengths(follows, length)
    joined = parts[:, heads]
    joined[2] = lengths
    return joined


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
