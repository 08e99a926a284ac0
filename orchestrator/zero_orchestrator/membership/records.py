"""Records of agents of other versions: what they must have in common, and what is dropped.

A job outlives an upgrade: its agents are replaced one after the other, so for a while two versions
read each other's records. Must always hold: a field that the reader does not know is dropped, and
one that the writer did not know has its default; so a new field needs a default that means "as
before", and whatever changes the meaning of what there is needs another `PROTOCOL`.

Who calls it: whatever reads a record of the store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from zero_orchestrator.errors import SpecMismatch

PROTOCOL = 2
"""Of what agents tell each other in the store, of the keys and of the moves of a job."""
FIRST_PROTOCOL = 1
"""That of records which do not say."""

T = TypeVar("T")


def read(kind: type[T], record: Mapping[str, Any]) -> T:
    """A record as this version understands it.

    Args:
        kind: A dataclass.
        record: What an agent of this or of another version has written.

    Raises:
        SpecMismatch: A field is missing that every version writes.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    try:
        return kind(**{field.name: record[field.name] for field in fields if field.name in record})
    except TypeError as error:
        raise SpecMismatch(
            f"a record in etcd is of no version that this one can read: {error}. Install the "
            "version of zero-elastic with which the job was started"
        ) from error


def check_protocol(theirs: int, mine: int, job: str) -> None:
    """Refuse to take part in a job whose agents mean something else by what they write.

    Args:
        theirs: The version that the job was started with.
        mine: The version of the agent that wants to take part.
        job: Its name.

    Raises:
        SpecMismatch: They do.
    """
    if theirs != mine:
        raise SpecMismatch(
            f"the agents of job {job} speak version {theirs} of the protocol, and this agent "
            f"version {mine}: install the zero-elastic with which the job was started, or stop "
            "the job and start it again with this one; it goes on from its newest checkpoint"
        )
