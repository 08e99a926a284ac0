"""Simulated workers: processes that run a user's script with the product's own saves and loads.

The script is that of any user: it meets the other ranks of its round, loads the newest checkpoint,
takes steps with them, saves when `due` says so, and ends with a save that it waits for. What it
calls is `zero_step.session.Session`: how a worker saves, votes, publishes, keeps checkpoints in
memory, loads, falls back and leaves is the product's code, on the product's `AgentLink`. Simulated
are the steps, the group in which ranks exchange their notes, the TCPStore of the votes, the disk,
and the sockets.

With `in_place` it stays in its process when the ranks change, as `zero_step.staying` decides, and
one that is started before it has a round waits for it in `init_distributed`, as any engine does.
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
from tests.simulation.sockets import AgentSocket
from tests.simulation.standard_library import Waiters
from zero_checkpoint.loading import ownership
from zero_checkpoint.loading.restore import Loaded
from zero_checkpoint.options import Checkpoint, NodeMemory
from zero_comm.errors import LeavingNow
from zero_comm.worker import agent_link
from zero_comm.worker.agent_link import AgentLink, exit_on_peer_loss
from zero_comm.worker.distributed import init_distributed
from zero_comm.worker.rank_times import WaitClock
from zero_contract import worker as contract
from zero_contract.errors import PeerLost, ZeroError
from zero_contract.worker import Ability, CommitRequest, ExitCode, Join, Message, Progress, Saved
from zero_data.global_batch import strided
from zero_step.session import Session, begin_micro_step, come_back, end_step, notes_of, outlived
from zero_step.staying import Staying, standing

AMBUSH_S = 0.5


class Worker:
    """One process of the job."""

    def __init__(
        self, training: Training, server: Forkserver, number: int, env: Mapping[str, str]
    ) -> None:
        self.training, self.server, self.number = training, server, number
        self.env = dict(env)
        self.machine = server.machine
        self.pid = next(training.machines.pids)
        self._take_environment()
        self.process = Process(f"{self.machine.name}/rank {self.rank} of {self.round}", owner=self)
        self.alive, self.frozen, self.hangs, self.stepped = True, False, False, False
        self.told = self.round
        """The round that it was told to join last; 0: none yet."""
        self.waits = False
        """It is in no group, has said so, and waits for a round."""
        self.lost = False
        """Some rank of its group is gone, and it has noticed."""
        self.meets: Waiters | None = None
        """What it waits at for the other ranks."""
        self.group: Group | None = None
        """The group in which it is."""
        self.link: AgentLink | None = None
        self.model: Model
        self.session: Session | None = None
        self.sigterm_handler: Any = signal.SIG_DFL
        self.globals = SimpleNamespace(
            seen=ownership._Seen(), suspects={}, at_exit={}, waits=WaitClock()
        )
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
        self.leave_group()
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
        has_handler = self.sigterm_handler is not signal.SIG_DFL and self.link is not None
        if not (has_handler and self.link.handles_sigterm()):
            self.end(-signal.SIGTERM)

    def freeze(self, *, on: bool) -> None:
        """SIGSTOP, or SIGCONT."""
        self.frozen = on
        (self.training.kernel.freeze if on else self.training.kernel.thaw)(self.process)

    # ---- its rounds ----

    def _take_environment(self) -> None:
        self.rank, self.world = int(self.env["RANK"]), int(self.env["WORLD_SIZE"])
        names = contract.ENV_ROUND, contract.ENV_FENCE
        self.round, self.fence = (int(self.env[name]) for name in names)

    def begin_wait(self) -> None:
        """It tells its agent that it has left its group, and waits for a round."""
        if self.group is not None:
            self.training.on_problem(f"rank {self.rank} waits, and is in a group of {self.round}")
        self.waits = True
        self.training.waits(self)

    def hears(self, message: Message) -> None:
        """Its agent has sent it something."""
        if isinstance(message, Join):
            self.told, self.waits = message.round, False
            self.training.taken_over += 1

    def join_group(self, within_s: float) -> None:
        """Meet the other ranks of the round in the environment, as `init_process_group` does."""
        before, self.link, self.lost = self.group, None, False
        self._take_environment()
        if before is not None:
            self.training.on_problem(f"rank {self.rank} is in two groups in round {self.round}")
        self.training.watcher.joins(self)
        kernel, until_s = self.training.kernel, self.training.kernel.now + within_s
        store = f"{self.env['MASTER_ADDR']}:{self.env['MASTER_PORT']}"
        group = self.training.group(store, self.world)
        while not group.reaches_store(self):
            if kernel.now > until_s:
                raise RuntimeError(f"timed out waiting for {within_s:g} s")
            kernel.park(0.2)
        self.training.met(self, group)
        group.members[self.rank] = self
        self.group = group
        group.exchange(self, "meet", None, within_s)

    def leave_group(self) -> None:
        """Use the group no more."""
        group, self.group = self.group, None
        if group is not None:
            group.lose(self, silent=not self.machine.alive)

    def hang_up_on_store(self) -> None:
        """Its calls to the TCPStore end, now and later."""
        if self.group is not None:
            self.group.deaf.add(self)

    def peer_lost(self, group: Group) -> None:
        """A member of a group is gone; who waits for the others notices."""
        self.lost |= group is self.group
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
        if training.start_up_s:
            kernel.park(training.machines.about(training.start_up_s))
        began = standing()
        with exit_on_peer_loss():
            init_distributed()
        session = self._make()
        if training.in_place:
            self._may_stay(session, Staying(self._make_again, began, training.start_up_s))
        else:  # who takes a client state from a load starts anew where a peer is lost
            session.keep_client_state(lambda: {"step": self.model.cursor.step})
        session.load(training.root)
        while self.model.cursor.step < training.total_steps:
            self._step()
            session = self.present
            if session.due() and self.model.cursor.step < training.total_steps:
                session.save(training.root)
        self.present.save(training.root, blocking=True)
        until_s = kernel.now + (training.evaluation_s if self.rank == 0 else 0.0)
        while kernel.now < until_s:  # on rank 0 alone, with heartbeats
            kernel.park(5.0)
            assert self.link is not None
            self.link.heartbeat()
        self.present.close()

    @property
    def present(self) -> Session:
        """What the script trains with: another object in each round, as within an engine."""
        assert self.session is not None
        return self.session

    def _make(self) -> Session:
        """Make the training over the group that there is now. Collective."""
        assert self.group is not None
        self.link = link = AgentLink(self.rank)
        self.sigterm_handler = agent_link._on_sigterm
        self.model = Model(self)
        with exit_on_peer_loss(link):
            self.group.exchange(self, "make", None)
            config, meeting = self.training.config, Meeting(self)
            self.session = Session(config, self.model, meeting, link)  # type: ignore[arg-type]
        return self.session

    def _make_again(self) -> Session:
        made = self._make()
        self._announce()
        return made

    def _may_stay(self, session: Session, staying: Staying) -> None:
        if self.training.forbids():
            staying.forbid("the script does not allow it")
        else:
            self._announce()
        session.staying = staying

    def _announce(self) -> None:
        assert self.link is not None
        self.link.announce(Ability.BOUNDARY, Ability.REJOIN)

    def _step(self) -> None:
        training, kernel = self.training, self.training.kernel
        session, model = self.present, self.model
        begin_micro_step(session)
        if session.staying is not None and training.forbids(each_step=True):
            session.staying.forbid("the script exchanges something of its own")
        kernel.park(training.machines.about(training.step_s) * self.machine.slow)
        while self.hangs:
            kernel.park(3600.0)
        step = model.cursor.step + 1
        with outlived(session):
            assert self.group is not None
            mine = _microbatches(self.rank, self.world)
            notes = self.group.exchange(self, f"step {step}", (mine, notes_of(session)))
            samples = tuple(sorted(n for ran, _ in notes.values() for n in ran))
            model.take(samples)
            self.stepped = True
            training.stepped(self, step, samples)
            progress = Progress(step=step, samples=step * MICROBATCHES, loss=1.0)
            end_step(session, [note for _, note in notes.values()], progress)
        come_back(self.present)


def _microbatches(rank: int, world: int) -> tuple[int, ...]:
    """The micro-batches that a rank runs in a step, as the product plans them."""
    turns = range(-(-MICROBATCHES // world))
    numbers = (strided(world).number(micro, rank, MICROBATCHES) for micro in turns)
    return tuple(number for number in numbers if number < MICROBATCHES)


class Watcher:
    """Is told what workers do in their rounds, and what they and agents say about checkpoints."""

    def joins(self, worker: Worker) -> None:
        """A worker is about to meet the others of its round."""

    def asked(self, peer: AgentSocket, request: CommitRequest) -> None:
        """A worker waits for the answer to its request to publish."""

    def answered(self, peer: AgentSocket, request: int) -> None:
        """It has the answer."""

    def acknowledged(self, peer: AgentSocket, saved: Saved) -> None:
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
    in_place: bool = False
    """Whether workers stay in their processes when the ranks change."""
    start_up_s: float = 0.0
    """About how long a script runs before it meets the other ranks."""
    forbidden: float = 0.0
    """The part of the scripts that do not allow it."""
    taken_over: int = 0
    """How often a worker that waited was told to join a round."""
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
    ambushes: dict[str, Callable[[Worker], None]] = field(default_factory=dict)
    """By machine: what happens to the next of its workers that waits for a round."""

    def __post_init__(self) -> None:
        self.disk = SimulatedDisk(self.machines.kernel, self.root)
        self._draw = self.kernel.random("scripts")
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

    def forbids(self, *, each_step: bool = False) -> bool:
        """Whether a script does not allow its worker to stay, from its begin or from a step on."""
        share = self.forbidden / (2 * self.total_steps if each_step else 2)
        return bool(share) and self._draw.random() < share

    def waits(self, worker: Worker) -> None:
        """A worker waits for a round."""
        if (ambush := self.ambushes.pop(worker.machine.name, None)) is not None:
            self.kernel.after(self._draw.uniform(0.0, AMBUSH_S), lambda: ambush(worker))

    def store_closed(self, store: str) -> None:
        """A TCPStore is gone."""

    def began(self, worker: Worker) -> None:
        """A process runs."""
        self.workers.append(worker)

    def met(self, worker: Worker, group: Group) -> None:
        """A worker joins a group."""
        others = [one for one in group.members.values() if one.group is group]
        if any(one.rank == worker.rank for one in others):
            self.on_problem(f"I3: two workers of rank {worker.rank} in round {worker.round}")
        if rounds := {one.round for one in others} - {worker.round}:
            self.on_problem(f"I1: workers of the rounds {worker.round} and {rounds} meet")
        if worker.world != group.world:
            self.on_problem(f"I3: worlds of {worker.world} and {group.world} meet")

    def loaded(self, worker: Worker, loaded: Loaded | None) -> None:
        """A worker goes on from a checkpoint, or begins."""
        self.watcher.chosen(worker, loaded)
        if worker.rank == 0:
            step = loaded.manifest.step if loaded is not None else 0
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
