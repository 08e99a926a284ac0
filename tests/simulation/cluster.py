"""A simulated cluster: machines, etcd, the product's agents, and the job that they run."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pkgutil
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zero_agent.loop
import zero_orchestrator.membership
from tests.simulation.etcd import Etcd, SimulatedStore
from tests.simulation.kernel import Kernel, Killed, Process
from tests.simulation.machine import Machine, Machines
from tests.simulation.network import Network
from tests.simulation.standard_library import installed, replaced, standard_library
from tests.simulation.training import Training, Worker
from tests.simulation.worker_parts import worker_parts
from tests.support.versions import newer, older
from zero_agent.command import cli
from zero_agent.errors import AgentFailed
from zero_agent.loop.agent import Agent
from zero_agent.loop.config import AgentConfig
from zero_agent.workers.progress import HangPolicy
from zero_agent.workers.worker_main import Program
from zero_contract.clock import SystemClock
from zero_contract.errors import ZeroError
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.rounds import Timing
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe.goodput import Use

JOB = "sim"
KEYS = Keys(JOB)
NAMES = "abcdefghijklmnopqrstuvwxyz"
OTHER_VERSIONS = {"o": older, "n": newer}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a simulation is made of, beside its seed and its faults."""

    nodes: int = 4
    min_nodes: int = 1
    slots: int = 1
    steps: int = 60
    save_every: int = 5
    memory_every: int = 0
    """A checkpoint in memory every so many steps; 0: none."""
    step_s: float = 0.5
    max_restarts: int = 100
    etcd_grace_s: float = 60.0
    join_timeout_s: float = 600.0
    shutdown_timeout_s: float = 20.0
    hang_s: float = 30.0
    versions: str = ""
    """Of each node's agent: o(lder), n(ewer), or this one."""
    evaluation_s: float = 0.0
    """Rank 0 works on for so long after the last step, and the other ranks end."""
    in_place: bool = False
    """Workers stay in their processes when the ranks change."""
    start_up_s: float = 0.0
    """About how long a script runs before it meets the other ranks."""
    forbidden: float = 0.0
    """The part of the scripts whose workers may not stay."""


@dataclass
class Line:
    """One line of the history."""

    at_s: float
    who: str
    what: str
    level: int = logging.INFO

    def __str__(self) -> str:
        return f"{self.at_s:9.3f}  {self.who:<6} {self.what}"


@dataclass
class AgentRun:
    """One process of an agent, and how it ended."""

    process: Process
    machine: str
    agent: Agent | None = None
    code: int | None = None
    error: str = ""
    signalled: bool = False
    began_s: float = 0.0


@dataclass
class Cluster:
    """The simulated cluster."""

    kernel: Kernel
    setting: Setting
    scratch: Path
    network: Network = field(init=False)
    etcd: Etcd = field(init=False)
    machines: Machines = field(init=False)
    training: Training = field(init=False)
    history: list[Line] = field(default_factory=list)
    runs: list[AgentRun] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    on_agent_end: Callable[[AgentRun], None] = lambda run: None
    on_agent_killed: Callable[[AgentRun], None] = lambda run: None

    def __post_init__(self) -> None:
        kernel, setting = self.kernel, self.setting
        self.network = Network(kernel)
        self.etcd = Etcd(kernel, self.network)
        self.machines = Machines(kernel, self.network)
        self.training = Training(
            self.machines,
            self.scratch / "checkpoints",
            total_steps=setting.steps,
            save_every=setting.save_every,
            memory_every=setting.memory_every,
            step_s=setting.step_s,
            evaluation_s=setting.evaluation_s,
            in_place=setting.in_place,
            start_up_s=setting.start_up_s,
            forbidden=setting.forbidden,
        )
        self.training.root.mkdir()
        self.machines.training = self.training
        self.training.tell = self.say
        self.training.on_problem = self.problem
        for name in NAMES[: setting.nodes]:
            self.machines.by_name[name] = Machine(name, shm=self.scratch / f"shm of {name}")

    # ---- the history ----

    def say(self, who: str, what: str, level: int = logging.INFO) -> None:
        """Add a line to the history."""
        text = what.replace(str(self.scratch), "")
        self.history.append(Line(self.kernel.now, who, text, level))

    def problem(self, text: str) -> None:
        """An invariant is broken."""
        self.problems.append(text)
        self.say("!!!", text, logging.ERROR)
        self.kernel.stop()

    # ---- agents ----

    def start(self, name: str) -> None:
        """Start an agent on a machine that has none."""
        machine = self.machines.by_name[name]
        machine.alive = True
        if machine.serves:
            return
        number = sum(run.machine == name for run in self.runs) + 1
        process = Process(f"{name}/{number}")
        machine.agent = process
        run = AgentRun(process, name, began_s=self.kernel.now)
        self.runs.append(run)
        self.kernel.spawn(process, "main", lambda: self._main(run, machine))

    def _main(self, run: AgentRun, machine: Machine) -> None:
        """The main thread of an agent's process, as `command.cli` has it."""
        process, name = run.process, machine.name
        version = self.setting.versions[NAMES.index(name) :][:1]
        store, telemetry = (
            SimulatedStore(self.etcd, process, name, words=OTHER_VERSIONS.get(version))
            for _ in range(2)
        )
        try:
            # It may have stood still before its first instruction.
            before_ns = {Use.STARTING: round(1e9 * (self.kernel.now - run.began_s))}
            run.agent = Agent(
                self._config(name, run),
                JOB,
                store,
                SystemClock(),
                {},
                telemetry=telemetry,
                before_ns=before_ns,
            )
            run.code = run.agent.run()
        except ZeroError as error:
            run.error = str(error)
            run.code = _code(error)
            self.say(name, f"error: {error}", logging.ERROR)
        except Killed:
            raise
        except Exception as error:
            self.problem(f"internal error in the agent of {name}: {error!r}")
            run.code = 70
        self.say(name, f"the agent ends with exit code {run.code}")
        store.close()
        telemetry.close()
        if machine.agent is process:
            machine.agent = None
        self.kernel.kill(process)
        self.machines.bury(process, word=True)
        self.on_agent_end(run)

    def _config(self, name: str, run: AgentRun) -> AgentConfig:
        setting = self.setting
        return AgentConfig(
            spec=JobSpec(
                min_nodes=setting.min_nodes,
                max_nodes=setting.nodes,
                max_restarts=setting.max_restarts,
            ),
            program=Program(target="train.py", is_module=False, arguments=[]),
            slots=setting.slots,
            job=JOB,
            node_id=name,
            address=name,
            timing=Timing(),
            preload=(),
            shutdown_timeout_s=setting.shutdown_timeout_s,
            boundary_timeout_s=60.0,
            hang=HangPolicy(limit_s=setting.hang_s),
            etcd_grace_s=setting.etcd_grace_s,
            join_timeout_s=setting.join_timeout_s,
        )

    def signal(self, name: str, number: int = signal.SIGTERM, *, again: bool = False) -> None:
        """Send a signal to an agent; a second one, which ends it at once, only with `again`."""
        process = self.machines.by_name[name].agent
        run = next((run for run in self.runs if run.process is process), None)
        if process is None or run is None or run.agent is None or (run.signalled and not again):
            return
        run.signalled = True
        agent = run.agent
        self.kernel.spawn(process, "signal", lambda: agent.on_signal(number))

    @property
    def alive(self) -> bool:
        """Whether any agent runs."""
        return any(run.process.alive for run in self.runs)

    @property
    def workers(self) -> list[Worker]:
        """The workers that run."""
        return self.training.workers


