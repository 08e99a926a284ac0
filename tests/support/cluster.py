"""A job as its users run it: agents as processes, a real script, faults from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_for
from zero_agent.node.process_control import children
from zero_data.ledger import Report, read_ledger, verify

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples" / "train_gpt.py"
PACED = ROOT / "tests" / "support" / "paced.py"
SAMPLES = 32 * 60 + 10
STEPS = 61
LONG_S = 0.5
"""A pause with which a job outlasts what takes seconds, such as the imports of one more node."""
TOGETHER = "--rdzv-conf=last_call_timeout=140"
"""A flag: nodes that are started together begin in one round, however late one of them comes."""
COLD = "--cold-start"
"""A flag: an agent need not import torch before its workers start, which takes seconds of CPU.

For scripts without torch, unless a test is about what is forked from those imports: there the
script is run in place, and `worker_main` writes its error file.
"""
TINY = ("--width=32", "--layers=2", "--length=32", f"--samples={SAMPLES}", "--save-every=20")


def environment() -> dict[str, str]:
    """One thread per worker, and nothing of an agent or launcher around the tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ZERO_", "TORCHEL"))}
    return {**kept, "OMP_NUM_THREADS": "1"}


def agent(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`zero-agent` as it is typed, to its end."""
    options = {"env": environment(), "timeout": 240, **options}
    command = [sys.executable, "-m", "zero_agent", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def printed_by_all(agents: Sequence[subprocess.Popen[str]]) -> list[list[str]]:
    """The lines that each of some agents prints, once all have ended with 0; all end in any case.

    Args:
        agents: Their stdout and stderr are pipes.
    """
    try:
        ended = [process.communicate(timeout=120) for process in agents]
    finally:
        for process in agents:
            process.kill()
    assert [process.returncode for process in agents] == [0] * len(agents), ended
    return [out.splitlines() for out, _ in ended]


def light_imports(directory: Path) -> dict[str, str]:
    """An environment in which the agent's own preloads are empty: they take seconds of CPU."""
    for name in ("torch/__init__", "torch/_dynamo", "zero_deepspeed"):
        path = directory / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    found = filter(None, (str(directory), os.environ.get("PYTHONPATH")))
    return {**environment(), "PYTHONPATH": os.pathsep.join(found)}


def training(directory: Path, *more: str) -> list[str]:
    """The example and its arguments: some seconds of steps."""
    places = (f"--checkpoints={directory}/checkpoints", f"--ledger={directory}/ledger")
    return [str(TRAIN), *TINY, *places, *more]


def paced(command: list[str], directory: Path) -> list[str]:
    """The same training with slower steps: how slow says the `Cluster` of that directory."""
    return [str(PACED), f"{directory}/pause", *command]


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that grows, but for one that is not written to its end yet."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return whole.decode().splitlines()


def run_alone(directory: Path, *more: str) -> str:
    """Train in one process, undisturbed; the final weight hash."""
    done = subprocess.run(
        [sys.executable, *training(directory, *more)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return final_hash(done.stdout)


def final_hash(output: str) -> str:
    """What the example prints at its end."""
    found = re.findall(r"^done: .* weight hash (\S+)$", output, re.MULTILINE)
    assert found, f"no final hash in the output:\n{output[-3000:]}"
    assert len(set(found)) == 1, f"more than one final hash: {found}"
    return found[0]


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    below = children(pid)
    return below + [deeper for child in below for deeper in descendants(child)]


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_all(pids: Iterable[int]) -> None:
    """kill -9 those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass
class AgentProcess:
    """One `zero-agent`, with its output in a file."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = 150.0) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output}") from None

    def kill_node(self) -> list[int]:
        """kill -9 the agent and all below it at once, as if power were lost; the pids."""
        pids = [self.process.pid, *descendants(self.process.pid)]
        kill_all(pids)
        self.process.wait()
        return pids


@dataclass
class Cluster:
    """Agents of one job on this machine."""

    directory: Path
    endpoint: str
    job: str = "job"
    flags: Sequence[str] = ("--nnodes=1:4", "--max-restarts=3")
    script: Sequence[str] = ()
    pause_s: float = 0.2
    """Added to each `paced` step until the test says otherwise, or waits for the end."""
    prefix: Sequence[str] = ()
    """What each agent's command is given to."""
    agents: dict[str, AgentProcess] = field(default_factory=dict)
    everyone: list[AgentProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pace(self.pause_s)

    def pace(self, pause_s: float) -> None:
        """From now on, add so much to each `paced` step: a job must outlast a test's part."""
        told = self.directory / "pause.new"
        told.write_text(str(pause_s))
        told.replace(self.directory / "pause")

    def start(self, *nodes: str, **variables: str) -> None:
        """Start agents; a node that was started before is started again.

        Args:
            nodes: Their names.
            variables: Added to their environment.
        """
        script = self.script or paced(training(self.directory), self.directory)
        for node in nodes:
            flags = [
                *(f"--rdzv-endpoint={self.endpoint}", *self.named),
                *(f"--node-id={node}", f"--log-dir={self.directory}/logs"),
            ]
            words = [sys.executable, "-m", "zero_agent", *self.flags, *flags, *script]
            command = [*self.prefix, *words]
            log = self.directory / f"{node}.{len(self.everyone)}.log"
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    stdout=file,
                    stderr=file,
                    env={**environment(), **variables},
                    start_new_session=True,
                )
            self.agents[node] = AgentProcess(process, log)
            self.everyone.append(self.agents[node])

    @property
    def named(self) -> list[str]:
        """The flag with the job's name; without one it is named after its command."""
        return [f"--rdzv-id={self.job}"] if self.job else []

    @property
    def output(self) -> str:
        return "".join(agent.output for agent in self.everyone)

    def events(self, name: str) -> list[dict[str, Any]]:
        """All agents' journal events of one name, in order of time."""
        lines = [
            json.loads(line)
            for path in (self.directory / "logs" / self.job).glob("events-*.jsonl")
            for line in whole_lines(path)
        ]
        return sorted((e for e in lines if e["event"] == name), key=lambda e: e["time"])

    def last_steps(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(round, rank) -> (its last finished step, the world size)."""
        found = {}
        for path in (self.directory / "ledger").glob("round*-rank*.jsonl"):
            if lines := whole_lines(path):
                last = json.loads(lines[-1])
                found[last["round"], last["rank"]] = (last["step"], last["world"])
        return found

    def wait_for_step(self, step: int, world: int, timeout_s: float = 120.0) -> None:
        """Wait until the newest round runs at this world size and has finished this step."""

        def reached() -> bool:
            steps = self.last_steps()
            self.check_agents()
            newest = max((n for n, _ in steps), default=0)
            return any(n == newest and s >= step and w == world for (n, _), (s, w) in steps.items())

        wait_for(reached, timeout_s, f"step {step} at world size {world}")

    def check_agents(self) -> None:
        """Fail at once, with the output, if an agent has ended with an error by itself."""
        for node, agent in self.agents.items():
            code = agent.process.poll()
            assert code in (None, 0, -signal.SIGKILL), f"{node} exited {code}:\n{agent.output}"

    def worker_of(self, node: str) -> int:
        """The pid of a node's newest worker."""
        return next(e["pid"] for e in reversed(self.events("worker")) if e["node"] == node)

    def wait_for_end(self, timeout_s: float = 150.0) -> None:
        """Hurry, and wait until every agent that was not killed has exited with 0."""
        self.pace(0)
        for node, agent in self.agents.items():
            if agent.process.returncode is None:
                assert agent.wait(timeout_s) == 0, f"{node}:\n{agent.output}"

    def report(self) -> Report:
        """What the ledger proves."""
        return verify(read_ledger(self.directory / "ledger"), SAMPLES)

    def close(self) -> None:
        """Leave no process behind."""
        for agent in self.everyone:
            if agent.process.poll() is None:
                agent.kill_node()
