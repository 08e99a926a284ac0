"""From the bytes of a manifest to a `Manifest` that can be trusted, or a sentence why not.

A manifest decides how much memory is allocated and which bytes of which files are read, so
nothing in it is believed: not the names (`../`), the sizes (2**63), the offsets (overlaps,
gaps, beyond the end), nor that a key is there once.

Must always hold: parsing allocates in proportion to the manifest itself, never to a size that
it names, and opens no other file.

Called by `candidates` and `restore`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.read_retry import patiently
from zero_checkpoint.format.bulk import uncollected
from zero_checkpoint.format.dtypes import DTYPES
from zero_checkpoint.format.fragments import (
    COLUMNS,
    Fragments,
    Ints,
    check_cover,
    first_break,
    from_lists,
)
from zero_checkpoint.format.layout import PAGE_BYTES
from zero_checkpoint.format.manifest import (
    FORMAT,
    TOMBSTONE,
    FileRecord,
    Manifest,
    file_name,
    split_envelope,
    unpack,
)
from zero_checkpoint.format.pieces import TensorId, TensorInfo
from zero_checkpoint.format.table import TensorTable, known_table, remember_table, table_of
from zero_checkpoint.place import Place

MAX_MANIFEST_BYTES = 1 << 30
MAX_BYTES = 1 << 60
"""No tensor is larger, nor all files together; keeps every sum of sizes inside 64 bits."""
_NONCE = re.compile(r"[0-9a-f]{4}")
_END = re.compile(rb"[0-9]+}")
"""Of a manifest, behind the name of its last member."""


class ManifestError(CheckpointError):
    """The manifest is not one that was written whole by a release this one can read."""


class NewerFormatError(ManifestError):
    """The manifest asks for a newer reader."""


class RemovedError(ManifestError):
    """A tombstone is in its place."""


def read_manifest(path: Place) -> Manifest:
    """The manifest at `path`, wholly validated.

    Raises:
        ManifestError: It is damaged, hostile or too new; the message says where.
        OSError: It could not be read (FileNotFoundError: the checkpoint is not committed).
    """
    text = patiently(_text, path)
    try:
        manifest = parse(text)
    except ManifestError as error:
        raise type(error)(f"{path}: {error}") from error
    if manifest.directory != path.parent.name:
        raise ManifestError(
            f"{path}: written for the directory {manifest.directory!r}; "
            "move it back there to use it"
        )
    return manifest


def _text(path: Place) -> bytes:
    """What may be a manifest; raises as `read_manifest`."""
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise ManifestError(f"{path}: larger than {MAX_MANIFEST_BYTES} bytes; not a manifest")
    if isinstance(path, Path) and not path.is_file():  # a pipe or a device may have no end
        raise ManifestError(f"{path}: no regular file; not a manifest")
    return path.read_bytes()


@uncollected()
def parse(text: bytes) -> Manifest:
    """The manifest in a text.

    Raises:
        ManifestError: As `read_manifest`, without the path.
    """
    if text == TOMBSTONE:
        raise RemovedError("this checkpoint is being removed")
    envelope = split_envelope(text)
    if envelope is None:
        raise ManifestError("does not match its own digest; it is truncated or damaged")
    digest, _ = envelope
    try:
        record, table, known = _members(text)
        manifest = _manifest(_Fields(record, "manifest"), known)
    except ManifestError:
        raise
    except (ValueError, RecursionError, OverflowError) as error:
        raise ManifestError(f"is not readable: {error}") from error
    if table:
        remember_table(table, table_of(manifest.tensors))
    return replace(manifest, digest=digest, text=text)


def _members(text: bytes) -> tuple[dict[str, Any], str, TensorTable | None]:
    """The members of a manifest, the text of its table of tensors, and that if it is known.

    A known table is not among the members. Its text is a whole array, and what is behind it here
    ends the outermost object: so it is no other member, and nothing inside one. Where that is not
    so, the text is "".
    """
    head, key, rest = text.rpartition(b',"tensors":')
    table, world, end = rest.rpartition(b',"world":')
    try:
        words = table.decode() if _END.fullmatch(end) else ""
        known = known_table(words)
        rows = [] if known is not None else json.loads(words, object_pairs_hook=_once)
    except ValueError:
        return json.loads(text, object_pairs_hook=_once), "", None
    record = json.loads(head + key + b"[]" + world + end, object_pairs_hook=_once)
    return {**record, "tensors": rows}, words, known


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ManifestError(f"key {twice!r} is there twice")
    return record


class _Fields:
    """The members of one JSON object, each taken with its type checked."""

    def __init__(self, record: object, where: str) -> None:
        if type(record) is not dict:
            raise ManifestError(f"{where} is no JSON object")
        self._record = record
        self._where = where

    def take(self, name: str, kind: type) -> Any:
        value = self._record.get(name)
        if type(value) is not kind:  # not isinstance: True is no number here
            raise ManifestError(f"{self._where}.{name} is not of type {kind.__name__}")
        return value

    def count(self, name: str, *, at_least: int = 0) -> int:
        value: int = self.take(name, int)
        if not _is_count(value, at_least):
            raise _unbounded(value, f"{self._where}.{name}", at_least)
        return value


def _is_count(value: object, at_least: int = 0) -> bool:
    return type(value) is int and at_least <= value <= MAX_BYTES


def _unbounded(value: object, where: str, at_least: int = 0) -> ManifestError:
    return ManifestError(f"{where} is {value!r}; expected {at_least} .. 2**60")


def _manifest(fields: _Fields, known: TensorTable | None) -> Manifest:
    _check_version(fields)
    tensors = known if known is not None else _tensors(fields.take("tensors", list))
    block_bytes = fields.count("block_bytes", at_least=PAGE_BYTES)
    files = _files(fields.take("files", list), block_bytes)
    if (total := sum(file.size_bytes for file in files)) > MAX_BYTES:
        raise _unbounded(total, "the size of all files")
    world = fields.count("world", at_least=1)
    if len(files) != world:
        raise ManifestError(f"names {len(files)} files for {world} ranks")
    nonce = fields.take("nonce", str)
    if not _NONCE.fullmatch(nonce):
        raise ManifestError(f"manifest.nonce {nonce!r} is not four hex digits")
    return Manifest(
        step=fields.count("step"),
        round=fields.count("round"),
        nonce=nonce,
        tag=fields.take("tag", str),
        world=world,
        tensors=tensors,
        aliases=_aliases(fields.take("aliases", dict), tensors),
        files=files,
        fragments=_fragments(_columns(fields), tensors, files),
        meta=fields.take("meta", dict),
        block_bytes=block_bytes,
    )


def _check_version(fields: _Fields) -> None:
    needed = fields.count("min_reader", at_least=1)
    if needed > FORMAT:
        raise NewerFormatError(
            f"needs a reader of format {needed}, this release reads up to {FORMAT}; "
            "upgrade zero-elastic to load it"
        )


def _tensors(rows: list[Any]) -> TensorTable:
    table = TensorTable()
    known: dict[str, TensorInfo] = {}  # tensors are many, their shapes are few
    for position, row in enumerate(rows):
        kind, fqn, name, dims = _checked_row(row, position)
        if (info := known.get(key := f"{name}{dims}")) is None:
            info = known[key] = _info(name, dims, position)
        table[TensorId(kind, fqn)] = info
        if len(table) == position:
            raise ManifestError(f"tensors[{position}]: {kind}/{fqn} is there twice")
    return table


_ROW = [str, str, str, list]


def _checked_row(row: Any, position: int) -> list[Any]:
    """The columns of a row, each of its type."""
    if type(row) is not list or [*map(type, row)] != _ROW or not row[0] or "/" in row[0]:
        raise ManifestError(f"tensors[{position}] is not [kind, fqn, dtype, shape]")
    return row


def _info(name: str, dims: list[Any], position: int) -> TensorInfo:
    dtype = DTYPES.get(name)
    if dtype is None:
        known = ", ".join(DTYPES)
        raise ManifestError(f"tensors[{position}]: unknown dtype {name!r}; known are {known}")
    volume = dtype.itemsize
    for dim in dims:
        if not _is_count(dim):
            raise _unbounded(dim, f"tensors[{position}].shape")
        volume *= dim or 1  # a zero must not hide what the others come to: reshape overflows on it
        if volume > MAX_BYTES:
            raise _unbounded(volume, f"tensors[{position}]: size in bytes")
    return TensorInfo(tuple(dims), dtype)


def _aliases(aliases: dict[str, Any], tensors: TensorTable) -> dict[str, str]:
    stored = {tensor.fqn for tensor in tensors} if aliases else set()
    for name, target in aliases.items():
        if name in stored or type(target) is not str or target not in stored:
            raise ManifestError(f"aliases[{name!r}] = {target!r} is not a name of a stored tensor")
    return aliases


def _files(records: list[Any], block_bytes: int) -> tuple[FileRecord, ...]:
    return tuple(
        _file(_Fields(record, f"files[{rank}]"), rank, block_bytes)
        for rank, record in enumerate(records)
    )


def _file(fields: _Fields, rank: int, block_bytes: int) -> FileRecord:
    name, size = fields.take("name", str), fields.count("size_bytes")
    if name != file_name(rank):  # refuses "../x", absolute names and repetitions alike
        raise ManifestError(f"files[{rank}].name is {name!r}, not {file_name(rank)!r}")
    data_offset = fields.count("data_offset", at_least=PAGE_BYTES)
    if data_offset % PAGE_BYTES or data_offset > size:
        raise ManifestError(f"{name}: data_offset {data_offset} is no page inside {size} bytes")
    digests = unpack(fields.take("xxh3_64", str), "<u8")
    if len(digests) != -(-size // block_bytes):
        raise ManifestError(f"{name}: {len(digests)} digests do not fit {size} bytes")
    return FileRecord(name, size, data_offset, digests)


def _columns(fields: _Fields) -> Mapping[str, Ints]:
    """The columns of the fragments: packed, in format 1 lists."""
    read = _listed if fields.count("format") == 1 else _packed
    members = _Fields(fields.take("fragments", dict), "fragments")
    return {name: read(members, name) for name in COLUMNS}


def _packed(fields: _Fields, name: str) -> Ints:
    return unpack(fields.take(name, str), "<i8")


def _listed(fields: _Fields, name: str) -> Ints:
    column = fields.take(name, list)
    if not set(map(type, column)) <= {int}:
        raise ManifestError(f"fragments.{name} holds something else than integers")
    return np.array(column, dtype=np.int64)  # OverflowError beyond 64 bits


def _fragments(
    columns: Mapping[str, Ints], tensors: TensorTable, files: tuple[FileRecord, ...]
) -> Fragments:
    if len({len(column) for column in columns.values()}) != 1:
        raise ManifestError("fragments: the columns differ in length")
    fragments = from_lists(columns)
    _check_bounds(fragments, tensors, files)
    gap = check_cover(fragments, tensors.numels, tensors.name)
    if gap is not None:
        raise ManifestError(f"fragments: {gap}")
    _check_packing(fragments, tensors, files)
    return fragments


def _check_bounds(
    fragments: Fragments, tensors: TensorTable, files: tuple[FileRecord, ...]
) -> None:
    limits = {"tensor": len(tensors) - 1, "file": len(files) - 1}
    for name in COLUMNS:
        column, least = getattr(fragments, name), int(name == "length")
        bad = (column < least) | (column > limits.get(name, MAX_BYTES))
        if bad.any():
            raise ManifestError(f"fragments.{name} holds {column[bad][0]}, out of bounds")


def _check_packing(
    fragments: Fragments, tensors: TensorTable, files: tuple[FileRecord, ...]
) -> None:
    """The data of every file are tiled by its fragments, without holes or overlaps.

    Lengths are within their tensors by now, so a length in bytes cannot overflow.
    """
    rows = fragments.take(np.lexsort((fragments.offset, fragments.file)))
    found = first_break(
        rows.file,
        rows.offset,
        rows.offset + rows.length * tensors.itemsizes[rows.tensor],
        np.array([file.data_offset for file in files], dtype=np.int64),
        np.array([file.size_bytes for file in files], dtype=np.int64),
    )
    if found is not None:
        problem = "leave a gap" if found.goes_on > found.covered else "overlap"
        raise ManifestError(f"{files[found.group].name}: fragments {problem} at {found.covered}")
