"""From the bytes of a manifest to a `Manifest` that can be trusted, or an error that says why not.

A manifest decides how much memory is allocated and which bytes of which files are read, so nothing
in it is trusted: not the names (`../`), the sizes (2**63), the offsets (overlaps, gaps, beyond the
end), nor that a key is there once. Parsing allocates in proportion to the manifest itself, never to
a size that it names.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.dtypes import DTYPES
from zero_checkpoint.format.fragments import (
    COLUMNS,
    Fragments,
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
    digest_of,
    file_name,
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
from zero_contract.decoding import decode
from zero_contract.decoding import parse as parse_json

MAX_BYTES = 1 << 60
"""The largest tensor, and the largest sum of all files; keeps every sum of sizes inside 64 bits."""
_END = re.compile(rb"[0-9]+}")
"""The end of a manifest, behind the name of its last member."""
_Count = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
_Positive = Annotated[int, Meta(ge=1, le=MAX_BYTES)]
_Pages = Annotated[int, Meta(ge=PAGE_BYTES, le=MAX_BYTES)]


class _Reader(Struct):
    """The member that every reader reads first."""

    min_reader: _Positive


# In the patterns below it is \Z, because $ would match before a line break at the end as well.


class _Row(Struct, array_like=True, forbid_unknown_fields=True):
    """A row of the table of tensors."""

    kind: Annotated[str, Meta(pattern=r"^[^/]+\Z")]
    fqn: str
    dtype: str
    shape: tuple[_Count, ...]


class _File(Struct):
    name: str
    size_bytes: _Count
    data_offset: _Pages
    xxh3_64: str


class _Columns(Struct):
    tensor: str
    file: str
    start: str
    length: str
    offset: str


class _Record(Struct):
    """The members of a manifest."""

    step: _Count
    round: _Count
    nonce: Annotated[str, Meta(pattern=r"^[0-9a-f]{4}\Z")]
    tag: str
    world: _Positive
    tensors: list[_Row]
    aliases: dict[str, str]
    files: list[_File]
    fragments: _Columns
    meta: dict[str, Any]
    block_bytes: _Pages
    runs: tuple[str, ...] = ()


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
    digest = digest_of(text)
    if digest is None:
        raise ManifestError("does not match its own digest; it is truncated or damaged")
    try:
        record, table, known = _members(text)
        manifest = _manifest(record, known)
    except ManifestError:
        raise
    except (ValueError, RecursionError, OverflowError) as error:
        raise ManifestError(f"is not readable: {error}") from error
    if table:
        remember_table(table, table_of(manifest.tensors))
    return replace(manifest, digest=digest, text=text)


def _members(text: bytes) -> tuple[dict[str, Any], str, TensorTable | None]:
    """The members of a manifest, the text of its table of tensors, and the table if it is known."""
    # All checkpoints of a run have the same table, which is most of the text: it is cut out, and
    # not parsed again. A text that is a whole array, followed by the end of the outermost object,
    # is no other member, and nothing inside one.
    head, key, rest = text.rpartition(b',"tensors":')
    table, world, end = rest.rpartition(b',"world":')
    try:
        words = table.decode() if _END.fullmatch(end) else ""
        known = known_table(words)
        rows = [] if known is not None else parse_json(words, wide=True)
    except ValueError:  # it was cut elsewhere, such as in a text of the script's: parse all of it
        return parse_json(text, wide=True), "", None
    record = parse_json(head + key + b"[]" + world + end, wide=True)
    return {**record, "tensors": rows}, words, known


def _manifest(record: dict[str, Any], known: TensorTable | None) -> Manifest:
    if (needed := decode(_Reader, record, "the manifest", ManifestError).min_reader) > FORMAT:
        raise NewerFormatError(
            f"needs a reader of format {needed}, this release reads up to {FORMAT}; "
            "upgrade zero-elastic to load it"
        )
    found = decode(_Record, record, "the manifest", ManifestError)
    tensors = known if known is not None else _tensors(found.tensors)
    files = _files(found.files, found.block_bytes)
    if (total := sum(file.size_bytes for file in files)) > MAX_BYTES:
        raise ManifestError(f"the size of all files is {total}; expected at most 2**60")
    if len(files) != found.world:
        raise ManifestError(f"names {len(files)} files for {found.world} ranks")
    stored = {tensor.fqn for tensor in tensors} if found.aliases else set()
    for name, target in found.aliases.items():
        if name in stored or target not in stored:
            raise ManifestError(f"aliases[{name!r}] = {target!r} is not a name of a stored tensor")
    return Manifest(
        step=found.step,
        round=found.round,
        nonce=found.nonce,
        tag=found.tag,
        world=found.world,
        tensors=tensors,
        aliases=found.aliases,
        files=files,
        fragments=_fragments(found.fragments, tensors, files),
        meta=found.meta,
        block_bytes=found.block_bytes,
        runs=found.runs,
    )


def _tensors(rows: list[_Row]) -> TensorTable:
    table = TensorTable()
    known: dict[tuple[str, tuple[int, ...]], TensorInfo] = {}  # tensors are many, shapes are few
    for position, row in enumerate(rows):
        if (info := known.get(key := (row.dtype, row.shape))) is None:
            info = known[key] = _info(*key, position)
        table[TensorId(row.kind, row.fqn)] = info
        # A row that has replaced another one: positions, which fragments name, would be off by one.
        if len(table) == position:
            raise ManifestError(f"tensors[{position}]: {row.kind}/{row.fqn} is there twice")
    return table


def _info(name: str, dims: tuple[int, ...], position: int) -> TensorInfo:
    dtype = DTYPES.get(name)
    if dtype is None:
        known = ", ".join(DTYPES)
        raise ManifestError(f"tensors[{position}]: unknown dtype {name!r}; known are {known}")
    volume = dtype.itemsize
    for dim in dims:
        volume *= dim or 1  # a 0 must not hide the product of the others: reshape overflows on it
        if volume > MAX_BYTES:
            raise ManifestError(f"tensors[{position}]: size in bytes is more than 2**60")
    return TensorInfo(dims, dtype)


def _files(records: list[_File], block_bytes: int) -> tuple[FileRecord, ...]:
    files = []
    for rank, one in enumerate(records):
        name, size = one.name, one.size_bytes
        if name != file_name(rank):  # refuses "../x", absolute names and repetitions alike
            raise ManifestError(f"files[{rank}].name is {name!r}, not {file_name(rank)!r}")
        if one.data_offset % PAGE_BYTES or one.data_offset > size:
            raise ManifestError(
                f"{name}: data_offset {one.data_offset} is not a page of {size} bytes"
            )
        digests = unpack(one.xxh3_64, "<u8")
        if len(digests) != -(-size // block_bytes):
            raise ManifestError(f"{name}: {len(digests)} digests do not fit {size} bytes")
        files.append(FileRecord(name, size, one.data_offset, digests))
    return tuple(files)


def _fragments(packed: _Columns, tensors: TensorTable, files: tuple[FileRecord, ...]) -> Fragments:
    columns = {name: unpack(getattr(packed, name), "<i8") for name in COLUMNS}
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
    # The fragments of every file tile its data, without gaps or overlaps. Lengths are known to be
    # within their tensors, so a length in bytes cannot overflow.
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
    return fragments
