"""One agent's part in the round machine: it registers, reads, decides, and applies.

`Rendezvous.poll` is the driver of `rounds.decide`. It looks at the job (`job_view.py` keeps the
snapshot fresh), measures how long things have been as they are, and tries the transition that is
due. An agent that cannot reach the store changes nothing and keeps its last snapshot. `commit` may
be called from another thread.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from zero_contract.clock import Clock
from zero_contract.errors import ZeroError
from zero_contract.journal import Journal
from zero_contract.signing import Secret
from zero_contract.worker import CommitRequest
from zero_orchestrator.errors import StoreFull, StoreReplaced, StoreUnavailable
from zero_orchestrator.membership.dead_links import DeadLink, LinkReport
from zero_orchestrator.membership.durations import Durations
from zero_orchestrator.membership.job_state import (
    ENDED,
    Failure,
    Head,
    Node,
    Published,
    Snapshot,
    State,
)
from zero_orchestrator.membership.job_view import FIRST, RESTART, JobView, place
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.registration import Registration
from zero_orchestrator.membership.rounds import (
    Move,
    Timing,
    Transition,
    Wait,
    decide,
    runs,
    transaction,
)
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.store.kv import (
    NO_LEASE,
    Delete,
    KeyValue,
    KeyValueStore,
    Put,
    absent,
    unchanged,
)
from zero_orchestrator.store.replica import Jump

ASIDE_AT_ONCE = 64
"""Most nodes that one transaction sets aside."""
TURN_S = 0.25
"""Additional wait of each further agent in turn, before it tries a transition itself."""


class NodeTaken(ZeroError):
    """Another agent registered under this agent's node id."""


