"""Records of the store: what those of agents of all versions have in common, and what is dropped.

A job outlives an upgrade: its agents are replaced one after the other, so for a while two versions
read each other's records. A field that the reader does not know is dropped, and one that the writer
did not know has its default; so a new field needs a default that means "as before", and whatever
changes the meaning of what there is needs another `PROTOCOL`.
"""

from __future__ import annotations

import base64
import contextlib
import zlib
from typing import Self, TypeVar

from zero_contract.decoding import decode, encode, inflate
from zero_orchestrator.errors import SpecMismatch
from zero_orchestrator.store.kv import KeyValue

PROTOCOL = 2
"""Version of the records, keys and moves of a job, as this agent writes and reads them."""

LARGEST_BYTES = 16 << 20
"""The largest text that is packed in a value of the store."""

T = TypeVar("T")


class Record:
    """The value of a key: a dataclass, as JSON."""

    def to_json(self) -> str:
        """The value of its key."""
        return encode(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The inverse of `to_json`; raises as `read`."""
        return read(cls, text)


def read(kind: type[T], data: object) -> T:
    """A record as this version understands it: the text of an agent of any version, or its objects.

    Raises:
        SpecMismatch: It is no such record, or lacks a field that every version writes.
    """
    return decode(
        kind,
        data,
        "a record in etcd is of no version that this one can read",
        SpecMismatch,
        "install the version of zero-elastic with which the job was started",
    )


def kept(kind: type[T], item: KeyValue | None) -> T | None:
    """The record in a key that people read: None without one, or if it cannot be understood."""
    with contextlib.suppress(SpecMismatch):  # one damaged record must not hide all others
        return read(kind, item.value) if item is not None else None
    return None


def pack(text: str) -> str:
    """A long text as a short one."""
    return base64.b85encode(zlib.compress(text.encode())).decode()


def unpack(text: str) -> bytes:
    """The inverse of `pack`. Raises ValueError."""
    return inflate(base64.b85decode(text), LARGEST_BYTES)


def check_protocol(theirs: int, mine: int, job: str) -> None:
    """Refuse to take part in a job whose agents mean something else by what they write.

    Raises:
        SpecMismatch: The job was started with another version of the protocol.
    """
    if theirs != mine:
        raise SpecMismatch(
            f"the agents of job {job} speak version {theirs} of the protocol, and this agent "
            f"version {mine}: install the zero-elastic with which the job was started, or stop "
            "the job and start it again with this one; it goes on from its newest checkpoint"
        )
