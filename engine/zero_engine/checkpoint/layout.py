"""The image of one rank's file, as a pure function of its pieces.

The file is a valid safetensors file: eight bytes of header length, a JSON header, the data. The
header is padded with spaces so that the data starts on a page, and the pieces follow each other
without holes, widest elements first, so every piece is aligned to its element. Pieces of one
kind stay together in the order of the tensor table: a rank that owned a long interval of the
flat state owns few long runs of the file, whatever the next world size is.

Must always hold: the offsets are those that the header says and that the manifest repeats.

Called by `writer` and `arena`; the format is https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from zero_engine.checkpoint.bulk import uncollected
from zero_engine.checkpoint.dtypes import byte_view, name_of
from zero_engine.checkpoint.pieces import Piece, State, TensorId, TensorInfo
from zero_engine.errors import CheckpointError

PAGE_BYTES = 4096
_MOST_BLOCKS = 1 << 20
_USUAL_BLOCK, _LONGEST_BLOCK = 32 << 10, 4 << 20
LENGTH_BYTES = 8
"""The safetensors prefix: the header's length, little-endian."""


class Placed(NamedTuple):
    """A piece, the index of its tensor, and its first byte in the file."""

    piece: Piece
    tensor: int
    offset: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """What to write: `head` (length, header, padding), then the placed pieces in order."""

    head: bytes
    placed: tuple[Placed, ...]
    size_bytes: int

    def columns(self) -> dict[str, list[int]]:
        """The fragments of this file as columns, without the file's own index."""
        return {
            "tensor": [p.tensor for p in self.placed],
            "start": [p.piece.start for p in self.placed],
            "length": [p.piece.data.numel() for p in self.placed],
            "offset": [p.offset for p in self.placed],
        }


def parts(layout: FileLayout) -> Iterator[Tensor]:
    """The bytes of a file in order, as few uint8 vectors wherever they are: the head, the pieces.

    Pieces that follow each other in memory as they do in the file are one vector: a model of many
    small tensors is copied in long runs of its flat buffers.
    """
    yield torch.frombuffer(bytearray(layout.head), dtype=torch.uint8)
    run: list[Tensor] = []
    for placed in layout.placed:
        piece = byte_view(placed.piece.data)
        if run and not _follows(piece, run[-1]):
            yield _joined(run)
            run = []
        run.append(piece)
    if run:
        yield _joined(run)


def _follows(piece: Tensor, last: Tensor) -> bool:
    same = piece.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return same and piece.data_ptr() == last.data_ptr() + last.numel()


def _joined(run: Sequence[Tensor]) -> Tensor:
    return run[0].as_strided((sum(piece.numel() for piece in run),), (1,))


def numel(info: TensorInfo) -> int:
    """Elements of the whole tensor; 1 for a 0-d one."""
    return math.prod(info.shape)


def block_bytes_for(tensors: Mapping[TensorId, TensorInfo]) -> int:
    """How large the blocks are that a checkpoint is hashed, and verified on load, by.

    Whoever needs a part of a block reads all of it, at both ends of each run that it owns, and a
    rank owns a run of every unit and kind: what is read beyond the checkpoint is in proportion
    to the blocks. So they are as short as the manifest can afford, with 11 characters for each,
    and shorter than hashing and reading like it only where tensors are so small that it shows.
    Eight ranks read 1.008 times gpt2 with Adam (1.5 GB, 32 KiB); with 4 MiB it would be 1.9 times.
    """
    total = sum(numel(info) * info.dtype.itemsize for info in tensors.values())
    a_64th = total // (64 * max(len(tensors), 1))  # of a tensor, on average
    shortest = min(max(_power_of_two(a_64th // 2), PAGE_BYTES), _USUAL_BLOCK)
    return min(max(_power_of_two(total // _MOST_BLOCKS), shortest), _LONGEST_BLOCK)


def _power_of_two(number: int) -> int:
    """The smallest that is larger."""
    return 1 << number.bit_length()


@uncollected()
def lay_out(state: State, comment: Mapping[str, str]) -> FileLayout:
    """The file of the rank that owns `state.pieces`; `comment` goes into its header.

    Raises:
        CheckpointError: A piece is of no known tensor, leaves its bounds, is not a contiguous
            vector of the tensor's dtype, or that dtype cannot be stored.
    """
    index = {tensor: position for position, tensor in enumerate(state.tensors)}
    for piece in state.pieces:
        check_piece(piece, state.tensors)
    ordered = _in_file_order(state, index)
    sizes = [p.data.numel() * p.data.element_size() for p in ordered]
    ends = list(accumulate(sizes, initial=0))
    head = _head(ordered, ends, state.tensors, comment)
    placed = tuple(
        Placed(piece, index[piece.id], len(head) + begin)
        for piece, begin in zip(ordered, ends[:-1], strict=True)
    )
    return FileLayout(head, placed, len(head) + ends[-1])


def check_piece(piece: Piece, tensors: Mapping[TensorId, TensorInfo]) -> None:
    """Raises CheckpointError unless the piece is a storable run of a tensor of the table."""
    info, data = tensors.get(piece.id), piece.data
    if info is None:
        problem = "is not in the table of tensors"
    elif not piece.id.kind or "/" in piece.id.kind:
        problem = "has a kind that is empty or contains '/'"
    elif data.dtype != info.dtype:
        problem = f"is {data.dtype}, its tensor {info.dtype}"
    elif data.dim() != 1 or not data.is_contiguous():
        problem = f"has shape {tuple(data.shape)}, strides {data.stride()}; flatten it first"
    elif piece.start < 0 or piece.start + data.numel() > numel(info):
        problem = f"leaves the {numel(info)} elements of its tensor"
    else:
        return
    raise CheckpointError(f"piece {describe(piece.id, piece.start, data.numel())} {problem}")


def describe(tensor: TensorId, start: int, length: int) -> str:
    """A run of elements as messages name it: `kind/fqn[start:end]`."""
    return f"{tensor.kind}/{tensor.fqn}[{start}:{start + length}]"


def _in_file_order(state: State, index: Mapping[TensorId, int]) -> list[Piece]:
    """Non-empty pieces: widest elements first, then by kind, then as in the table."""
    kinds = {kind: n for n, kind in enumerate(dict.fromkeys(t.kind for t in state.tensors))}
    return sorted(
        (piece for piece in state.pieces if piece.data.numel()),
        key=lambda p: (-p.data.element_size(), kinds[p.id.kind], index[p.id], p.start),
    )


def _head(
    pieces: Sequence[Piece],
    ends: Sequence[int],
    tensors: Mapping[TensorId, TensorInfo],
    comment: Mapping[str, str],
) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **comment}}
    for piece, begin, end in zip(pieces, ends[:-1], ends[1:], strict=True):
        key, shape = _entry(piece, tensors[piece.id])
        if key in header:
            raise CheckpointError(f"piece {key!r} is there twice; a rank owns an element once")
        dtype = name_of(piece.data.dtype)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    padded = -(-(LENGTH_BYTES + len(text)) // PAGE_BYTES) * PAGE_BYTES - LENGTH_BYTES
    return padded.to_bytes(LENGTH_BYTES, "little") + text.ljust(padded)


def _entry(piece: Piece, info: TensorInfo) -> tuple[str, list[int]]:
    """Key and shape: the true shape when the piece is the whole tensor, else a vector."""
    key = f"{piece.id.kind}/{piece.id.fqn}"
    if piece.data.numel() == numel(info):
        return key, list(info.shape)
    return f"{key}@{piece.start}", [piece.data.numel()]