def _code(error: ZeroError) -> int:
    """The exit code of an agent, as `command.cli` has it."""
    if isinstance(error, AgentFailed):
        return error.code
    codes = (code for kind, code in cli._CODES if isinstance(error, kind))
    return next(codes, AgentExit.USAGE)


class _Records(logging.Handler):
    """Writes the log of all agents into the history."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster

    def emit(self, record: logging.LogRecord) -> None:
        task = self._cluster.kernel.current
        if task is not None and task.killed:
            return
        who = task.process.name.partition("/")[0] if task is not None else "world"
        text = record.getMessage()
        if record.exc_info and record.exc_info[0] is not Killed:
            self._cluster.problem(f"internal error on {who}: {text}: {record.exc_info[1]!r}")
        self._cluster.say(who, text, record.levelno)


LOGGERS = (
    "zero",
    "zero_orchestrator",
    "zero_contract",
    "zero_comm",
    "zero_checkpoint",
    "zero_step",
)


def _import_all() -> None:
    """Import what the agents would import later, so that it is changed as well."""
    for package in (zero_agent.loop, zero_orchestrator.membership):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


_SCRATCH = Path("/dev/shm")
_PREFIX = f"zero-simulation-{os.getpid()}-"


def end_at_interrupt() -> None:
    """Let Ctrl-C end this process at once, with its files, whatever simulated thread it meets."""

    def end(*_: object) -> None:
        for scratch in _SCRATCH.glob(f"{_PREFIX}*"):
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(128 + signal.SIGINT)

    signal.signal(signal.SIGINT, end)


@contextlib.contextmanager
def cluster(seed: object, setting: Setting) -> Iterator[Cluster]:
    """A cluster in which nothing runs yet."""
    _import_all()
    kernel = Kernel(seed)
    scratch = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_SCRATCH))
    made = Cluster(kernel, setting, scratch)
    handler = _Records(made)
    levels: dict[str, int] = {}

    def scratch_of(prefix: str, *, socket: str = "") -> Any:
        assert kernel.current is not None
        path = scratch / kernel.current.process.name
        path.mkdir(parents=True)
        return SimpleNamespace(path=path, close=lambda: None)

    parts: Mapping[str, Any] = {
        **made.machines.parts(),
        **worker_parts(made.training),
        "zero_agent.loop.agent:Scratch": scratch_of,
    }
    for name in LOGGERS:
        logger = logging.getLogger(name)
        levels[name] = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False
    try:
        with installed(standard_library(kernel)), replaced(dict(parts)):
            try:
                yield made
            finally:
                for run in made.runs:
                    if run.process.alive:
                        kernel.kill(run.process)
                for worker in list(made.workers):
                    worker.end(-signal.SIGKILL)
    finally:
        for name in LOGGERS:
            logger = logging.getLogger(name)
            logger.removeHandler(handler)
            logger.setLevel(levels[name])
            logger.propagate = True
        shutil.rmtree(scratch, ignore_errors=True)
