"""What must hold after every event of a simulation; ARCHITECTURE.md has the table of I1 to I12."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tests.simulation.cluster import KEYS, AgentRun, Cluster
from tests.simulation.training import Checkpoint, Worker, digest_of
from tests.support.mvcc import Batch, Database
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.membership.job_state import ENDED, Snapshot, State
from zero_orchestrator.membership.moves import LEGAL, Move
from zero_orchestrator.membership.parse import parse
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.store.kv import Range

WORKERS_END_S = 1.0
"""No worker outlives its agent by more (I8)."""
AGENTS_END_S = 90.0
"""Every agent that runs ends within this time after its job, once it reaches etcd."""
LOOK_S = 5.0
SLACK_S = 20.0
"""A reply may come so much later than it was to: one call, and a loop that stood still."""
COMMON = {
    AgentExit.OK,
    AgentExit.DRAINED,
    AgentExit.STOPPED,
    AgentExit.NO_STORE,
    AgentExit.JOB_FAILED,
    128 + 15,
}
"""Exit codes of agents that have done their part."""
CHARGED = (Move.INTERRUPT, Move.FAIL, Move.GIVE_UP)

digest = cache(digest_of)


@dataclass
class Invariants:
    """Watches a cluster."""

    cluster: Cluster
    free: bool = False
    """Nothing happens that costs a restart."""
    transitions: dict[int, Move] = field(default_factory=dict)
    """By revision."""
    restores: int = 0
    """How often etcd has gone back in time, on purpose."""
    job: Snapshot | None = None
    _charges: dict[str, str] = field(default_factory=dict)
    _members: dict[str, str] = field(default_factory=dict)
    _granted: set[str] = field(default_factory=set)
    _published: set[tuple[int, int]] = field(default_factory=set)
    _asked: dict[Worker, tuple[float, Checkpoint]] = field(default_factory=dict)
    _ended_s: float | None = None

    def __post_init__(self) -> None:
        cluster = self.cluster
        cluster.etcd.observers.append(self.changed)
        cluster.training.disk.on_publish = self.published
        cluster.training.asked = self.asked  # type: ignore[method-assign]
        cluster.training.answered = self.answered  # type: ignore[method-assign]
        cluster.on_agent_end = self.agent_ended
        cluster.on_agent_killed = self.no_worker_after
        cluster.kernel.after(LOOK_S, self.look)

    def broken(self, text: str) -> None:
        """An invariant does not hold."""
        self.cluster.problem(text)

    # ---- the store ----

    def snapshot(self, database: Database) -> Snapshot:
        """The job as somebody reads it now."""
        items = tuple(database.under(KEYS.prefix))
        spec = JobSpec.from_json(database.items[KEYS.spec].value)
        return parse(KEYS, Range(database.revision, items), spec)

    def changed(self, batch: Batch, database: Database) -> None:
        """A revision of etcd."""
        keys = {change.key: change for change in batch}
        for key, change in keys.items():
            if change.item is None:
                continue
            if key.startswith(f"{KEYS.prefix}charged/"):
                self._charge(key, change.item.value, database)
            elif key.startswith(f"{KEYS.prefix}rounds/") and key.endswith("/members"):
                if key in self._members:
                    self.broken(f"I1: {key} is written again")
                self._members[key] = change.item.value
            elif key == KEYS.latest:
                self._commit(json.loads(change.item.value), database)
        if (head := keys.get(KEYS.round)) is not None:
            if head.item is None:
                self.broken("I10: the round is deleted")
            else:
                self._transition(database, json.loads(head.item.value))
        elif any(key.startswith(KEYS.of_round(self.job.n, "yield")) for key in keys if self.job):
            self._yield(database)

    def _transition(self, database: Database, record: dict[str, Any]) -> None:
        before, job = self.job, self.snapshot(database)
        self.job = job
        move = Move(record["by"])
        self.transitions[database.revision] = move
        source, target = LEGAL[move]
        state = before.state if before is not None else None
        n = before.n if before is not None else 0
        if (state, job.state) != (source, target):
            self.broken(f"I1: {move} leads from {state} to {job.state}")
        if job.n != n + (move is Move.ACTIVATE):
            self.broken(f"I1: {move} leads from round {n} to round {job.n}")
        if state in ENDED:
            self.broken(f"I10: {move} after {state}")
        if move is Move.ACTIVATE:
            self._begins(before, job, database)
        if job.state is State.STOPPED and job.stop is None:
            self.broken("I11: stopped, and nobody has asked for it")
        if (move in CHARGED) != (job.charges > (before.charges if before else 0)):
            self.broken(f"I5: {move} with {job.charges} charges")
        if move in CHARGED and self.free:
            self.broken(f"budget: {job.cause}, and nothing has failed")
        if job.state in ENDED:
            self._ended_s = self.cluster.kernel.now

    def _begins(self, before: Snapshot | None, job: Snapshot, database: Database) -> None:
        ids = [node.id for node in job.members.nodes]
        if len(set(ids)) < len(ids):
            self.broken(f"I3: round {job.n} has the nodes {ids}")
        if not job.spec.min_nodes <= len(ids) <= job.spec.max_nodes:
            self.broken(f"I4: round {job.n} has {len(ids)} nodes")
        if job.stop is not None:
            self.broken(f"I11: round {job.n} begins after a stop")
        live = {(node.id, node.incarnation) for node in job.nodes}
        # One that has come back too late for this round is not in it, and its workers are fenced.
        former = [m for m in before.members.nodes if job.has_member(m)] if before else []
        prefix = KEYS.report(job.n - 1, "quiet/")
        busy = [
            member.id
            for member in former
            if (member.id, member.incarnation) in live and prefix + member.id not in database.items
        ]
        if busy:
            self.broken(f"round {job.n} begins, and the workers of {busy} have not stopped")
        stays = live & {(member.id, member.incarnation) for member in former}
        names = {name for name, _ in stays}
        for worker in self.cluster.workers:
            machine = worker.machine
            if machine.name in names and worker.server.agent is machine.agent:
                self.broken(f"round {job.n} begins, and rank {worker.rank} still runs")

    def _yield(self, database: Database) -> None:
        job = self.snapshot(database)
        if job.yielding is None or job.state is not State.ACTIVE:
            return
        draining = {n.id for n in job.nodes if n.draining and job.has_member(n)}
        if "leaving" in job.yielding and draining and draining <= job.done:
            self.broken(f"I12: round {job.n} is left for {draining}, which have finished")

    def _charge(self, key: str, value: str, database: Database) -> None:
        if key in self._charges:
            self.broken(f"I5: {key} is charged twice")
        self._charges[key] = value

    def _commit(self, record: dict[str, Any], database: Database) -> None:
        """A checkpoint may be published."""
        head = database.items.get(KEYS.round)
        job = json.loads(head.value) if head else {"n": 0, "state": None}
        n = int(record["tag"].rpartition(".g")[2])
        if job["state"] != State.ACTIVE or job["n"] != n:
            where = f"round {job['n']} ({job['state']})"
            self.broken(f"I2: {record['tag']} is published in {where}")
        self._granted.add(record["tag"])

    # ---- the disk, and the samples ----

    def published(self, saved: Checkpoint) -> None:
        """A manifest is renamed."""
        who = saved.step, saved.fence
        if who in self._published:
            self.broken(f"step {saved.step} is published twice under one fence")
        self._published.add(who)
        if f"step-{saved.step:09}.g{saved.round}" not in self._granted:
            self.broken(f"I2: step {saved.step} of round {saved.round} is published unasked")
        if saved.digest != digest(saved.step):
            self.broken(f"I7: checkpoint {saved.step} has lost or repeated samples")

    # ---- what is bounded ----

    def asked(self, worker: Worker, saved: Checkpoint, patience_s: float) -> None:
        """A worker has asked to publish."""
        self._asked[worker] = (self.cluster.kernel.now + patience_s, saved)

    def answered(self, worker: Worker, saved: Checkpoint) -> None:
        """It has its answer."""
        self._asked.pop(worker, None)

    def agent_ended(self, run: AgentRun) -> None:
        """An agent has ended by itself."""
        if run.code not in COMMON and not self._explained(run):
            self.broken(f"the agent of {run.machine} ends with {run.code}: {run.error}")
        self.no_worker_after(run)

    def _explained(self, run: AgentRun) -> bool:
        words = ("another agent has registered", "no round began", "not become healthy")
        return self.restores > 0 or any(word in run.error for word in words)

    def no_worker_after(self, run: AgentRun) -> None:
        """An agent has ended, or was killed: its workers end as well."""

        def check() -> None:
            left = [w for w in self.cluster.workers if w.server.agent is run.process]
            if left:
                ranks = [worker.rank for worker in left]
                self.broken(f"I8: ranks {ranks} outlive the agent of {run.machine}")

        self.cluster.kernel.after(WORKERS_END_S, check)

    def look(self) -> None:
        """Is anybody waiting for too long?"""
        kernel = self.cluster.kernel
        for worker, (until_s, saved) in list(self._asked.items()):
            agent = worker.server.agent
            if not worker.alive or not agent.alive or worker.frozen:
                del self._asked[worker]
            elif agent.frozen or agent.lag_s:
                self._asked[worker] = (kernel.now + SLACK_S, saved)
            elif kernel.now > until_s + SLACK_S:
                self.broken(f"rank {worker.rank} has no answer about step {saved.step}")
        kernel.after(LOOK_S, self.look)

    def at_the_end(self, expected: Callable[[Snapshot], bool]) -> None:
        """Everything that was to happen has happened.

        Args:
            expected: Whether this is how the job was to end.
        """
        cluster, job = self.cluster, self.job
        if job is None or job.state not in ENDED:
            state = "it never began" if job is None else f"{job.state} in round {job.n}"
            self.broken(f"I6: the faults are over, and the job has not ended: {state}")
            return
        if not expected(job):
            self.broken(f"the job is {job.state}: {job.cause}")
        if job.state is State.DONE:
            newest = cluster.training.disk.newest
            steps = cluster.training.total_steps
            if newest is None or (newest.step, newest.digest) != (steps, digest(steps)):
                self.broken(f"I7: the job is done, and its last checkpoint is {newest}")
        if running := [run.machine for run in cluster.runs if run.process.alive]:
            self.broken(f"the agents of {running} have not ended")
        told = {event.get("revision") for event in cluster.events}
        for revision, move in self.transitions.items():
            if revision not in told and revision in cluster.etcd.answered:
                self.broken(f"no event explains {move} at revision {revision}")
