"""The content of MANIFEST.json: the records, their JSON, and the checksum over all of it.

The text is one JSON object whose first member is the SHA-256 of all the bytes behind it:

    {"digest":"<64 hex>","files":...,"format":2,...}

Every byte of the file is thus covered. `parse` is the only way to read a manifest.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.fragments import COLUMNS, Fragments
from zero_checkpoint.format.pieces import TensorId, TensorInfo
from zero_checkpoint.format.table import canonical, table_of, uncollected
from zero_contract import beside

FORMAT = 2
"""The format that this release writes, and the newest that it reads."""
MIN_READER = 2
"""The oldest format a reader must know to read what this release writes: raised by a change that an
older one would misread."""
BLOCK_BYTES = 512 << 10
"""Default size of a block, the unit that is hashed, and verified on load."""
MAX_MANIFEST_BYTES = 1 << 30
MANIFEST = beside.MANIFEST
TOMBSTONE = b"removed\n"
"""In place of a manifest, in stores that cannot rename a directory: it is being deleted."""
NAME = beside.NAME
"""The name of a checkpoint's directory, see `directory_name`."""
age = beside.age
ASIDE = "aside"
"""In the engine's record of a run, see `Manifest.is_aside`."""
QUARANTINE = "QUARANTINE"
"""A marker beside the manifest: damaged, never to be chosen again; the text says why."""

Digests = npt.NDArray[np.uint64]
"""XXH3-64 of block after block."""

# The same in every later format: so an older reader tells a newer manifest from a damaged one.
_ENVELOPE = '{"digest":"%s",'
_ENVELOPE_BYTES = len(_ENVELOPE % ("0" * 64))


@dataclass(frozen=True, slots=True, eq=False)
class FileRecord:
    """One rank's file."""

    name: str
    size_bytes: int
    data_offset: int
    """First byte of the data: the length of the safetensors header, padded to whole pages."""
    digests: Digests
    """Checksum of each block of the whole file, header included; the last block may be short."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """A committed checkpoint."""

    step: int
    round: int
    """The generation in the directory's name, see `commit.generation`; newest = (round, step)."""
    nonce: str
    tag: str
    world: int
    tensors: Mapping[TensorId, TensorInfo]
    """Every stored tensor; a fragment names its tensor by the position in this order."""
    aliases: Mapping[str, str]
    """Tied parameters: other name -> the name under which the tensor is stored."""
    files: tuple[FileRecord, ...]
    fragments: Fragments
    meta: Mapping[str, Any] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES
    runs: tuple[str, ...] = ()
    """The ids of the run that wrote it, last, and of those that this one continues."""
    digest: str = ""
    """SHA-256 of the manifest itself, hex; empty until written or read."""
    text: bytes = b""
    """The bytes that it was parsed from; empty until read."""

    @property
    def is_aside(self) -> bool:
        """Whether only a load that names it may take it, and no retention counts or deletes it."""
        engine = self.meta.get("engine")
        return isinstance(engine, Mapping) and bool(engine.get(ASIDE))

    @property
    def directory(self) -> str:
        """The name of the directory that holds this manifest."""
        return directory_name(self.step, self.round, self.nonce)


def directory_name(step: int, round: int, nonce: str) -> str:
    """`step-000001200.g7.3fa9`; never reused, thanks to the nonce."""
    return f"step-{step:09d}.g{round}.{nonce}"


def file_name(rank: int) -> str:
    """`r00000.safetensors`."""
    return f"r{rank:05d}.safetensors"


