"""Plan of a rank's reads: from wanted runs of elements to ranges of files, as a pure function.

A change of world size, or of ZeRO stage (resharding), is nothing but this intersection of
intervals. The unit of reading is a block, because the block is the unit of verification: blocks
that follow each other are read together, with one scattered read that puts the wanted bytes
straight into the target tensors and the others (at the edges of a run) into scratch memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zero_checkpoint.format.fragments import Fragments, Ints, run_lengths
from zero_checkpoint.format.table import Extents

READ_BYTES = 4 << 20
"""Bytes of one read: a disk needs no longer reads to be at its fastest."""


class PlannedPart(NamedTuple):
    """Bytes [at, at + length) of the `want`-th target are at `offset` in the file.

    A part may extend beyond the end of its target, into the targets that follow it in memory.
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
    parts: tuple[PlannedPart, ...]


def plan(
    wants: Extents,
    fragments: Fragments,
    n_tensors: int,
    block_bytes: int,
    most_bytes: int = READ_BYTES,
) -> list[Read]:
    """The reads that fill all wants, by file and position.

    Bytes that two wants share (a tied tensor wanted under two names) are read once for each of
    them, after the rest of the file.

    Wants are in bounds, and empty ones are skipped. Fragments are sorted by (tensor, start), and
    cover each of `n_tensors` once. A read takes at most `most_bytes`, but at least one block.
    """
    files: dict[int, list[PlannedPart]] = defaultdict(list)
    for file, *part in _intersect(wants, fragments, n_tensors).T.tolist():
        files[file].append(PlannedPart(*part))
    most_blocks = max(most_bytes // block_bytes, 1)
    reads: list[Read] = []
    for file, parts in files.items():
        # The parts of a file in as few groups without overlap as possible.
        layers: list[list[PlannedPart]] = []
        for each in sorted(parts, key=lambda p: p.offset):
            for layer in layers:
                if layer[-1].offset + layer[-1].length <= each.offset:
                    layer.append(each)
                    break
            else:
                layers.append([each])
        for layer in layers:
            reads += cut(file, layer, block_bytes, most_blocks)
    return reads


def _intersect(wants: Extents, fragments: Fragments, n_tensors: int) -> Ints:
    """The intersection of each want with each fragment, by file and offset.

    [file and fields of `PlannedPart`, parts]; parts that are adjacent both in a file and in memory
    are one.
    """
    # The tensors are laid end to end, as the fragments cover them: on that one axis a want is an
    # interval, and the fragments that it intersects are consecutive. Of fragments [0, 4), [4, 8),
    # [8, 10), a want [3, 9) meets the `first` = 0 and the two after it: `met` = 3 rows, of 1, 4 and
    # 1 elements.
    tensor, start, count, itemsize, _, _ = wants
    end = np.cumsum(fragments.length)
    begin = end - fragments.length
    # Where each tensor begins on the axis; the 0 is for empty ones at the end, without fragments.
    origin = np.append(begin, 0)[np.searchsorted(fragments.tensor, np.arange(n_tensors))]
    low = origin[tensor] + start
    high = low + count
    first = np.searchsorted(end, low, side="right")
    met = np.where(count > 0, np.searchsorted(begin, high, side="left") - first, 0)
    # From here on one row for each pair of a want and a fragment.
    want = np.repeat(np.arange(len(met)), met)
    row = np.arange(len(want)) + np.repeat(first - (np.cumsum(met) - met), met)
    left, right = np.maximum(low[want], begin[row]), np.minimum(high[want], end[row])
    file, width = fragments.file[row], itemsize[want]
    offset = fragments.offset[row] + (left - begin[row]) * width
    parts = np.stack([file, offset, (right - left) * width, want, (left - low[want]) * width])
    parts = parts[:, np.lexsort((offset, file))]
    file, offset, length, want, at = parts
    memory, address = wants.memory[want], wants.address[want] + at
    # One part: so the number of reads does not depend on the size of the tensors.
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


def cut(
    file: int, parts: Sequence[PlannedPart], block_bytes: int, most_blocks: int
) -> Iterator[Read]:
    """Parts of one file, ascending and without overlap, as reads of consecutive blocks."""
    first = stop = 0
    held: list[PlannedPart] = []
    for offset, length, want, at in parts:
        end = offset + length
        begin = offset
        while begin < end:
            block = begin // block_bytes
            # A read has no gap, and does not become longer than a disk needs.
            if held and (block > stop or block >= first + most_blocks):
                yield Read(file, range(first, stop), tuple(held))
                held = []
            if not held:
                first = block
            until = min(end, (first + most_blocks) * block_bytes)
            held.append(PlannedPart(begin, until - begin, want, at + begin - offset))
            stop = (until - 1) // block_bytes + 1
            begin = until
    if held:
        yield Read(file, range(first, stop), tuple(held))
