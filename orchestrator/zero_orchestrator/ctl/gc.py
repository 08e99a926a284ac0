"""`zero-ctl gc`: the keys of jobs that are over go, after a while, or when there are too many.

A job that has ended leaves its state and up to a thousand events, a few hundred KiB, so that its
story can be read afterwards. An etcd that many jobs use for years would be full of them one day.

Must always hold: the keys of a job go in one transaction, and only if its round is as it was
looked at; a job that could go on is first stopped for good, so that an agent that comes back must
not train beside its keys; keys that cannot be understood are left alone.
Who calls it: `zero-ctl`; the keeper of a machine's shared etcd.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from zero_contract.values import in_words
from zero_orchestrator.ctl import events
from zero_orchestrator.ctl.status import JOBS_PREFIX
from zero_orchestrator.membership.job_state import ENDED, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.store.kv import Delete, KeyValue, KeyValueStore, Put, unchanged

OLDER_THAN_S = 7 * 86400.0
"""Jobs that are over are kept for so long..."""
KEEP = 200
"""...and of them no more than this."""


@dataclass(frozen=True, kw_only=True)
class Remains:
    """A job in which no agent is alive."""

    job: str
    state: str
    """Empty: it never had a round."""
    revision: int
    """mod_revision of its `round` key; 0 without one."""
    last_s: float
    """When it ended, or was last heard of: wall clock of a node, seconds; 0: nobody knows."""

    @property
    def ended(self) -> bool:
        """Whether it is over, rather than left by all its agents."""
        return self.state in ENDED


@dataclass(frozen=True, kw_only=True)
class Doomed:
    """A job whose keys may go, and why."""

    remains: Remains
    reason: str


def due(
    found: Sequence[Remains], *, now_s: float, older_than_s: float, keep: int, lost: bool
) -> list[Doomed]:
    """Which of these jobs may go; the newest come first.

    Args:
        found: Jobs in which no agent is alive.
        now_s: Wall clock, seconds since the epoch: it is compared with that of nodes, and a
            difference of minutes does no harm to an age of days.
        older_than_s: Jobs that are over for so long; 0: all.
        keep: And those that are over and have so many newer ones.
        lost: Jobs that all agents have left without an end, too, for so long.
    """
    doomed: list[Doomed] = []
    kept = 0
    for remains in sorted(found, key=lambda one: one.revision, reverse=True):
        if not (remains.ended or lost):
            continue
        age_s = now_s - remains.last_s if remains.last_s else 0.0
        since = f"for {in_words(age_s)}" if remains.last_s else "since nobody knows when"
        what = f"{remains.state} {since}" if remains.ended else f"without an agent {since}"
        if age_s >= older_than_s:
            doomed.append(Doomed(remains=remains, reason=what))
        elif remains.ended and kept >= keep:
            doomed.append(Doomed(remains=remains, reason=f"{what}; {keep} that ended later stay"))
        else:
            kept += remains.ended
    return doomed


def look(store: KeyValueStore) -> list[Remains]:
    """The jobs in which no agent is alive."""

    def job_of(item: KeyValue) -> str:
        return item.key.removeprefix(JOBS_PREFIX).partition("/")[0]

    found = []
    for job, of in groupby(sorted(store.range(JOBS_PREFIX).items, key=job_of), job_of):
        keys, items = Keys(job), list(of)
        if any(item.key.startswith(keys.nodes) for item in items):
            continue
        head = next((item for item in items if item.key == keys.round), None)
        try:
            record: dict[str, Any] = json.loads(head.value) if head is not None else {}
            state, last_s = str(record.get("state", "")), float(record.get("at", 0.0))
        except (ValueError, TypeError, AttributeError):
            continue
        if state not in ENDED or not last_s:  # a round may have begun long before its agents left
            seen_s = events.seen_s(store.get(events.seen_key(job))) or 0.0
            times = (float(event.record.get("time", 0.0)) for event in events.read(store, job))
            last_s = max(last_s, seen_s, *times)
        revision = head.mod_revision if head is not None else 0
        found.append(Remains(job=job, state=state, revision=revision, last_s=last_s))
    return found


def delete(store: KeyValueStore, remains: Remains) -> bool:
    """Delete all keys of a job; False if it has changed since it was looked at.

    Raises:
        StoreUnavailable: The store did not answer; looking again tells what has become of it.
    """
    keys, revision = Keys(remains.job), remains.revision
    if _has_agents(store, keys):
        return False
    if not remains.ended:
        head = store.get(keys.round)
        record = json.loads(head.value) if head is not None else {"n": 0}
        cause = "all its agents were gone, and its keys were deleted (zero-ctl gc --lost)"
        end = Put(keys.round, json.dumps({**record, "state": State.STOPPED, "cause": cause}))
        stopped = store.txn([unchanged(keys.round, revision)], [end])
        if not stopped.succeeded:
            return False
        revision = stopped.revision
        if _has_agents(store, keys):
            return False  # one has just come: it is told that the job was stopped, and ends
    prefixes = (keys.prefix, events.events_prefix(remains.job), events.progress_prefix(remains.job))
    writes = [Delete(prefix, prefix=True) for prefix in prefixes]
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
    """Delete what is `due`; each job when it is gone."""
    found = due(look(store), now_s=now_s, older_than_s=older_than_s, keep=keep, lost=lost)
    return (doomed for doomed in found if delete(store, doomed.remains))
