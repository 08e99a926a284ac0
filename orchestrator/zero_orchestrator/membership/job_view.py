"""What one agent sees of its job: all of it, if it is one of the first; its course, if not.

Somebody must look at every key to decide how a job moves on, but not everybody. The first few
live agents (by node id) see all keys; every other one sees the *course* of the job alone, which
changes a handful of times in each round, and what is addressed to it. So a round costs all agents
of a large job together a number of changes that grows with their number, not with its square.

There is no election: whoever looks and finds itself among the first sees everything from then
on, and whoever finds others before it no longer does. Too many that see everything do no harm: the
fence decides. A snapshot is never older than the one before; one that is not `whole` is never
decided upon.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import random
from collections.abc import Callable

from zero_contract.clock import Clock
from zero_orchestrator.errors import StoreReplaced
from zero_orchestrator.membership.job_state import Failure, Node, Snapshot, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.parse import failures, parse
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.store.kv import KeyValue, KeyValueStore, Range, Read, absent
from zero_orchestrator.store.replica import Jump, Replica

FIRST = 3
"""Number of deciders, agents with the full view: two may die at once without any delay."""
REREAD_S = 2.0
"""Seconds without a change after which an agent reads the store, to be sure of its view."""
PENDING_S = 0.25
"""The same for a follower while the job waits for something."""
LOOKS_PER_S = 25
"""The agent that has k others before it looks no more often than LOOKS_PER_S / k times a second."""
LONGEST_S = 15.0
"""Longest pause of a follower: half of a large job may be gone at once."""


RESTART = "Start the agents again; the job goes on from its newest checkpoint"


def follows(before: Snapshot, job: Snapshot) -> bool:
    """Whether a job can have come from one state to another: a round is in each state once."""
    if job.fence == before.fence:
        return True
    return job.fence > before.fence and (job.n, job.state) != (before.n, before.state)


class JobView:
    """One agent's view of its job."""

    def __init__(
        self,
        store: KeyValueStore,
        keys: Keys,
        spec: JobSpec,
        node: str,
        *,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        """Look for the first time, as the agent `node`, which has registered.

        `on_change` is called on a thread of the store when looking is worth while; the clock paces
        the looks that no change asks for.

        Raises:
            StoreUnavailable: The store did not answer; nothing is being watched.
        """
        self._store, self._keys, self._spec, self._id = store, keys, spec, node
        self._clock = clock
        self._on_change = on_change
        first = self._store.range(self._keys.nodes, limit=FIRST)  # a read of a few keys
        self.no_heir = absent(keys.heir(f"{first.cluster:x}"))
        """The store is the one in which this view has begun, and not one that has followed it."""
        is_first = self._keys.node(self._id) in [item.key for item in first.items]
        self._view: _FullView | _FollowerView = self._open(whole=is_first)
        self._job: Snapshot | None = None
        self._checked_s, self._pause_s = clock.now(), REREAD_S

    @property
    def whole(self) -> bool:
        """Whether this agent sees everything, and so may decide."""
        return isinstance(self._view, _FullView)

    def look(self) -> Snapshot:
        """The job, as new as the watch has it; the same object until something has changed.

        Raises:
            StoreUnavailable: The store did not answer where it had to be asked.
            StoreReplaced: This is not the store that the job was in.
        """
        if self._clock.now() - self._checked_s >= self._pause_s:
            if self._view.check() and not self.whole:
                self._change(whole=True)
            self._checked_s = self._clock.now()
            # Agents that one change has woken do not look in step from then on.
            self._pause_s = self._view.pause_s * random.uniform(0.8, 1.2)
        before, job = self._job, self._view.look()
        if job is before:
            return job
        if before is not None and not follows(before, job):
            raise StoreReplaced(
                f"etcd has lost the data of job {self._keys.job}: its last transition was at "
                f"revision {before.fence}, and now {job.fence or 'there is none'}. {RESTART}"
            )
        # One that is not registered stays: it is about to register again, perhaps as a first one.
        if self.whole and self._id not in first(job) and job.node(self._id) is not None:
            self._change(whole=False)
            job = self._view.look()
        self._job = job
        return job

    def distrust(self) -> None:
        """Make sure at the next look: something was written, or may have happened elsewhere."""
        self._pause_s = 0.0

    def said(self, report: KeyValue) -> None:
        """This agent has written a report."""
        self._view.said(report)

    def gone(self, node: Node) -> None:
        """This agent knows that another one is dead."""
        self._view.gone(node)
        self.distrust()

    def jump(self) -> Jump | None:
        """As `Replica.jump`."""
        return self._view.jump()

    def close(self) -> None:
        """Watch nothing any more."""
        self._view.close()

    def _change(self, *, whole: bool) -> None:
        # Opened before the other is closed: if the store does not answer, the old view stays.
        before, self._view = self._view, self._open(whole=whole)
        before.close()

    def _open(self, *, whole: bool) -> _FullView | _FollowerView:
        view = _FullView if whole else _FollowerView
        return view(self._store, self._keys, self._spec, self._id, self._on_change)


def first(job: Snapshot) -> list[str]:
    """The agents that see everything, of a job that is seen as a whole."""
    return heapq.nsmallest(FIRST, (node.id for node in job.nodes))


def place(job: Snapshot, node: str) -> int:
    """A node's place among those who may move the job on; another order at each revision."""

    def turn(node: str) -> bytes:
        return hashlib.sha256(f"{job.fence}/{node}".encode()).digest()

    ids = sorted(first(job), key=turn)
    return ids.index(node) if node in ids else len(ids)


class _FullView:
    """Every key of the job."""

    pause_s = REREAD_S

    def __init__(
        self,
        store: KeyValueStore,
        keys: Keys,
        spec: JobSpec,
        node: str,
        on_change: Callable[[], None],
    ) -> None:
        self._keys, self._spec = keys, spec
        self._all = Replica(store, keys.prefix, on_change)
        self._found: Range | None = None
        self._job = Snapshot(spec=spec)

    def look(self) -> Snapshot:
        if (found := self._all.look()) is not self._found:
            self._job, self._found = parse(self._keys, found, self._spec), found
        return self._job

    def check(self) -> bool:
        """Read everything again; it stays until others are seen to come first."""
        self._all.distrust()
        return True

    def said(self, report: KeyValue) -> None:
        self._all.distrust()

    def gone(self, node: Node) -> None:
        self._all.distrust()

    def jump(self) -> Jump | None:
        return self._all.jump()

    def close(self) -> None:
        self._all.close()


class _FollowerView:
    """What every agent must know, what is addressed to this one, and what it has said itself.

    Of the other agents it knows the members of the round, and which of them it found dead.
    """

    def __init__(
        self,
        store: KeyValueStore,
        keys: Keys,
        spec: JobSpec,
        node: str,
        on_change: Callable[[], None],
    ) -> None:
        self._store, self._keys, self._spec, self._id = store, keys, spec, node
        self._own = store.get(keys.node(node))
        self._course = Replica(store, keys.round_state, on_change)
        self._orders = Replica(store, keys.drain(node), on_change)
        self._reports: tuple[KeyValue, ...] = ()
        self._latest: tuple[KeyValue, ...] = ()
        """The newest checkpoint, as of the last check: each agent tells it to its workers."""
        self._dead: frozenset[tuple[str, str]] = frozenset()
        self._seen: tuple[object, ...] = ()
        self._job = Snapshot(spec=spec)
        self._causes: tuple[Failure, ...] = ()
        self._causes_of = 0
        self._latest_first = ""

    @property
    def pause_s(self) -> float:
        """Until the next check: short while something is due, and longer the more come first."""
        job = self._job
        reported = any(r.key.startswith(self._keys.report(job.n, "")) for r in self._reports)
        due = job.state is not State.ACTIVE or job.yielding is not None or reported
        # How many live agents come before this one, as far as it knows. The k-th looks 1/k as
        # often: all agents together look as often as the logarithm of their number, and the first
        # ones may die at any moment, all at once too.
        earlier = sum(self._latest_first < member.id < self._id for member in job.members.nodes)
        if not job.members.nodes:
            earlier = self._spec.min_nodes
        pause_s = min(earlier / LOOKS_PER_S, LONGEST_S)
        return max(PENDING_S if due else REREAD_S, pause_s)

    def look(self) -> Snapshot:
        course, orders = self._course.look(), self._orders.look()
        found = (course, orders, self._own, self._reports, self._latest, self._dead)
        # Nothing is parsed anew, and the snapshot stays the same object, until one of them differs.
        if found != self._seen:
            own = (self._own,) if self._own is not None else ()
            items = (*course.items, *orders.items, *own, *self._reports, *self._latest)
            job = parse(self._keys, Range(course.revision, items, course.cluster), self._spec)
            # It sees no other registration: a member lives as far as it knows.
            others = [m for m in job.members.nodes if m.id != self._id]
            if self._dead:
                others = [m for m in others if m.agent not in self._dead]
            known = (*job.failures, *self._failures(job))
            job = dataclasses.replace(job, nodes=(*job.nodes, *others), failures=known)
            self._job, self._seen = job, found
        return self._job

    def check(self) -> bool:
        """Look whether the watch has told the newest; returns whether this agent is a first one."""
        me = self._keys.node(self._id)
        head, own, order, early, latest, *said = self._store.read(
            [
                Read(self._keys.round),
                Read(me),
                Read(self._keys.drain(self._id)),
                Read(self._keys.nodes, prefix=True, limit=FIRST),
                Read(self._keys.latest),
                *(Read(report.key) for report in self._reports),
            ]
        )
        if (head.items[0].mod_revision if head.items else 0) != self._job.fence:
            self._course.distrust()
        else:
            # Etcd may have been restored from an older copy, which lacks what this agent has said.
            # Only now: the reports of a round that is over are deleted.
            self._reports = tuple(item for found in said for item in found.items)
        if not set(order.items) <= set(self._orders.look().items):
            self._orders.distrust()
        self._own = own.items[0] if own.items else None
        self._latest = latest.items
        first_keys = [item.key for item in early.items]
        self._latest_first = max(first_keys, default="").removeprefix(self._keys.nodes)
        return me in first_keys

    def said(self, report: KeyValue) -> None:
        now = self._keys.report(self._job.n, "")
        kept = (old for old in self._reports if old.key.startswith(now) and old.key != report.key)
        self._reports = (*kept, report)

    def gone(self, node: Node) -> None:
        self._dead |= {node.agent}

    def jump(self) -> Jump | None:
        orders = self._orders.jump()
        return self._course.jump() or orders

    def close(self) -> None:
        self._course.close()
        self._orders.close()

    def _failures(self, job: Snapshot) -> tuple[Failure, ...]:
        """Why the round ended, for the agents that must know."""
        if job.state not in {State.FORMING, State.FAILED} or job.n == 0:
            return ()
        # Read once in each state: every follower of a large job asks, at the same moment.
        if job.fence != self._causes_of:
            prefix = self._keys.report(job.n, "fail/")
            item = self._store.get(prefix + job.failed) if job.failed else None
            self._causes = failures([item] if item is not None else [], prefix)
            self._causes_of = job.fence
        return self._causes