class Rendezvous:
    """An agent's membership in one job."""

    def __init__(
        self,
        store: KeyValueStore,
        job: str,
        spec: JobSpec,
        node: Node,
        *,
        clock: Clock,
        journal: Journal,
        timing: Timing | None = None,
        lease_ttl_s: int = 3,
        on_change: Callable[[], None] = lambda: None,
        works: Callable[[], bool] = lambda: True,
    ) -> None:
        """Nothing is written before `register`.

        Args:
            store: Shared by all agents of the job; the caller closes it.
            job: Job name, part of every key.
            spec: This agent's idea of the job.
            node: This agent.
            clock: Measures durations; never compared with another node's.
            journal: Receives every transition this agent makes.
            timing: The job's patience.
            lease_ttl_s: Seconds after the last keep-alive at which others treat this agent as lost.
            on_change: Called on a thread of the store when a poll is worth while.
            works: Whether this agent's loop turns; asked on another thread. While it does not,
                its lease is not refreshed, and the job continues without it.
        """
        self.keys = Keys(job)
        self._store = store
        self._spec = spec
        self._clock = clock
        self._journal = journal
        self._timing = timing or Timing()
        self._on_change = on_change
        self._job_view: JobView | None = None
        self.secret = Secret("")
        """Shared by the job's agents; known once registered."""
        self._same_job = absent(self.keys.secret)
        """Holds in a store that has this very job: of the secret, which nobody writes again."""
        self._durations = Durations(clock)
        self._registration = Registration(
            store,
            self.keys.node(node.id),
            node,
            lease_ttl_s,
            clock=clock,
            durations=self._durations,
            journal=journal,
            on_lost=on_change,
            works=works,
        )
        self.snapshot = Snapshot(spec=spec)
        """The job as last read."""
        self._jump: Jump | None = None
        """Not yet in the journal."""
        self.reason = ""
        """What the job is doing or waiting for, as of the last poll."""
        self.waits_for: Wait | None = None
        """What the job waits for that may take for ever, as far as this agent decides."""

    @property
    def node(self) -> Node:
        """This agent as it is registered."""
        return self._registration.node

    @property
    def lease(self) -> int:
        """The lease under which this agent is registered."""
        return self._registration.lease

    def register(self, *, starting: bool = False) -> None:
        """Agree on the specification and become a live node of the job.

        `starting`: its workers warm up before it takes part in a round.

        Raises:
            SpecError: The job runs with another specification.
            StoreUnavailable: The store did not answer.
        """
        spec = self._agree(self.keys.spec, self._spec.to_json())
        self._spec.check_same(JobSpec.from_json(spec), self.keys.job)
        self.secret = Secret(self._agree(self.keys.secret, secrets.token_hex(32)))
        self._registration.change(starting=starting)
        # Others may have agreed on something else, in a store that knows nothing of this.
        for key, agreed in ((self.keys.spec, spec), (self.keys.secret, self.secret)):
            if (held := self._store.get(key)) is None or held.value != agreed:
                raise StoreUnavailable("etcd has gone back in time while this agent registered")
            self._same_job = unchanged(key, held.mod_revision)  # of the last one, the secret
        # Leases may have lapsed in an outage that has just ended: this agent has not seen it.
        self._durations.heard("this agent has joined")
        self._job_view = JobView(
            self._store,
            self.keys,
            self._spec,
            self.node.id,
            clock=self._clock,
            on_change=self._on_change,
        )

    def has_begun(self) -> bool:
        """Whether this job has had a round and is not over, for an agent that has not registered.

        Raises:
            StoreUnavailable: The store did not answer.
        """
        held = self._store.get(self.keys.round)
        if held is None:
            return False
        head = Head.from_json(held.value)
        return head.n > 0 and head.state not in ENDED

    def others_stay(self) -> bool:
        """Whether workers of this job may stay in their processes, for an agent that comes to it.

        Raises:
            StoreUnavailable: The store did not answer.
        """
        some = self._store.range(self.keys.nodes, limit=FIRST).items
        return any(Node.from_json(held.value).stays for held in some)

    def _agree(self, key: str, proposal: str) -> str:
        """The value of a key that the first agent of the job writes."""
        if (agreed := self._store.get(key)) is not None:
            return agreed.value
        # Several agents start at once, and one of them writes it: all take what is there then.
        self._store.txn([absent(key)], [Put(key, proposal)])
        agreed = self._store.get(key)
        if agreed is None:
            raise StoreUnavailable(f"{key} vanished while it was read; try again")
        return agreed.value

    def poll(self) -> Snapshot:
        """The job as it is now, after this agent has done its share to move it on.

        Raises:
            StoreUnavailable: The store did not answer; the last snapshot still is `snapshot`.
            NodeTaken: Another agent runs under this node id.
        """
        if self._registration.lost:
            self._seeing.distrust()
            self._look()  # first of all: is this the store that knew the lease?
            self._check_job()
            self._announce()
            self._journal.tell("lease", f"node {self.node.id} has registered again")
        job = self._look()
        if job.node(self.node.id) is None:  # somebody took this agent for dead
            self._check_job()
            self._announce(evicted=self.node.evicted + 1)
            self._look()
        while self._advance():
            self._look()
        return self.snapshot

    def evict(self, node: Node, *, ended: bool) -> bool:
        """Remove the registration of an agent that is dead, ahead of its lease.

        If its process is known to have `ended`, nobody waits for it to register again.
        """
        if ended:
            self._durations.ended(node)
        key = self.keys.node(node.id)
        held = self._store.get(key)
        # Also if another agent has removed it before: a follower sees no registrations.
        self._seeing.gone(node)
        if held is None or Node.from_json(held.value).incarnation != node.incarnation:
            return False
        # If it is not dead, it registers again at its next poll.
        return self._store.txn([unchanged(key, held.mod_revision)], [Delete(key)]).succeeded

    def lease_left_s(self, node: Node) -> float | None:
        """The rest of another agent's lease; None if that very agent is not registered."""
        held = self._store.get(self.keys.node(node.id))
        if held is None or Node.from_json(held.value).incarnation != node.incarnation:
            return None
        return self._store.time_left(held.lease)

    def drain(self) -> int:
        """Ask to leave: no further round includes this node. Returns the revision of the wish."""
        revision = self._announce(draining=True)
        if self._job_view is not None:
            job = self._look()  # not older than the wish
            # Others may begin one more round with it, which they decided before they saw the wish:
            # like the present one, it costs no restart if the machine is taken away at once.
            for n in range(job.n if job.has_member(self.node) else job.n + 1, job.n + 2):
                self._report(n, "leaving", self.node.incarnation)
        return revision

    def confirm(self) -> None:
        """Write this agent's registration once more: does the store take it?

        Raises:
            StoreFull: It has no room.
            StoreUnavailable: It did not answer.
        """
        self._seeing.distrust()
        self._look()  # first of all: is this the store that knew the lease?
        self._announce()

    def describe(self, **facts: bool | str) -> None:
        """Say of this node what it has not said yet, such as why it is `unhealthy`."""
        if any(getattr(self.node, name) != fact for name, fact in facts.items()):
            self._announce(**facts)

    def _announce(self, **facts: Any) -> int:
        """Register again, and say something else of this agent."""
        revision = self._registration.change(**facts)
        if self._job_view is not None:  # it may want to leave before it has joined
            self._job_view.distrust()
        return revision

    def publish_master(self, job: Snapshot, address: str) -> None:
        """Say where the TCPStore of the job's round listens, `host:port`."""
        key = self.keys.of_round(job.n, "master")
        # The fence as well: if etcd was restored meanwhile, another round may get this number.
        compares = [absent(key), unchanged(self.keys.round, job.fence)]
        self._store.txn(compares, [Put(key, address)])
        self._seeing.distrust()

    def stepped(self, n: int, ago_s: float) -> None:
        """Workers here finished a step of round n so long ago; callable any number of times."""
        self._durations.stepped(n, ago_s)

    def report_quiet(self, n: int) -> None:
        """This node's workers of round n are gone."""
        self._report(n, "quiet")

    def report_done(self, n: int) -> None:
        """This node's workers of round n have all exited with 0."""
        self._report(n, "done")

    def report_failure(self, n: int, failure: Failure) -> None:
        """This node's workers of round n failed."""
        self._report(n, "symptom" if failure.symptom else "fail", failure.to_json())

    def report_links(self, n: int, dead: Sequence[DeadLink] | None) -> None:
        """Whom this node does not reach in round n, nobody perhaps; None: it does not say."""
        key = self.keys.report(n, "links", self.node.id)
        if dead is None:
            self._store.txn([], [Delete(key)])
        else:
            # Without a comparison: it looks again and again, and the last finding counts.
            report = LinkReport(node=self.node.id, dead=tuple(dead))
            self._store.txn([], [Put(key, report.to_json())])
        self._seeing.distrust()

    def come_back(self) -> None:
        """This node is set aside no more: it may take part in the next round."""
        self._store.txn([], [Delete(self.keys.aside(self.node.id))])
        self._seeing.distrust()

    def commit(self, fence: int, request: CommitRequest) -> bool:
        """Publish a checkpoint; a stale worker, whose round is over, is refused by its fence.

        Raises:
            StoreUnavailable: The store did not answer; the checkpoint must not be published.
        """
        new = Published(
            step=request.step,
            tag=request.tag,
            digest=request.digest,
            samples=request.samples,
            time=time.time(),
            root=request.root,
        )
        put = Put(self.keys.in_memory if request.in_memory else self.keys.latest, new.to_json())
        # The fence counts in one store: one that has followed it refuses whoever knows the old one.
        compares = [unchanged(self.keys.round, fence), self._seeing.no_heir]
        return self._store.txn(compares, [put]).succeeded

    def close(self) -> None:
        """Leave: the other agents see it at once."""
        if self._job_view is not None:
            self._job_view.close()
        self._registration.close()

    # ---- reading ----

    @property
    def _seeing(self) -> JobView:
        assert self._job_view is not None, "not registered"
        return self._job_view

    def _look(self) -> Snapshot:
        job = self._seeing.look()
        # Kept until it is told: the check below raises if the store does not answer.
        self._jump = self._seeing.jump() or self._jump
        if self._jump or (job.state in ENDED and job is not self.snapshot):
            self._check_job()
        if self._jump:
            text = f"{self._jump}; it has the data of this job, and round {job.n} goes on"
            self._journal.tell("store", text, level=logging.WARNING)
            self._jump = None
        if job is not self.snapshot:
            self.snapshot = job
            if self._seeing.whole:
                self._durations.look(job)  # deciders measure durations
        mine = job.node(self.node.id)
        if mine is not None and mine.incarnation != self.node.incarnation:
            raise NodeTaken(
                f"another agent has registered as node {mine.id}; this one stops. "
                "Give each agent its own --node-id, or none"
            )
        return job

    def _check_job(self) -> None:
        """Raises StoreReplaced: etcd has another job of this name."""
        held = self._store.get(self.keys.secret)
        if held is None or held.value != self.secret:
            raise StoreReplaced(
                f"etcd has lost the data of job {self.keys.job}"
                f"{', and has another job of this name' if held else ''}. {RESTART}"
            )
        if (heir := self._store.get(self._seeing.no_heir.key)) is not None:
            raise StoreReplaced(f"job {self.keys.job} has a new store: {heir.value}")
        self._same_job = unchanged(self.keys.secret, held.mod_revision)

    # ---- moving on ----

    def _advance(self) -> bool:
        """Try the transition that is due; returns whether the snapshot must be read again."""
        job = self.snapshot
        if not self._seeing.whole:
            self.waits_for = None
            if job.state in ENDED:
                self.reason = f"the job is {job.state}: {job.cause}"
            elif job.state is not State.ACTIVE:
                self.reason = f"round {job.n + 1} is forming; others see to it"
            else:
                self.reason = job.yielding or runs(job)
            return False
        decision = decide(job, self._durations.observed(), self._timing)
        if decision.transition is not None:
            # One after the other, in an order that differs from round to round: normally one
            # transaction is made, and the death of any agent delays a round by a quarter second.
            due_s = self._durations.pending(decision.transition.move)
            if due_s < TURN_S * place(job, self.node.id):
                return False  # another agent is about to make the transition
        self.reason, self.waits_for = decision.reason, decision.waits_for
        if decision.transition is None:
            return False
        try:
            self._make(job, decision.transition, decision.reason)
        except StoreFull:
            self.reason += "; that waits for room in etcd"
            raise
        self._seeing.distrust()
        return True

    def _make(self, job: Snapshot, transition: Transition, reason: str) -> None:
        """Try a transition."""
        exclusion, move = transition.exclusion, transition.move
        # This lease has no keep-alive: the exclusion ends by the clock of the store.
        lease = self._store.grant(exclusion.for_s) if exclusion is not None else NO_LEASE
        took_s = self._durations.left_s(job.n)
        facts: dict[str, Any] = {
            "round": job.n + 1 if move is Move.ACTIVATE else job.n,
            "nodes": [node.id for node in transition.members.nodes],
        }
        ends = move in {Move.FORM, Move.INTERRUPT}
        if ends and (idle_s := self._durations.idle_s(job.n)) is not None:
            facts["idle_s"] = round(idle_s, 3)
        compares, writes = transaction(
            self.keys, job, transition, lease, at_s=time.time(), took_s=took_s
        )
        # etcd takes 128 writes at once. Of many nodes, most are set aside beforehand: if the round
        # goes on after all, each of them comes back by itself.
        aside = [one for one in writes if one.key.startswith(self.keys.aside(""))]
        for at in range(ASIDE_AT_ONCE, len(aside), ASIDE_AT_ONCE):
            some = aside[at : at + ASIDE_AT_ONCE]
            self._store.txn(compares, some)
            writes = [one for one in writes if one not in some]
        # The event is in the transaction: it is told even if the answer is lost.
        event = Put(self.keys.told(job.fence, move), self._journal.line(move, reason, **facts))
        # Where no round has been, its absence is no fence: any store without the job has that.
        compares += [self._seeing.no_heir, self._same_job]
        done = self._store.txn(compares, [*writes, event])
        if done.succeeded:
            level = logging.INFO if transition.charge is None else logging.WARNING
            facts["revision"] = done.revision
            self._journal.tell(move, reason, level=level, stored=True, **facts)
            return
        if lease != NO_LEASE:
            self._store.revoke(lease)
        self._check_job()  # most often another agent was faster

    # ---- writing ----

    def _report(self, n: int, kind: str, value: str = "") -> None:
        """Report how this node's part of round n ended; a second report changes nothing."""
        key = self.keys.report(n, kind, self.node.id)
        # Only if absent: the revision of the first report orders the failures of all nodes.
        done = self._store.txn([absent(key)], [Put(key, value)])
        self._seeing.said(KeyValue(key, value, done.revision, done.revision))