@uncollected()
def encode(manifest: Manifest) -> tuple[bytes, str]:
    """The manifest's text and its digest.

    Raises:
        CheckpointError: `meta` holds something that JSON cannot; the message names its key. Or the
            text is longer than any that a load reads.
    """
    check_json(manifest.meta, "meta")
    record = {
        "format": FORMAT,
        "min_reader": MIN_READER,
        "step": manifest.step,
        "round": manifest.round,
        "nonce": manifest.nonce,
        "tag": manifest.tag,
        "world": manifest.world,
        "block_bytes": manifest.block_bytes,
        "aliases": dict(manifest.aliases),
        "runs": list(manifest.runs),
        "meta": manifest.meta,
    }
    members = {name: canonical(value) for name, value in record.items()}
    # What grows with tensors and blocks is base64, in which JSON escapes nothing.
    columns = {name: pack(getattr(manifest.fragments, name), "<i8") for name in COLUMNS}
    members["fragments"] = _object({name: f'"{column}"' for name, column in columns.items()})
    members["tensors"] = table_of(manifest.tensors).text
    files = [
        _object(
            {
                "name": canonical(file.name),
                "size_bytes": canonical(file.size_bytes),
                "data_offset": canonical(file.data_offset),
                "xxh3_64": f'"{pack(file.digests, "<u8")}"',
            }
        )
        for file in manifest.files
    ]
    members["files"] = f"[{','.join(files)}]"
    rest = _object(members)[1:].encode()  # the envelope has the opening brace
    if (size := len(rest) + _ENVELOPE_BYTES) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the manifest would have {size} bytes, and a load reads {MAX_MANIFEST_BYTES}: keep "
            f"less in client_state, or store it as tensors; all of meta has "
            f"{len(members['meta'])}"
        )
    digest = hashlib.sha256(rest).hexdigest()
    return (_ENVELOPE % digest).encode() + rest, digest


def digest_of(text: bytes) -> str | None:
    """The digest of a manifest, or None if its bytes do not have the one that it names."""
    head, rest = text[:_ENVELOPE_BYTES], text[_ENVELOPE_BYTES:]
    digest = hashlib.sha256(rest).hexdigest()
    return digest if head == (_ENVELOPE % digest).encode() else None


def _object(members: Mapping[str, str]) -> str:
    """A JSON object as `canonical` writes it, from the JSON of each member."""
    return "{" + ",".join(f'"{name}":{members[name]}' for name in sorted(members)) + "}"


def pack(numbers: npt.NDArray[Any], form: Literal["<u8", "<i8"]) -> str:
    """Base64 of little-endian 64-bit words: 11 characters each, and no numbers to parse."""
    return base64.b64encode(numbers.astype(form).tobytes()).decode()


def unpack(text: str, form: Literal["<u8", "<i8"]) -> npt.NDArray[Any]:
    """The inverse of `pack`; raises ValueError for anything else."""
    return np.frombuffer(base64.b64decode(text, validate=True), form).astype(form[1:])


def check_json(value: object, path: str) -> None:
    """Refuse a value that JSON would not return as it was stored.

    Tuples are accepted, and come back as lists. Infinities and NaN are accepted, as Python's JSON
    writes and reads them: a scheduler's best loss starts out infinite.

    Raises:
        CheckpointError: The message names the path of the value.
    """
    match value:
        case None | bool() | int() | float() | str():
            # Of a subclass, such as an enum, the value alone would come back.
            if type(value) not in _JSON_SCALARS:
                raise _not_json(value, path)
        case dict() | Mapping():
            for key, inner in value.items():
                if type(key) is not str:
                    raise CheckpointError(f"{path}: key {key!r} is not text; write {str(key)!r}")
                check_json(inner, f"{path}.{key}")
        case list() | tuple():
            if set(map(type, value)) <= _JSON_SCALARS:  # the names of parameters, which are many
                return
            for position, inner in enumerate(value):
                check_json(inner, f"{path}[{position}]")
        case _:
            raise _not_json(value, path)


_JSON_SCALARS = frozenset({type(None), bool, int, float, str})


def _not_json(value: object, path: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a {type(value).__name__}, which JSON cannot hold; "
        "convert it to numbers, text, lists or dictionaries, or store it as a tensor"
    )
