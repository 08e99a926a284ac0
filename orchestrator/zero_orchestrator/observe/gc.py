"""`zero-ctl gc`: garbage collection of the keys of ended jobs, by age and by number.

A job that has ended leaves its state and up to a thousand events, a few hundred KiB, so that they
can be read afterwards. Without garbage collection an etcd that many jobs use for years fills up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zero_contract.values import in_words
from zero_orchestrator.errors import SpecMismatch
from zero_orchestrator.membership.job_state import ENDED, Head, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.observe import events
from zero_orchestrator.observe.status import JOBS_PREFIX, by_job
from zero_orchestrator.store.kv import Delete, KeyValueStore, Put, unchanged

OLDER_THAN_S = 7 * 86400.0
"""Seconds for which ended jobs are kept."""
KEEP = 200
"""Maximum number of ended jobs that are kept."""


@dataclass(frozen=True, kw_only=True)
class Remains:
    """A job in which no agent is alive."""

    job: str
    state: str
    """State of its last round; empty: the job never had a round."""
    revision: int
    """mod_revision of its `round` key; 0 without one."""
    last_s: float
    """When it ended or an agent last wrote: wall clock of a node, seconds; 0: unknown."""

    @property
    def ended(self) -> bool:
        """Whether the job has ended, rather than lost all its agents."""
        return self.state in ENDED


@dataclass(frozen=True, kw_only=True)
class Doomed:
    """A job whose keys may be deleted, and why."""

    remains: Remains
    reason: str


def due(
    found: Sequence[Remains], *, now_s: float, older_than_s: float, keep: int, lost: bool
) -> list[Doomed]:
    """The jobs whose keys may be deleted, newest first: too old, or `keep` that ended later stay.

    With `lost`, jobs that have lost all their agents are judged as well.
    """
    doomed: list[Doomed] = []
    kept = 0
    # By revisions, not by clocks: the store alone knows which ended later.
    for remains in sorted(found, key=lambda one: one.revision, reverse=True):
        if not (remains.ended or lost):
            continue
        # By the clocks of two machines: minutes do not matter to an age of days.
        age_s = now_s - remains.last_s if remains.last_s else 0.0
        since = f"for {in_words(age_s)}" if remains.last_s else "for an unknown time"
        what = f"{remains.state} {since}" if remains.ended else f"without an agent {since}"
        if age_s >= older_than_s:
            doomed.append(Doomed(remains=remains, reason=what))
        elif remains.ended and kept >= keep:
            doomed.append(Doomed(remains=remains, reason=f"{what}; {keep} that ended later stay"))
        else:
            kept += remains.ended
    return doomed


_NO_ROUND = Head(n=0, state=State.FORMING, cause="")


def look(store: KeyValueStore) -> list[Remains]:
    """The jobs in which no agent is alive."""
    found = []
    for job, items in by_job(store.range(JOBS_PREFIX).items):
        keys = Keys(job)
        # The key of a node has the lease of its agent, and ends with it.
        if any(item.key.startswith(keys.nodes) for item in items):
            continue
        head = next((item for item in items if item.key == keys.round), None)
        try:
            record = Head.from_json(head.value) if head is not None else None
        except SpecMismatch:  # of a version that may understand it, and need it
            continue
        state, last_s = (record.state, record.at or 0.0) if record is not None else ("", 0.0)
        # A job that was lost has worked since its last round began, perhaps for weeks.
        if state not in ENDED or not last_s:
            seen_s = events.seen_s(store.get(events.seen_key(job))) or 0.0
            last_s = max(last_s, seen_s, *(event.time_s for event in events.read(store, job)))
        revision = head.mod_revision if head is not None else 0
        found.append(Remains(job=job, state=state, revision=revision, last_s=last_s))
    return found


def delete(store: KeyValueStore, remains: Remains) -> bool:
    """Delete all keys of a job; False if the job has changed since it was read.

    Raises:
        StoreUnavailable: The store did not answer; another `look` shows whether the keys exist.
    """
    keys, revision = Keys(remains.job), remains.revision
    if _has_agents(store, keys):
        return False
    # First stopped for good: an agent that comes back must not train while its keys are deleted.
    if not remains.ended:
        head = store.get(keys.round)
        record = Head.from_json(head.value) if head is not None else _NO_ROUND
        cause = "all its agents were gone, and its keys were deleted (zero-ctl gc --lost)"
        end = Put(keys.round, replace(record, state=State.STOPPED, cause=cause).to_json())
        stopped = store.txn([unchanged(keys.round, revision)], [end])
        if not stopped.succeeded:
            return False
        revision = stopped.revision
        if _has_agents(store, keys):
            return False  # a new agent reads that the job was stopped, and exits
    prefixes = (keys.prefix, keys.secrets, keys.events, events.progress_prefix(remains.job))
    writes = [Delete(prefix, prefix=True) for prefix in prefixes]
    # All or nothing: what is left of a job would look like one that is damaged.
    return store.txn([unchanged(keys.round, revision)], writes).succeeded


def _has_agents(store: KeyValueStore, keys: Keys) -> bool:
    return bool(store.range(keys.nodes, limit=1).items)


def collect(
    store: KeyValueStore,
    *,
    now_s: float,
    older_than_s: float = OLDER_THAN_S,
    keep: int = KEEP,
    lost: bool = False,
) -> Iterator[Doomed]:
    """Delete the jobs that are `due`; yields each job once its keys are deleted."""
    found = due(look(store), now_s=now_s, older_than_s=older_than_s, keep=keep, lost=lost)
    return (doomed for doomed in found if delete(store, doomed.remains))
