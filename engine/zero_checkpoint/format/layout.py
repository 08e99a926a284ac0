"""The image of one rank's file, as a pure function of its pieces.

The file is a valid safetensors file: eight bytes of header length, a JSON header, the data. The
pieces follow each other without holes.

The format is https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.dtypes import byte_view, name_of
from zero_checkpoint.format.fragments import Ints, run_lengths
from zero_checkpoint.format.pieces import BUFFER, OTHER, State, TensorId, TensorInfo
from zero_checkpoint.format.table import Extents, extents, table_of, uncollected

PAGE_BYTES = 4096
_MOST_BLOCKS = 1 << 20
_USUAL_BLOCK, _LONGEST_BLOCK = 32 << 10, 4 << 20
LENGTH_BYTES = 8
"""The safetensors prefix: the header's length, little-endian."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The bytes of one rank's file: `head` (length, header, padding), then `data`."""

    head: bytes
    data: tuple[Tensor, ...]
    """The pieces in order, as uint8 vectors. Pieces that are adjacent both in memory and in the
    file are one: a model of many small tensors is copied in long runs of its flat buffers."""
    columns: Mapping[str, Ints]
    """The fragments of this file by the names in `Fragments`, without the file's own index."""
    size_bytes: int
    changing: frozenset[int] = frozenset()
    """The addresses of memory that a forward or the script may write to: of buffers, of tensors
    that belong to neither a model nor an optimizer, and `State.visible`."""


def parts(layout: FileLayout) -> Iterator[Tensor]:
    """The bytes of a file in order, as uint8 vectors on the device of their tensors."""
    yield torch.frombuffer(bytearray(layout.head), dtype=torch.uint8)
    yield from layout.data


def block_bytes_for(tensors: Mapping[TensorId, TensorInfo]) -> int:
    """Bytes of a block, the unit in which a checkpoint is hashed, and verified on load."""
    # A rank that needs a part of a block reads the whole block, at both ends of each run that it
    # owns, and it owns a run of every unit and kind: the bytes read beyond the checkpoint grow with
    # the blocks. So blocks are as short as the manifest can afford, at 11 characters for each.
    # Eight ranks read 1.008 times gpt2 with Adam (1.5 GB, 32 KiB); with 4 MiB, 1.9 times.
    table = table_of(tensors)
    total = int((table.numels * table.itemsizes).sum())
    # Blocks below 32 KiB slow hashing and reading down, so only very small tensors get them.
    a_64th = total // (64 * max(len(tensors), 1))  # of a tensor, on average
    shortest = min(max(_power_of_two(a_64th // 2), PAGE_BYTES), _USUAL_BLOCK)
    return min(max(_power_of_two(total // _MOST_BLOCKS), shortest), _LONGEST_BLOCK)


def _power_of_two(number: int) -> int:
    """The smallest power of two above a number."""
    return 1 << number.bit_length()


@uncollected()
def lay_out(state: State, comment: Mapping[str, str]) -> FileLayout:
    """The file of the rank that owns `state.pieces`; `comment` goes into its header.

    Raises:
        CheckpointError: A piece cannot be stored, see `extents`, or its dtype or kind cannot.
    """
    table = table_of(state.tensors)
    given = extents(state.pieces, table)
    # Pieces that are not empty. Widest elements first, so that each is aligned; then by kind, in
    # the order of the table: a rank that owned a long interval of the flat state owns few long runs
    # of the file, whatever the next world size is.
    order = np.lexsort((given.start, given.tensor, table.kinds[given.tensor], -given.itemsize))
    order = order[given.length[order] > 0]
    placed = Extents(*(column[order] for column in given))
    size = placed.length * placed.itemsize
    begin = np.cumsum(size) - size
    pieces = [state.pieces[row] for row in order.tolist()]
    header: dict[str, object] = {"__metadata__": {"format": "pt", **comment}}
    # Many tensors have few dtypes; one that cannot be stored is refused here.
    names = {dtype: name_of(dtype) for dtype in {info.dtype for info in table.values()}}
    whole = placed.length == table.numels[placed.tensor]
    numbers = (column.tolist() for column in (placed.length, whole, begin, begin + size))
    for (tensor, start, _), length, is_whole, *offsets in zip(pieces, *numbers, strict=True):
        info, key = table[tensor], str(tensor)
        # The true shape where the piece is the whole tensor, else a vector.
        shape = info.shape if is_whole else (length,)
        key = key if is_whole else f"{key}@{start}"
        if key in header:
            raise CheckpointError(f"piece {key!r} is there twice; a rank owns an element once")
        header[key] = {"dtype": names[info.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces, so that the data begin on a page, as direct reads want it.
    padded = -(-(LENGTH_BYTES + len(text)) // PAGE_BYTES) * PAGE_BYTES - LENGTH_BYTES
    head = padded.to_bytes(LENGTH_BYTES, "little") + text.ljust(padded)
    # Pieces that follow each other in the file become one vector if they do so in memory.
    follows = placed.memory[1:] == placed.memory[:-1]
    follows &= placed.address[1:] == placed.address[:-1] + size[:-1]
    heads, sizes = run_lengths(follows, size)
    data = tuple(
        byte_view(pieces[row].data).as_strided((count,), (1,))
        for row, count in zip(heads.tolist(), sizes.tolist(), strict=True)
    )
    columns = {
        "tensor": placed.tensor,
        "start": placed.start,
        "length": placed.length,
        "offset": len(head) + begin,
    }
    passing = [piece.data for piece in pieces if piece.id.kind in (BUFFER, OTHER)]
    changing = state.visible.union(each.untyped_storage().data_ptr() for each in passing)
    return FileLayout(head, data, columns, len(head) + int(size.sum()), changing)
