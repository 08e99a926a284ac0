"""Simulated workers that keep the contract with their agent, and the disk that they share.

A worker meets the other ranks of its round, loads the newest checkpoint, takes steps with them,
saves now and then beside its steps, and leaves at a boundary when it is asked to. Its state after
step S is a digest of all samples of the steps up to S, so whoever runs a step twice, leaves out a
sample or goes on from another run's state ends with another digest.

A save is the protocol of `zero_checkpoint.commit`: each rank writes its file and votes, rank 0 asks
its agent for the fence and then publishes the manifest; nothing else makes a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.machine import Forkserver, Machines
from zero_contract import worker as contract
from zero_contract.worker import (
    Ability,
    CommitReply,
    CommitRequest,
    ExitCode,
    Hello,
    Leave,
    Left,
    Message,
    Progress,
    Restored,
    Saved,
    SaveWaits,
    When,
)
from zero_data.global_batch import strided

Life = Generator["float | Exchange", Any, int | None]

MICROBATCHES = 12
PATIENCE_S = 20.0
"""How long a worker that leaves repeats its request to publish its checkpoint."""
VOTES_S = 30.0
"""How long the votes of all ranks are waited for."""


class PeerLost(Exception):
    """A rank of the group is gone."""


@dataclass(frozen=True)
class Checkpoint:
    """What a manifest says."""

    step: int
    digest: str
    round: int
    fence: int


class Disk:
    """The storage of all nodes."""

    def __init__(self) -> None:
        self.full = False
        self.slow = 1.0
        self.published: list[Checkpoint] = []
        self.on_publish: Callable[[Checkpoint], None] = lambda checkpoint: None

    def publish(self, checkpoint: Checkpoint) -> None:
        """Rename the manifest."""
        self.published.append(checkpoint)
        self.on_publish(checkpoint)

    @property
    def newest(self) -> Checkpoint | None:
        """The checkpoint that a load takes."""
        return max(self.published, key=lambda one: one.step, default=None)


def digest_of(steps: int) -> str:
    """The state after so many steps, by whomever they were taken."""
    digest = ""
    for step in range(1, steps + 1):
        digest = _after(digest, step, tuple(range(MICROBATCHES)))
    return digest


def _after(digest: str, step: int, samples: tuple[int, ...]) -> str:
    return hashlib.sha256(f"{digest}/{step}/{samples}".encode()).hexdigest()[:16]


class Exchange:
    """One exchange of a group: it ends when all ranks have come to it."""

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name
        self.notes: dict[int, Any] = {}
        self.waiting: list[Strand] = []
        self.over = False


class Group:
    """The workers of one round, as they meet at its TCPStore."""

    def __init__(self, training: Training, store: str, world: int) -> None:
        self.training, self.store, self.world = training, store, world
        self.members: dict[int, Worker] = {}
        self.exchanges: dict[str, Exchange] = {}
        self.votes: dict[str, dict[int, bool]] = {}

    def reaches_store(self, worker: Worker) -> bool:
        """Whether the TCPStore answers a worker."""
        host = self.store.partition(":")[0]
        machines = self.training.machines
        return self.store in machines.by_name[host].stores and machines.network.connects(
            worker.machine.name, host
        )

    def come(self, strand: Strand, name: str, note: Any) -> Exchange:
        """A rank has come to an exchange."""
        exchange = self.exchanges.setdefault(name, Exchange(self, name))
        exchange.notes[strand.worker.rank] = note
        exchange.waiting.append(strand)
        if len(exchange.notes) == self.world:
            self.training.kernel.after(0.002, lambda: self._complete(exchange))
        return exchange

    def _complete(self, exchange: Exchange) -> None:
        if exchange.over:
            return
        names = {member.machine.name for member in self.members.values()}
        connects = self.training.machines.network.connects
        if all(connects(one, other) for one in names for other in names if one < other):
            exchange.over = True
            self.exchanges.pop(exchange.name, None)
            for strand in exchange.waiting:
                strand.go(exchange.notes)
        else:  # the kernel sends again until it arrives
            self.training.kernel.after(0.5, lambda: self._complete(exchange))

    def lost(self, dead: Worker, *, silent: bool) -> None:
        """A member has ended; whom its machine reaches notices."""
        connects = self.training.machines.network.connects
        for member in list(self.members.values()):
            if member is dead or silent or not connects(member.machine.name, dead.machine.name):
                continue
            self.training.kernel.after(0.01, member.peer_lost)


class Strand:
    """One line of work of a worker: its steps, or a save."""

    def __init__(self, worker: Worker, life: Life) -> None:
        self.worker, self._life = worker, life
        self.over = False
        self.meets = False
        """It waits for the other ranks."""
        self._later: list[tuple[Any, BaseException | None]] = []
        self._turn = 0

    def go(self, value: Any = None, error: BaseException | None = None) -> None:
        """Go on, with what was waited for."""
        worker = self.worker
        if self.over or not worker.alive:
            return
        if worker.frozen:
            self._later.append((value, error))
            return
        self._turn += 1
        turn = self._turn
        try:
            wait = self._life.throw(error) if error is not None else self._life.send(value)
        except StopIteration as end:
            self.over = True
            if self is worker.main:
                worker.end(ExitCode.OK if end.value is None else end.value)
            return
        except PeerLost:
            self.over = True
            if self is worker.main:
                worker.end(ExitCode.PEER_LOST)
            return
        self.meets = isinstance(wait, Exchange)
        if not isinstance(wait, Exchange):
            worker.training.kernel.after(wait, lambda: turn == self._turn and self.go())

    def thaw(self) -> None:
        """Go on after a freeze."""
        later, self._later = self._later, []
        for value, error in later:
            self.go(value, error)


class Worker:
    """One process of the job."""

    def __init__(
        self, training: Training, server: Forkserver, number: int, env: Mapping[str, str]
    ) -> None:
        self.training, self.server, self.number, self.env = training, server, number, env
        self.machine = server.machine
        self.rank, self.world = int(env["RANK"]), int(env["WORLD_SIZE"])
        self.round, self.fence = int(env[contract.ENV_ROUND]), int(env[contract.ENV_FENCE])
        self.pid = next(training.machines.pids)
        self.alive, self.frozen, self.hangs, self.stepped = True, False, False, False
        self.step, self.digest = 0, ""
        self.no_room = False
        """Some rank had no room for its part of the last save."""
        self.attempt = 0
        """How often its last save has been repeated."""
        self.main: Strand | None = None
        self._saves: list[Strand] = []
        self._asked = self._may_end = self._lost = False
        self._replies: dict[int, Callable[[CommitReply], None]] = {}
        self._requests = 0

    # ---- life and death ----

    def begin(self) -> None:
        """The process runs."""
        if not (self.alive and self.server.alive and self.number in self.server.running):
            self.alive = False
            return
        self.server._tell(id=self.number, pid=self.pid)
        self.training.began(self)
        store = f"{self.env['MASTER_ADDR']}:{self.env['MASTER_PORT']}"
        self.group = self.training.group(store, self.world)
        self.main = Strand(self, self._live())
        self.main.go()

    def end(self, status: int) -> None:
        """The process ends."""
        if not self.alive:
            return
        self.alive = False
        self.training.ended(self, status)
        if self.main is not None and self.group.members.get(self.rank) is self:
            self.group.lost(self, silent=not self.machine.alive)
        self.server.ended(self.number, status)

    def fail(self, message: str) -> None:
        """Raise an exception."""
        if self.alive and not self.frozen:
            record = {"message": {"message": message, "extraInfo": {"py_callstack": message}}}
            with open(self.env["TORCHELASTIC_ERROR_FILE"], "w") as file:
                json.dump(record, file)
            self.end(1)

    def signalled(self, number: int) -> None:
        """Get a signal from the fork server."""
        if number == signal.SIGKILL:
            delay_s = self.training.machines.about(0.02)
            self.training.kernel.after(delay_s, lambda: self.end(-signal.SIGKILL))
        elif number == signal.SIGTERM and not self.frozen and (self._may_end or not self._told):
            delay_s = self.training.machines.about(0.1)
            self.training.kernel.after(delay_s, lambda: self.end(-signal.SIGTERM))

    def freeze(self, *, on: bool) -> None:
        """SIGSTOP, or SIGCONT."""
        self.frozen = on
        if not on:
            for strand in filter(None, (self.main, *self._saves)):
                strand.thaw()

    def peer_lost(self) -> None:
        """A member of the group is gone; who waits for the others notices."""
        self._lost = True
        if self.main is not None and self.main.meets:
            self.main.go(error=PeerLost())

    # ---- the agent ----

    _told = False
    """Its agent knows that it can leave at a boundary."""

    def tell(self, message: Message) -> None:
        """Send a message to the agent."""
        channel = self.training.machines.channels.get(self.env[contract.ENV_SOCKET])
        if channel is not None:
            self.training.kernel.after(
                self.training.machines.about(0.001),
                lambda: channel.receive(self, message),
                channel.process,
            )

    def hear(self, message: Message) -> None:
        """Receive a message of the agent."""
        if not self.alive:
            return
        if isinstance(message, Leave):
            if message.when is When.BOUNDARY:
                self._asked = True
            else:
                self._may_end = True
        elif isinstance(message, CommitReply) and message.request in self._replies:
            self._replies.pop(message.request)(message)

    # ---- what it does ----

    def _exchange(self, name: str, note: Any) -> Generator[Exchange, Any, dict[int, Any]]:
        if self._lost:
            raise PeerLost
        assert self.main is not None
        notes: dict[int, Any] = yield self.group.come(self.main, name, note)
        return notes

    def _live(self) -> Life:
        training, about = self.training, self.training.machines.about
        self.tell(Hello(rank=self.rank, pid=self.pid, can=(Ability.BOUNDARY,), round=self.round))
        self._told = True
        while not self.group.reaches_store(self):
            yield 0.2
        training.met(self)
        self.group.members[self.rank] = self
        yield from self._exchange("meet", self.machine.name)
        yield about(0.3)  # load
        notes = yield from self._exchange("load", training.disk.newest)
        if (found := notes[0]) is not None:
            self.step, self.digest = found.step, found.digest
            if self.rank == 0:
                self.tell(Restored(step=found.step, tag=_tag(found)))
        training.loaded(self)
        while self.step < training.total_steps:
            yield about(training.step_s) * self.machine.slow
            while self.hangs:
                yield 3600.0
            mine = _microbatches(self.rank, self.world)
            notes = yield from self._exchange(f"step {self.step + 1}", (mine, self._asked))
            samples = tuple(sorted(n for ran, _ in notes.values() for n in ran))
            self.step += 1
            self.stepped = True
            self.digest = _after(self.digest, self.step, samples)
            training.stepped(self, samples)
            self.tell(Progress(step=self.step, samples=self.step * MICROBATCHES, loss=1.0))
            leaves = any(asked for _, asked in notes.values())
            ends = self.step == training.total_steps
            if leaves or ends:
                done = yield from self._save(patience_s=training.grace_s if ends else PATIENCE_S)
                while ends and not done and self.no_room:  # the last save waits for room
                    self.tell(SaveWaits(step=self.step, what="room", left_s=3600.0))
                    yield 2.0
                    self.attempt += 1
                    done = yield from self._save(patience_s=training.grace_s)
                if ends:
                    yield from self._evaluate()
                    return ExitCode.OK if done else ExitCode.PEER_LOST
                self.tell(Left(round=self.round, step=self.step))
                return ExitCode.LEFT
            if self.step % training.save_every == 0:
                save = Strand(self, self._save_beside())
                self._saves = [one for one in self._saves if not one.over] + [save]
                save.go()
        return ExitCode.OK

    def _evaluate(self) -> Generator[float, Any, None]:
        """On rank 0 alone, with heartbeats."""
        until_s = self.training.kernel.now + (self.training.evaluation_s if self.rank == 0 else 0.0)
        while self.training.kernel.now < until_s:
            yield 5.0
            self.tell(Progress(step=self.step, samples=self.step * MICROBATCHES))

    def _save_beside(self) -> Life:
        yield from self._save(patience_s=0.0)
        return None

    def _save(self, patience_s: float) -> Generator[float, Any, bool]:
        """Write, vote, and publish if this is rank 0; whether it was published."""
        training, about, group = self.training, self.training.machines.about, self.group
        saved = Checkpoint(self.step, self.digest, self.round, self.fence)
        name, began_s = _tag(saved), training.kernel.now
        yield about(0.3) * training.disk.slow
        votes = group.votes.setdefault(f"{name} {self.attempt}", {})
        if not group.reaches_store(self):
            return False
        votes[self.rank] = not training.disk.full
        if self.rank == 0:
            while len(votes) < self.world and training.kernel.now < began_s + VOTES_S:
                yield 0.05
            granted = len(votes) == self.world and all(votes.values())
            if granted:
                granted = yield from self._ask(saved, patience_s)
            if granted:
                yield about(0.005)
                training.disk.publish(saved)
            votes[-1] = granted
        while -1 not in votes:
            late = training.kernel.now > began_s + VOTES_S + patience_s
            if late or not group.reaches_store(self):
                return False
            yield 0.05
        self.no_room = not all(votes[rank] for rank in votes if rank >= 0)
        self.tell(Saved(step=saved.step, committed=votes[-1], total_s=1.0))
        return votes[-1]

    def _ask(self, saved: Checkpoint, patience_s: float) -> Generator[float, Any, bool]:
        self._requests += 1
        number, replies = self._requests, []
        self._replies[number] = replies.append
        self.tell(
            CommitRequest(
                request=number,
                step=saved.step,
                tag=_tag(saved),
                digest=saved.digest,
                samples=saved.step * MICROBATCHES,
                patience_s=patience_s,
                round=self.round,
            )
        )
        self.training.asked(self, saved, patience_s)
        while not replies:
            yield 0.05
        self.training.answered(self, saved)
        return bool(replies[0].granted)


def _microbatches(rank: int, world: int) -> tuple[int, ...]:
    """The micro-batches that a rank runs in a step, as the product plans them."""
    turns = range(-(-MICROBATCHES // world))
    numbers = (strided(world).number(micro, rank, MICROBATCHES) for micro in turns)
    return tuple(number for number in numbers if number < MICROBATCHES)


def _tag(saved: Checkpoint) -> str:
    return f"step-{saved.step:09}.g{saved.round}"


@dataclass
class Training:
    """The job that all workers run, and what they have done."""

    machines: Machines
    total_steps: int = 60
    save_every: int = 5
    step_s: float = 0.5
    grace_s: float = 60.0
    evaluation_s: float = 0.0
    disk: Disk = field(default_factory=Disk)
    groups: dict[str, Group] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    """Those that run."""
    tell: Callable[[str, str], None] = lambda who, what: None
    """Receives what is worth a line of the history."""
    on_problem: Callable[[str], None] = lambda problem: None

    @property
    def kernel(self) -> Any:
        """The scheduler."""
        return self.machines.kernel

    def worker(self, server: Forkserver, number: int, env: Mapping[str, str]) -> Worker:
        """A process that is about to begin."""
        return Worker(self, server, number, env)

    def group(self, store: str, world: int) -> Group:
        """The group that meets at a TCPStore."""
        return self.groups.setdefault(store, Group(self, store, world))

    def store_closed(self, store: str) -> None:
        """A TCPStore is gone."""

    def began(self, worker: Worker) -> None:
        """A process runs."""
        self.workers.append(worker)

    def met(self, worker: Worker) -> None:
        """A worker has joined its group."""
        group = worker.group
        if any(one.rank == worker.rank for one in self.alive_in(group)):
            self.on_problem(f"I3: two workers of rank {worker.rank} in round {worker.round}")
        if worker.world != group.world:
            self.on_problem(f"I3: worlds of {worker.world} and {group.world} meet")

    def alive_in(self, group: Group) -> list[Worker]:
        """The members of a group that run."""
        return [one for one in group.members.values() if one.alive]

    def loaded(self, worker: Worker) -> None:
        """A worker goes on from a checkpoint, or begins."""
        if worker.rank == 0:
            self.tell(worker.machine.name, f"round {worker.round} resumes after step {worker.step}")

    def stepped(self, worker: Worker, samples: tuple[int, ...]) -> None:
        """A worker has finished a step."""
        if samples != tuple(range(MICROBATCHES)):
            self.on_problem(f"I7: step {worker.step} has the samples {samples}")

    def asked(self, worker: Worker, saved: Checkpoint, patience_s: float) -> None:
        """A worker waits for the answer to its request to publish."""

    def answered(self, worker: Worker, saved: Checkpoint) -> None:
        """It has the answer."""

    def ended(self, worker: Worker, status: int) -> None:
        """A process has ended."""
        if worker in self.workers:
            self.workers.remove(worker)
