"""What must hold after every event of a simulation; ARCHITECTURE.md has the table of I1 to I12."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulation.cluster import JOB, KEYS, AgentRun, Cluster
from tests.simulation.model import digest_of
from tests.simulation.sockets import AgentSocket
from tests.simulation.training import Watcher, Worker
from tests.support.job_history import WORKERS_END_S, JobHistory, explained
from tests.support.mvcc import Batch, Database
from zero_agent.workers.environment import places
from zero_checkpoint.format.manifest import MANIFEST, age
from zero_checkpoint.format.parse import parse
from zero_checkpoint.loading.candidates import find, read_manifest
from zero_checkpoint.loading.restore import Loaded
from zero_checkpoint.saving.retention import FEWEST_KEPT
from zero_contract.worker import CommitRequest, Saved
from zero_orchestrator.membership.job_state import ENDED, Snapshot, State
from zero_orchestrator.observe.events import goodput_prefix, read_goodput
from zero_orchestrator.observe.goodput import total_ns

LOOK_S = 5.0
SLACK_S = 20.0
"""A reply may come so much later than it was to: one call, and a loop that stood still."""


@dataclass
class Invariants(Watcher):
    """Watches a cluster."""

    cluster: Cluster
    free: bool = False
    """Nothing happens that costs a restart."""
    restores: int = 0
    """How often etcd has gone back in time, on purpose."""
    history: JobHistory = field(init=False)
    _published: set[tuple[int, int]] = field(default_factory=set)
    _places: dict[tuple[int, int, str], set[int]] = field(default_factory=dict)
    """By round, fence and node: the ranks of its workers."""
    _asked: dict[tuple[AgentSocket, int], tuple[float, int]] = field(default_factory=dict)
    """By connection and request: until when it is to be answered, and the step."""
    _askers: dict[str, AgentSocket] = field(default_factory=dict)
    """By the digest of a manifest."""
    _names: dict[tuple[int, int], str] = field(default_factory=dict)
    """By step and fence: the directory of the checkpoint."""
    _may_be_kept: set[str] = field(default_factory=set)
    """The digests of the manifests that may be kept in memory."""
    _whole: set[str] = field(default_factory=set)
    """Checkpoints on disk that are published, and not removed."""
    _durable: set[str] = field(default_factory=set)
    """Checkpoints on disk that some rank knows to be published."""
    _resumed: dict[int, str] = field(default_factory=dict)
    """By fence: from which checkpoint the workers resume."""
    _lost: list[Worker] = field(default_factory=list)
    """Those that ran in a round of which etcd knows nothing any more, as it went back in time."""

    def __post_init__(self) -> None:
        cluster = self.cluster
        self.history = JobHistory(KEYS, self.broken, free=self.free, on_begin=self.begins)
        self.history.round_of = self._round_of
        cluster.etcd.observers.append(self.history.changed)
        cluster.training.disk.on_publish = self.published
        cluster.training.disk.on_remove = self.removed
        cluster.training.watcher = self
        cluster.etcd.observers.append(self._in_memory)
        cluster.etcd.on_restore = self.restored
        cluster.training.on_kept = self.kept
        cluster.on_agent_end = self.agent_ended
        cluster.on_agent_killed = self.no_worker_after
        cluster.kernel.after(LOOK_S, self.look)

    def restored(self, database: Database) -> None:
        """Etcd has gone back in time."""
        self.restores += 1
        self.history.restored(database)
        # The copy may hold that their node has stopped, from before they began: who reads it cannot
        # know of them, and their own agent may not reach etcd. Their fence is
        # another one, so they publish nothing.
        self._lost += [each for each in self.cluster.workers if each.fence > database.revision]
        # Fences of the lost time come again, and may publish again.
        lost = {who for who in self._published if who[1] > database.revision}
        self._published -= lost
        self._resumed = {n: name for n, name in self._resumed.items() if n <= database.revision}

    @property
    def job(self) -> Snapshot | None:
        """The job as of its last transition."""
        return self.history.job

    def broken(self, text: str) -> None:
        """An invariant does not hold."""
        self.cluster.problem(text)

    def begins(self, n: int, names: set[str]) -> None:
        """A round begins with nodes that were in the one before, whose workers have left it."""
        job = self.job
        assert job is not None
        for node in job.members.nodes:
            ranks = {place.rank for place in places(job, node)}
            self._places[n, job.fence, node.id] = ranks
        for worker in self.cluster.workers:
            machine, left = worker.machine, worker.waits or not worker.told
            known = all(worker is not lost for lost in self._lost)
            here = machine.name in names and worker.server.agent is machine.agent
            if here and known and not left:
                self.broken(f"round {n} begins, and rank {worker.rank} still runs")

    def joins(self, worker: Worker) -> None:
        """A worker is about to join a round: its agent has told it to, and it has a place there."""
        what = f"I3: rank {worker.rank} on {worker.machine.name} joins round {worker.round}"
        if worker.round != worker.told:
            self.broken(f"{what}, and was told to join round {worker.told}")
        where = worker.round, worker.fence, worker.machine.name
        if worker.rank not in self._places.get(where, ()) and not self.restores:
            self.broken(f"{what}, in which it has no place")

    def _round_of(self, record: dict[str, Any]) -> int:
        asked = self._askers.get(record["digest"])
        return asked.round if asked is not None else 0  # nobody has asked: it is of no round

    # ---- the disk, and the samples ----

    def published(self, directory: Path) -> None:
        """A manifest is renamed."""
        manifest = read_manifest(directory / MANIFEST)
        asked = self._askers.get(manifest.digest)
        if asked is None or manifest.digest not in self.history.granted:
            self.broken(f"I2: {directory.name} is published unasked")
            return
        who = manifest.step, asked.fence
        if who in self._published:
            self.broken(f"step {manifest.step} is published twice under one fence")
        self._published.add(who)
        self._names[who] = directory.name
        self._whole.add(directory.name)
        for record in manifest.files:
            path = directory / record.name
            if not path.is_file() or path.stat().st_size != record.size_bytes:
                self.broken(f"{directory.name} is published, and {record.name} is not whole")
        if manifest.meta["digest"] != digest_of(manifest.step):
            self.broken(f"I7: checkpoint {manifest.step} has lost or repeated samples")

    def _in_memory(self, batch: Batch, database: Database) -> None:
        """A checkpoint in memory may be kept."""
        for change in batch:
            if change.key == KEYS.in_memory and change.item is not None:
                self._may_be_kept.add(json.loads(change.item.value)["digest"])

    def kept(self, text: bytes) -> None:
        """A node keeps a manifest in memory."""
        manifest = parse(text)
        if manifest.digest not in self._may_be_kept:
            self.broken(f"I2: {manifest.directory} is kept in memory unasked")
        if manifest.meta["digest"] != digest_of(manifest.step):
            self.broken(f"I7: checkpoint {manifest.step} in memory has lost or repeated samples")

    def acknowledged(self, peer: AgentSocket, saved: Saved) -> None:
        """A rank knows that a checkpoint is published: it outlives whatever happens now."""
        name = self._names.get((saved.step, peer.fence))
        if saved.committed and not saved.in_memory and name is not None:
            self._durable.add(name)

    def removed(self, directory: Path) -> None:
        """A checkpoint stops being one."""
        self._whole.discard(directory.name)
        newer = [name for name in self._whole if age(name) >= age(directory.name)]
        if directory.name in self._durable and len(newer) < FEWEST_KEPT:
            self.broken(f"{directory.name} is removed, and newer are only {sorted(newer)}")
        self._durable.discard(directory.name)

    def chosen(self, worker: Worker, loaded: Loaded | None) -> None:
        """A rank resumes from a checkpoint: it is the newest, and all ranks have the same.

        A rank that stood still may learn late what its round has chosen, when another one has begun
        and saved.
        """
        damaged = {path.name for path in self.cluster.training.disk.damaged}
        known = (name for name in self._durable - damaged if age(name)[0] <= worker.round)
        newest = max(known, key=age, default="")
        name = loaded.path.name if loaded is not None else ""
        if newest and (not name or age(name) < age(newest)):
            self.broken(f"rank {worker.rank} resumes from {name or 'nothing'}, not from {newest}")
        if self._resumed.setdefault(worker.fence, name) != name:
            self.broken(f"I7: ranks resume from {name} and {self._resumed[worker.fence]}")

    # ---- what is bounded ----

    def asked(self, peer: AgentSocket, request: CommitRequest) -> None:
        """A worker has asked to publish."""
        self._askers[request.digest] = peer
        until_s = self.cluster.kernel.now + request.patience_s
        self._asked[peer, request.request] = until_s, request.step

    def answered(self, peer: AgentSocket, request: int) -> None:
        """It has its answer."""
        self._asked.pop((peer, request), None)

    def agent_ended(self, run: AgentRun) -> None:
        """An agent has ended by itself."""
        if not (explained(run.code, run.error) or self.restores):
            self.broken(f"the agent of {run.machine} ends with {run.code}: {run.error}")
        self._accounts_for(run)
        self.no_worker_after(run)

    def no_worker_after(self, run: AgentRun) -> None:
        """An agent has ended, or was killed: its workers end as well."""

        def check() -> None:
            left = [w for w in self.cluster.workers if w.server.agent is run.process]
            if left:
                ranks = [worker.rank for worker in left]
                self.broken(f"I8: ranks {ranks} outlive the agent of {run.machine}")

        self.cluster.kernel.after(WORKERS_END_S, check)

    def _knows_its_workers(self, run: AgentRun) -> None:
        """No worker waits for an agent that waits for nothing of it."""
        if run.agent is None:
            return
        known = run.agent._node_workers.group._running.keys()
        for worker in self.cluster.workers:
            if worker.server.agent is run.process and worker.number not in known:
                self.broken(f"the agent of {run.machine} has forgotten rank {worker.rank}")

    def _accounts_for(self, run: AgentRun) -> None:
        """The ledger of an agent has each second since its start once."""
        if run.agent is not None:
            used_s = total_ns(run.agent._told.time.used_ns()) / 1e9
            lived_s = self.cluster.kernel.now - run.began_s
            if abs(used_s - lived_s) > 1e-6:
                text = f"has {used_s:.3f} s of {lived_s:.3f} s in its ledger"
                self.broken(f"the agent of {run.machine} {text}")

    def _written_ledgers(self) -> None:
        """What etcd has of the time of a node is not more than the time of its agents."""
        cluster, prefix = self.cluster, goodput_prefix(JOB)
        for item in cluster.etcd.database.under(prefix):
            name = item.key.removeprefix(prefix)
            lived_s = sum(
                (cluster.kernel.now if run.process.alive else run.process.ended_s) - run.began_s
                for run in cluster.runs
                if run.machine == name
            )
            if (used_s := total_ns(read_goodput(item)) / 1e9) > lived_s + 1e-6:
                self.broken(f"the ledger of {name} has {used_s:.3f} s, and it ran {lived_s:.3f} s")

    def look(self) -> None:
        """Is anybody waiting for too long? Is all time accounted for?"""
        kernel = self.cluster.kernel
        for run in self.cluster.runs:
            if run.process.alive:
                self._accounts_for(run)
                self._knows_its_workers(run)
        self._written_ledgers()
        for (peer, number), (until_s, step) in list(self._asked.items()):
            worker, agent = peer.worker, peer.worker.server.agent
            if not (worker.alive and agent.alive and peer.is_open) or worker.frozen:
                del self._asked[peer, number]
            elif agent.frozen or agent.lag_s or agent.is_held(kernel.now):
                self._asked[peer, number] = (kernel.now + SLACK_S, step)
            elif kernel.now > until_s + SLACK_S:
                self.broken(f"rank {peer.rank} has no answer about step {step}")
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
            newest = next(iter(find(cluster.training.root).candidates), None)
            total, damaged = cluster.training.total_steps, cluster.training.disk.damaged
            last = [name for (step, _), name in self._names.items() if step == total]
            is_damaged = any(path.name in last for path in damaged)  # after the end of the job
            if (newest is None or newest.manifest.step != total) and not is_damaged:
                self.broken(f"I7: the job is done, and its last checkpoint is {newest}")
        running = [
            run.machine for run in cluster.runs if run.process.alive and not run.process.stuck
        ]
        if running:
            self.broken(f"the agents of {running} have not ended")
