"""From the bytes of a manifest to a `Manifest` that can be trusted, or an error that says why not.

A manifest decides how much memory is allocated and which bytes of which files are read, so
nothing in it is trusted: not the names (`../`), the sizes (2**63), the offsets (overlaps,
gaps, beyond the end), nor that a key is there once.

Must always hold: parsing allocates in proportion to the manifest itself, never to a size that
it names, and opens no other file.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np

from zero_checkpoint.errors import CheckpointError
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
from zero_checkpoint.format.table import (
    TensorTable,
    known_table,
    remember_table,
    table_of,
    uncollected,
)

MAX_MANIFEST_BYTES = 1 << 30
MAX_BYTES = 1 << 60
"""The largest tensor, and the largest sum of all files; keeps every sum of sizes inside 64 bits."""
_NONCE = re.compile(r"[0-9a-f]{4}")
_END = re.compile(rb"[0-9]+}")
"""The end of a manifest, behind the name of its last member."""
_ROW = [str, str, str, list]
"""The types of a row of the table of tensors: kind, fqn, dtype, shape."""


class ManifestError(CheckpointError):
    """The manifest is damaged, or was written by a release that this one cannot read."""


class NewerFormatError(ManifestError):
    """The manifest asks for a newer reader."""


class RemovedError(ManifestError):
    """A tombstone is in the manifest's place: the checkpoint is being deleted."""


@uncollected()
def parse(text: bytes) -> Manifest:
    """The manifest in a text, wholly validated.

    Raises:
        ManifestError: The text is damaged, hostile or too new; the message says where.
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
    """The members of a manifest, the text of its table of tensors, and that table if it is known.

    A known table is not parsed again, and is not among the members. Its text is a whole array,
    followed by the end of the outermost object: so it is no other member, and nothing inside one.
    If the text cannot be cut out in this way, it is "".
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

    def __contains__(self, name: str) -> bool:
        return name in self._record

    def take(self, name: str, kind: type) -> Any:
        value = self._record.get(name)
        if type(value) is not kind:  # not isinstance: True is not a number here
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
    needed = fields.count("min_reader", at_least=1)
    if needed > FORMAT:
        raise NewerFormatError(
            f"needs a reader of format {needed}, this release reads up to {FORMAT}; "
            "upgrade zero-elastic to load it"
        )
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
    step, round, tag = fields.count("step"), fields.count("round"), fields.take("tag", str)
    aliases = fields.take("aliases", dict)
    stored = {tensor.fqn for tensor in tensors} if aliases else set()
    for name, target in aliases.items():
        if name in stored or type(target) is not str or target not in stored:
            raise ManifestError(f"aliases[{name!r}] = {target!r} is not a name of a stored tensor")
    return Manifest(
        step=step,
        round=round,
        nonce=nonce,
        tag=tag,
        world=world,
        tensors=tensors,
        aliases=aliases,
        files=files,
        fragments=_fragments(fields, tensors, files),
        meta=fields.take("meta", dict),
        block_bytes=block_bytes,
        runs=_runs(fields.take("runs", list) if "runs" in fields else []),
    )


def _runs(ids: list[Any]) -> tuple[str, ...]:
    if not set(map(type, ids)) <= {str}:
        raise ManifestError("manifest.runs holds something else than text")
    return tuple(ids)


def _tensors(rows: list[Any]) -> TensorTable:
    table = TensorTable()
    known: dict[str, TensorInfo] = {}  # tensors are many, their shapes are few
    for position, row in enumerate(rows):
        if type(row) is not list or [*map(type, row)] != _ROW or not row[0] or "/" in row[0]:
            raise ManifestError(f"tensors[{position}] is not [kind, fqn, dtype, shape]")
        kind, fqn, name, dims = row
        if (info := known.get(key := f"{name}{dims}")) is None:
            info = known[key] = _info(name, dims, position)
        table[TensorId(kind, fqn)] = info
        if len(table) == position:
            raise ManifestError(f"tensors[{position}]: {kind}/{fqn} is there twice")
    return table


def _info(name: str, dims: list[Any], position: int) -> TensorInfo:
    dtype = DTYPES.get(name)
    if dtype is None:
        known = ", ".join(DTYPES)
        raise ManifestError(f"tensors[{position}]: unknown dtype {name!r}; known are {known}")
    volume = dtype.itemsize
    for dim in dims:
        if not _is_count(dim):
            raise _unbounded(dim, f"tensors[{position}].shape")
        volume *= dim or 1  # a 0 must not hide the product of the others: reshape overflows on it
        if volume > MAX_BYTES:
            raise _unbounded(volume, f"tensors[{position}]: size in bytes")
    return TensorInfo(tuple(dims), dtype)


def _files(records: list[Any], block_bytes: int) -> tuple[FileRecord, ...]:
    files = []
    for rank, record in enumerate(records):
        fields = _Fields(record, f"files[{rank}]")
        name, size = fields.take("name", str), fields.count("size_bytes")
        if name != file_name(rank):  # refuses "../x", absolute names and repetitions alike
            raise ManifestError(f"files[{rank}].name is {name!r}, not {file_name(rank)!r}")
        data_offset = fields.count("data_offset", at_least=PAGE_BYTES)
        if data_offset % PAGE_BYTES or data_offset > size:
            raise ManifestError(f"{name}: data_offset {data_offset} is not a page of {size} bytes")
        digests = unpack(fields.take("xxh3_64", str), "<u8")
        if len(digests) != -(-size // block_bytes):
            raise ManifestError(f"{name}: {len(digests)} digests do not fit {size} bytes")
        files.append(FileRecord(name, size, data_offset, digests))
    return tuple(files)


def _fragments(fields: _Fields, tensors: TensorTable, files: tuple[FileRecord, ...]) -> Fragments:
    are_lists = fields.count("format") == 1
    members = _Fields(fields.take("fragments", dict), "fragments")
    columns: dict[str, Ints] = {}
    for name in COLUMNS:
        if not are_lists:
            columns[name] = unpack(members.take(name, str), "<i8")
            continue
        column = members.take(name, list)
        if not set(map(type, column)) <= {int}:
            raise ManifestError(f"fragments.{name} holds something else than integers")
        columns[name] = np.array(column, dtype=np.int64)  # OverflowError beyond 64 bits
    if len({len(column) for column in columns.values()}) != 1:
        raise ManifestError("fragments: the columns differ in length")
    fragments = from_lists(columns)
    limits = {"tensor": len(tensors) - 1, "file": len(files) - 1}
    for name in COLUMNS:
        numbers, least = getattr(fragments, name), int(name == "length")
        bad = (numbers < least) | (numbers > limits.get(name, MAX_BYTES))
        if bad.any():
            raise ManifestError(f"fragments.{name} holds {numbers[bad][0]}, out of bounds")
    gap = check_cover(fragments, tensors.numels, tensors.name)
    if gap is not None:
        raise ManifestError(f"fragments: {gap}")
    _check_packing(fragments, tensors, files)
    return fragments


def _check_packing(
    fragments: Fragments, tensors: TensorTable, files: tuple[FileRecord, ...]
) -> None:
    """Check that the fragments of every file tile its data, without gaps or overlaps.

    Lengths are known to be within their tensors, so a length in bytes cannot overflow.
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
        problem = "leave a gap" if found.next_at > found.covered else "overlap"
        raise ManifestError(f"{files[found.group].name}: fragments {problem} at {found.covered}")
