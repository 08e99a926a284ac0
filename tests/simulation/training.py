"""Simulated workers: processes that run a user's script with the product's own saves and loads.

The script is that of any user: it meets the other ranks of its round, loads the newest checkpoint,
takes steps with them, saves when `due` says so, and ends with a save that it waits for. What it
calls is `zero_step.session.Session`: how a worker saves, votes, publishes, keeps checkpoints in
memory, loads, falls back and leaves is the product's code, on the product's `AgentLink`. Simulated
are the steps, the group in which ranks exchange their notes, the TCPStore of the votes, the disk,
and the sockets.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.simulation.disk import SimulatedDisk
from tests.simulation.group import Group, Meeting
from tests.simulation.kernel import Process
from tests.simulation.machine import Forkserver, Machines
from tests.simulation.model import MICROBATCHES, Model
from tests.simulation.standard_library import Waiters
from zero_checkpoint.loading import ownership
from zero_checkpoint.loading.restore import Loaded
from zero_checkpoint.options import Checkpoint, NodeMemory
from zero_comm.errors import LeavingNow
from zero_comm.worker.agent_link import AgentLink, exit_on_peer_loss
from zero_contract import worker as contract
from zero_contract.errors import PeerLost, ZeroError
from zero_contract.worker import CommitRequest, ExitCode, Progress, Saved
from zero_data.global_batch import strided
from zero_step.session import Session, end_step, notes_of


class Worker:
    """One process of the job."""

    def __init__(
        self, training: Training, server: Forkserver, number: int, env: Mapping[str, str]
    ) -> None:
        self.training, self.server, self.number = training, server, number
        self.env = dict(env)
        self.machine = server.machine
        self.rank, self.world = int(env["RANK"]), int(env["WORLD_SIZE"])
        self.round, self.fence = int(env[contract.ENV_ROUND]), int(env[contract.ENV_FENCE])
        self.pid = next(training.machines.pids)
        self.process = Process(f"{self.machine.name}/rank {self.rank} of {self.round}", owner=self)
        self.alive, self.frozen, self.hangs, self.stepped = True, False, False, False
        self.lost = False
        """Some rank of its group is gone, and it has noticed."""
        self.meets: Waiters | None = None
        """What it waits at for the other ranks."""
        self.group = training.group(f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}", self.world)
        self.link: AgentLink | None = None
        self.session: Session | None = None
        self.globals = SimpleNamespace(seen=ownership._Seen(), suspects={}, at_exit={})
        """The variables of modules that each process has for itself."""

    # ---- life and death ----

    def begin(self) -> None:
        """The process runs."""
        if not (self.alive and self.server.alive and self.number in self.server.running):
            self.alive = False
            return
        self.server._tell(id=self.number, pid=self.pid)
        self.training.began(self)
        self.training.kernel.spawn(self.process, "main", self._main)

    def end(self, status: int) -> None:
        """The process ends."""
        if not self.alive:
            return
        self.alive = False
        self.training.kernel.kill(self.process)
        self._close_files()
        self.training.ended(self, status)
        if self.group.members.get(self.rank) is self:
            self.group.lose(self, silent=not self.machine.alive)
        self.server.ended(self.number, status)

    def _close_files(self) -> None:
        """As the kernel does: sockets, and the locks of staging memory."""
        if self.link is not None and self.link._socket is not None:
            self.link._socket.close()
        ram = self.session._persistence.ram if self.session is not None else None
        for staging in ram._stagings if ram is not None else ():
            self.training.machines.unlock(staging._source)

    def fail(self, message: str) -> None:
        """Raise an exception."""
        if self.alive and not self.frozen:
            record = {"message": {"message": message, "extraInfo": {"py_callstack": message}}}
            Path(self.env["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record))
            self.end(1)

    def signalled(self, number: int) -> None:
        """Get a signal from the fork server."""
        delay_s = self.training.machines.about(0.02)
        if number == signal.SIGKILL:
            self.training.kernel.after(delay_s, lambda: self.end(-signal.SIGKILL))
        elif number == signal.SIGTERM and self.alive:
            self.training.kernel.spawn(self.process, "signal", self._on_sigterm, delay_s)

    def _on_sigterm(self) -> None:
        if self.link is None or not self.link.handles_sigterm():
            self.end(-signal.SIGTERM)

    def freeze(self, *, on: bool) -> None:
        """SIGSTOP, or SIGCONT."""
        self.frozen = on
        (self.training.kernel.freeze if on else self.training.kernel.thaw)(self.process)

    def peer_lost(self) -> None:
        """A member of the group is gone; who waits for the others notices."""
        self.lost = True
        if self.meets is not None:
            self.meets.wake()

    def raise_if_lost(self, what: str) -> None:
        """As a wait of the product does."""
        if self.link is not None and self.link.interrupt.reason:
            raise LeavingNow(f"{what}: asked to leave: {self.link.interrupt.reason}")
        if self.lost:
            raise PeerLost(f"{what}: a rank is gone")

    # ---- what it does ----

    def _main(self) -> None:
        try:
            self._script()
            status: Any = ExitCode.OK
        except SystemExit as error:
            status = error.code
        except PeerLost:
            status = ExitCode.PEER_LOST
        except ZeroError as error:
            self.training.tell(self.machine.name, f"rank {self.rank}: {error}")
            self.fail(str(error))
            return
        except Exception as error:
            self.training.on_problem(f"internal error in rank {self.rank}: {error!r}")
            raise
        self.end(int(status))

    def _script(self) -> None:
        training, kernel = self.training, self.training.kernel
        while not self.group.reaches_store(self):
            kernel.park(0.2)
        training.met(self)
        self.group.members[self.rank] = self
        self.link = link = AgentLink(self.rank)
        model = Model(self)
        with exit_on_peer_loss(link):
            self.group.exchange(self, "meet", None)
            self.session = session = Session(training.config, model, Meeting(self), link)  # type: ignore[arg-type]
        session.keep_client_state(lambda: {"digest": model.digest})
        session.load(training.root)
        training.loaded(self, model)
        while model.cursor.step < training.total_steps:
            kernel.park(training.machines.about(training.step_s) * self.machine.slow)
            while self.hangs:
                kernel.park(3600.0)
            step = model.cursor.step + 1
            mine = _microbatches(self.rank, self.world)
            with exit_on_peer_loss(link):
                notes = self.group.exchange(self, f"step {step}", (mine, notes_of(session)))
            samples = tuple(sorted(n for ran, _ in notes.values() for n in ran))
            model.take(samples)
            self.stepped = True
            training.stepped(self, step, samples)
            progress = Progress(step=step, samples=step * MICROBATCHES, loss=1.0)
            end_step(session, [note for _, note in notes.values()], progress)
            if session.due() and step < training.total_steps:
                session.save(training.root)
        session.save(training.root, blocking=True)
        until_s = kernel.now + (training.evaluation_s if self.rank == 0 else 0.0)
        while kernel.now < until_s:  # on rank 0 alone, with heartbeats
            kernel.park(5.0)
            link.heartbeat()
        session.close()


def _microbatches(rank: int, world: int) -> tuple[int, ...]:
    """The micro-batches that a rank runs in a step, as the product plans them."""
    turns = range(-(-MICROBATCHES // world))
    numbers = (strided(world).number(micro, rank, MICROBATCHES) for micro in turns)
    return tuple(number for number in numbers if number < MICROBATCHES)


class Watcher:
    """Is told what workers and agents say to each other about checkpoints."""

    def asked(self, worker: Worker, request: CommitRequest) -> None:
        """A worker waits for the answer to its request to publish."""

    def answered(self, worker: Worker, request: int) -> None:
        """It has the answer."""

    def acknowledged(self, worker: Worker, saved: Saved) -> None:
        """A save has ended on a rank."""

    def chosen(self, worker: Worker, loaded: Loaded | None) -> None:
        """A rank has loaded a checkpoint, or there was none."""


@dataclass
class Training:
    """The job that all workers run, and what they have done."""

    machines: Machines
    root: Path
    total_steps: int = 60
    save_every: int = 5
    memory_every: int = 0
    """A checkpoint in memory every so many steps; 0: none."""
    step_s: float = 0.5
    evaluation_s: float = 0.0
    disk: SimulatedDisk = field(init=False)
    groups: dict[str, Group] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    """Those that run."""
    tell: Callable[[str, str], None] = lambda who, what: None
    """Receives what is worth a line of the history."""
    on_problem: Callable[[str], None] = lambda problem: None
    on_kept: Callable[[bytes], None] = lambda text: None
    """A node keeps this manifest in memory."""
    watcher: Watcher = field(default_factory=Watcher)

    def __post_init__(self) -> None:
        self.disk = SimulatedDisk(self.machines.kernel, self.root)
        ram = NodeMemory(every_steps=max(self.memory_every, 1), budget_bytes=1 << 28)
        self.config = Checkpoint(
            asynchronous=True,
            when_busy="skip",
            every_steps=self.save_every,
            keep_last=3,
            ram=ram if self.memory_every else None,
        )

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

    def loaded(self, worker: Worker, model: Model) -> None:
        """A worker goes on from a checkpoint, or begins."""
        if worker.rank == 0:
            step = model.cursor.step
            self.tell(worker.machine.name, f"round {worker.round} resumes after step {step}")

    def stepped(self, worker: Worker, step: int, samples: tuple[int, ...]) -> None:
        """A worker has finished a step."""
        if samples != tuple(range(MICROBATCHES)):
            self.on_problem(f"I7: step {step} has the samples {samples}")

    def ended(self, worker: Worker, status: int) -> None:
        """A process has ended."""
        if worker in self.workers:
            self.workers.remove(worker)


__all__ = ["MICROBATCHES", "Training", "Worker"]
