"""What must hold after every event of a simulation; ARCHITECTURE.md has the table of I1 to I12."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from tests.simulation.cluster import KEYS, AgentRun, Cluster
from tests.simulation.training import Checkpoint, Worker, digest_of
from tests.support.job_history import WORKERS_END_S, JobHistory, explained
from zero_orchestrator.membership.job_state import ENDED, Snapshot, State

LOOK_S = 5.0
SLACK_S = 20.0
"""A reply may come so much later than it was to: one call, and a loop that stood still."""

digest = cache(digest_of)


@dataclass
class Invariants:
    """Watches a cluster."""

    cluster: Cluster
    free: bool = False
    """Nothing happens that costs a restart."""
    restores: int = 0
    """How often etcd has gone back in time, on purpose."""
    history: JobHistory = field(init=False)
    _published: set[tuple[int, int]] = field(default_factory=set)
    _asked: dict[Worker, tuple[float, Checkpoint]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cluster = self.cluster
        self.history = JobHistory(KEYS, self.broken, free=self.free, on_begin=self.begins)
        cluster.etcd.observers.append(self.history.changed)
        cluster.training.disk.on_publish = self.published
        cluster.training.asked = self.asked  # type: ignore[method-assign]
        cluster.training.answered = self.answered  # type: ignore[method-assign]
        cluster.on_agent_end = self.agent_ended
        cluster.on_agent_killed = self.no_worker_after
        cluster.kernel.after(LOOK_S, self.look)

    @property
    def job(self) -> Snapshot | None:
        """The job as of its last transition."""
        return self.history.job

    def broken(self, text: str) -> None:
        """An invariant does not hold."""
        self.cluster.problem(text)

    def begins(self, n: int, names: set[str]) -> None:
        """A round begins with nodes that were in the one before, whose workers have ended."""
        for worker in self.cluster.workers:
            machine = worker.machine
            if machine.name in names and worker.server.agent is machine.agent:
                self.broken(f"round {n} begins, and rank {worker.rank} still runs")

    # ---- the disk, and the samples ----

    def published(self, saved: Checkpoint) -> None:
        """A manifest is renamed."""
        who = saved.step, saved.fence
        if who in self._published:
            self.broken(f"step {saved.step} is published twice under one fence")
        self._published.add(who)
        if f"step-{saved.step:09}.g{saved.round}" not in self.history.granted:
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
        if not (explained(run.code, run.error) or self.restores):
            self.broken(f"the agent of {run.machine} ends with {run.code}: {run.error}")
        self.no_worker_after(run)

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
        for revision, move in self.history.unexplained(cluster.events).items():
            if revision in cluster.etcd.answered:
                self.broken(f"no event explains {move} at revision {revision}")
