"""What must hold of the recorded history of a job: a pure function, for `chaos.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.job_history import CHARGED, WORKERS_END_S, JobHistory, explained, replayed
from tests.support.mvcc import Batch
from zero_contract.exit_codes import CRASHED
from zero_data.ledger import Entry, verify
from zero_orchestrator.membership.job_state import State
from zero_orchestrator.membership.keys import Keys

NOTICED_S = 45.0
"""A fault may cost a restart so long after it is over: what was missed is noticed late."""


@dataclass(frozen=True)
class Exit:
    """An agent that has ended."""

    job: str
    node: str
    code: int
    asked: bool
    """A fault has killed it, or an operator has asked it to leave."""
    last_words: str


@dataclass(frozen=True)
class Happened:
    """A fault, and when it was injected and healed, by the clock of this machine."""

    what: str
    free: bool
    """It must cost no restart."""
    at_s: float
    until_s: float
    job: str = ""
    """The one that it hits; empty: it hits all."""
    unknown_s: float = 0.0
    """How long nobody can know of it."""


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint on disk, as its manifest says."""

    step: int
    round: int
    weight_hash: str
    digest: str
    """Of the manifest."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """All that is known of a job that has ended, or was interrupted."""

    job: str
    batches: Sequence[Batch]
    """Every revision of its keys, from the first."""
    arrived_s: Mapping[int, float]
    """Revision -> when it was known here."""
    exits: Sequence[Exit]
    outlived: Sequence[tuple[str, float]]
    """Nodes whose workers outlived their agent, and for how long at least."""
    faults: Sequence[Happened]
    entries: Sequence[Entry]
    """The ledger of the samples."""
    samples: int
    """In an epoch."""
    manifests: Mapping[str, Saved]
    """Every committed checkpoint on disk, by the name of its directory."""
    final_hashes: frozenset[str]
    """What its workers have printed at their end."""


@dataclass(frozen=True)
class Undisturbed:
    """The same training, to which nothing has happened."""

    steps: int
    final_hash: str
    hashes: Mapping[int, str]
    """Step -> weight hash."""


def judge(record: JobRecord, reference: Undisturbed | None) -> list[str]:
    """What does not hold.

    Args:
        record: What has happened.
        reference: Without it, the run was interrupted, and only what always holds is judged.
    """
    problems: list[str] = []
    keys = Keys(record.job)
    history = JobHistory(keys, problems.append)
    for batch, database in replayed(record.batches):
        history.changed(batch, database)
    problems += _processes(record)
    problems += _charges(record, history)
    problems += _checkpoints(record, history)
    if reference is not None:
        problems += _end(record, history, reference)
    return problems


def _processes(record: JobRecord) -> Iterator[str]:
    for one in record.exits:
        if one.code == CRASHED or not (one.asked or explained(one.code, one.last_words)):
            yield f"the agent of {one.node} ends with {one.code}: {one.last_words}"
    for node, for_s in record.outlived:
        if for_s > WORKERS_END_S:
            yield f"I8: workers outlive the agent of {node} by {for_s:.1f} s"


def _charges(record: JobRecord, history: JobHistory) -> Iterator[str]:
    """A restart is charged only for a fault that may cost one."""
    costly = [fault for fault in record.faults if not fault.free]
    for revision, move in history.transitions.items():
        at_s = record.arrived_s[revision]
        if move in CHARGED and not any(
            fault.at_s <= at_s <= fault.until_s + NOTICED_S for fault in costly
        ):
            yield f"budget: {move} at revision {revision}, and nothing has failed"


def _checkpoints(record: JobRecord, history: JobHistory) -> Iterator[str]:
    for name, saved in record.manifests.items():
        if saved.digest not in history.granted:
            yield f"I2: {name} is published unasked"
        elif (n := history.granted[saved.digest]) != saved.round:
            yield f"I2: {name} is published in round {n}"


def _end(record: JobRecord, history: JobHistory, reference: Undisturbed) -> Iterator[str]:
    state = history.job.state if history.job is not None else None
    if state is not State.DONE:
        yield f"I6: the faults are over, and the job is not done: {state}"
    report = verify(record.entries, record.samples)
    yield from (f"I7: {problem}" for problem in report.problems)
    if report.steps != reference.steps:
        yield f"I7: {report.steps} steps are in the ledger, and {reference.steps} were to be"
    if record.final_hashes != {reference.final_hash}:
        yield f"the weights are {sorted(record.final_hashes)}, and not {reference.final_hash}"
    for name, saved in record.manifests.items():
        if saved.weight_hash != (right := reference.hashes.get(saved.step)):
            yield f"checkpoint {name} has the weights {saved.weight_hash}, and not {right}"
    newest = max((saved.step for saved in record.manifests.values()), default=0)
    if newest != reference.steps:
        yield f"the newest checkpoint on disk is that of step {newest}"


def in_order(changes: Mapping[int, Iterable[Any]]) -> list[Batch]:
    """Batches by revision, the first one first."""
    return [tuple(changes[revision]) for revision in sorted(changes)]
