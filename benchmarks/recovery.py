"""From a fault, or a change of nodes, to the next finished step: zero-agent beside torchrun.

    python benchmarks/recovery.py --trials 5
    python benchmarks/recovery.py --cases join,drain
    python benchmarks/recovery.py --launchers zero-agent,zero-agent-3    # etcd with 3 members
    python benchmarks/recovery.py --launchers in-place,restart --start-up-s 10

Two nodes with one worker each run `recovery_worker.py`, a plain script: what is measured is the
launcher alone, no engine and no checkpoint. "in-place" and "restart" run
`recovery_engine_worker.py`, with each step in memory, and `elastic.in_place` on or off;
"ddp-in-place" and "ddp-restart" the same with DDP, by `recovery_ddp_worker.py`. Launchers take
turns within each trial; medians and ranges are printed, in seconds:

    worker   a worker is killed with -9: from then to the next step finished in a new group
    node     agent and worker at once, the same
    silent   agent and worker are suspended, as if the power had gone: nothing is reset
    hang     the worker alone is suspended, and its agent lives
    join     a second node comes to a first: how much longer than a step the first stands still
    drain    the agent of one gets a SIGTERM: how much longer than a step the other stands still

For zero-agent the node that dies is rank 0's, but with an engine or DDP the last one's.
torchrun's job cannot outlive the node that hosts its store, so there the other one is the victim.
"tuned" is the shortest setting of torchrun that was found to be stable: a last call of 1 s,
keep-alives of 1 s, and 5 s until gloo gives up on a peer. zero-agent takes a worker for hung after
2 s without a step, where torchrun has gloo's limit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rendezvous import serving
from rich.console import Console
from rich.table import Table

from zero_agent.etcd.etcd_process import free_port
from zero_agent.node.process_control import children

HERE = Path(__file__).resolve().parent
LIMIT_S = 120.0
STEPS = 10_000
PACE_S = 0.2
HANG_S = 2
WARM_STEPS = 10
TUNED = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=4"


@dataclass(frozen=True)
class Launcher:
    name: str
    flags: Callable[[int, str, str, int], Sequence[str]]
    """(node, etcd's endpoint, the job's name, a free port) -> the command before the script."""
    peer_timeout_s: float
    """How long gloo waits for a silent peer."""
    victim: int
    """The node that can be killed; 0 hosts torchrun's store."""
    members: int = 1
    """Of etcd."""
    trained_by: str = ""
    """Which script keeps its steps in memory: "engine" or "ddp"; empty: a plain one, with none."""
    goes_on: str = ""
    """How such a script goes on in the next round."""


def zero_agent(node: int, etcd: str, job: str, port: int) -> Sequence[str]:
    return [
        *(sys.executable, "-m", "zero_agent", "--nnodes=1:2", "--max-restarts=50"),
        f"--hang-timeout={HANG_S}",
        *(f"--rdzv-endpoint={etcd}", f"--rdzv-id={job}", f"--node-id=n{node}"),
    ]


def torchrun(conf: str) -> Callable[[int, str, str, int], Sequence[str]]:
    def command(node: int, etcd: str, job: str, port: int) -> Sequence[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--max-restarts=50"),
            *("--nproc-per-node=1", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"),
            *(f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id=bench{port}"),
            f"--rdzv-conf=is_host={int(node == 0)}{conf}",
        ]

    return command


def trained(name: str, by: str, goes_on: str) -> Launcher:
    return Launcher(name, zero_agent, 600, victim=1, trained_by=by, goes_on=goes_on)


LAUNCHERS = {
    "zero-agent": Launcher("zero-agent", zero_agent, 600, victim=0),
    "zero-agent-3": Launcher("zero-agent, 3 members", zero_agent, 600, victim=0, members=3),
    "in-place": trained("zero-agent, in place", "engine", "in-place"),
    "restart": trained("zero-agent, restarted", "engine", "restart"),
    "ddp-in-place": trained("DDP, in place", "ddp", "in-place"),
    "ddp-restart": trained("DDP, restarted", "ddp", "restart"),
    "torchrun-tuned": Launcher("torchrun, tuned", torchrun(f",{TUNED}"), 5, victim=1),
    "torchrun": Launcher("torchrun, defaults", torchrun(""), 1800, victim=1),
}


class Job:
    """Agents of one launcher, and what their workers have noted."""

    def __init__(self, launcher: Launcher, directory: Path, etcd: str, start_up_s: float) -> None:
        self._launcher, self._start_up_s = launcher, start_up_s
        self._directory = directory
        self._etcd, self._port = etcd, free_port()
        self._log = (directory / "log").open("wb")
        self.agents: list[subprocess.Popen[bytes]] = []
        (directory / "steps").mkdir()

    def start_node(self) -> None:
        """Start the agent of one more node."""
        job = self._directory.name
        flags = self._launcher.flags(len(self.agents), self._etcd, job, self._port)
        by = self._launcher.trained_by
        kind = f"_{by}" if by else ""
        script = [str(HERE / f"recovery{kind}_worker.py"), str(self._directory / "steps")]
        facts = (
            (self._launcher.goes_on, self._start_up_s) if by else (self._launcher.peer_timeout_s,)
        )
        numbers = (*facts, STEPS, PACE_S)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        agent = subprocess.Popen(
            [*flags, *script, *map(str, numbers)],
            stdout=self._log,
            stderr=self._log,
            env=env,
            start_new_session=True,
        )
        self.agents.append(agent)

    @property
    def victim(self) -> int:
        """The pid of the agent whose node can be lost; with an engine, not that of rank 0."""
        if not self._launcher.trained_by:
            return self.agents[self._launcher.victim].pid
        last = max(path.name.split("-")[2] for path in self.notes())
        pids = {int(path.name.split("-")[1]) for path in self.notes() if path.name.endswith(last)}
        return next(agent.pid for agent in self.agents if pids & set(below(agent.pid)))

    @property
    def victims_worker(self) -> int:
        pids = {int(path.name.split("-")[1]) for path in self.notes()}
        return next(pid for pid in below(self.victim) if pid in pids)

    def notes(self) -> set[Path]:
        """The files of all workers there have been."""
        return set((self._directory / "steps").iterdir())

    def steps(self) -> list[tuple[float, int]]:
        """(time, world size) of every step, oldest first."""
        lines = [line.split() for file in self.notes() for line in file.read_text().splitlines()]
        return sorted((float(line[0]), int(line[2])) for line in lines if len(line) == 3)

    def at_world(self, world: int, steps: int = WARM_STEPS) -> float:
        """Wait until so many steps were done at a world size; when the first was."""
        return self.wait(
            lambda: (
                times[0]
                if len(times := [at for at, size in self.steps() if size == world]) >= steps
                else None
            )
        )

    def next_step(self, before: set[Path]) -> float:
        """Wait for a step of a worker that is none of those `before`; when it was."""
        return self.wait(
            lambda: min(
                (float(lines[0].split()[0]) for file in self.notes() - before
                 if (lines := file.read_text().splitlines())),
                default=None,
            )
        )  # fmt: skip

    def wait(self, condition: Callable[[], float | None]) -> float:
        """What the condition says.

        Raises:
            TimeoutError: Nothing, within the limit.
        """
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if (value := condition()) is not None:
                return value
            time.sleep(0.02)
        raise TimeoutError

    def close(self) -> None:
        for agent in self.agents:
            kill(agent.pid)
            agent.wait()
        self._log.close()


def below(pid: int) -> list[int]:
    return [pid, *(deeper for child in children(pid) for deeper in below(child))]


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process and all below it."""
    for one in below(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, number)


Fault = Callable[[Job], None]


def recovery(fault: Fault) -> Callable[[Job], float]:
    """Of two nodes: seconds from the fault to the next step of a new group."""

    def case(job: Job) -> float:
        job.start_node()
        job.start_node()
        job.at_world(2)
        before = job.notes()
        begin = time.time()
        fault(job)
        return job.next_step(before) - begin

    return case


def join(job: Job) -> float:
    job.start_node()
    job.at_world(1)
    job.start_node()
    return deadlock(job, after=job.at_world(2, steps=1))


def drain(job: Job) -> float:
    job.start_node()
    job.start_node()
    job.at_world(2)
    os.kill(job.victim, signal.SIGTERM)
    return deadlock(job, after=job.at_world(1, steps=1))


def deadlock(job: Job, after: float) -> float:
    """Between the first step of the new group and the last one before it, beyond a step's time."""
    return after - max(at for at, _ in job.steps() if at < after) - PACE_S


CASES: dict[str, Callable[[Job], float]] = {
    "worker": recovery(lambda job: os.kill(job.victims_worker, signal.SIGKILL)),
    "node": recovery(lambda job: kill(job.victim)),
    "silent": recovery(lambda job: kill(job.victim, signal.SIGSTOP)),
    "hang": recovery(lambda job: os.kill(job.victims_worker, signal.SIGSTOP)),
    "join": join,
    "drain": drain,
}


def trial(launcher: Launcher, case: str, etcd: str, start_up_s: float) -> float | None:
    """What a case costs, in seconds; None if it did not end in time."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        job = Job(launcher, Path(name), etcd, start_up_s)
        try:
            return CASES[case](job)
        except TimeoutError:
            return None
        finally:
            job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--start-up-s", type=float, default=0.0, help="of a script with an engine")
    parser.add_argument("--launchers", default="zero-agent,torchrun-tuned,torchrun")
    args = parser.parse_args()
    launchers, cases = args.launchers.split(","), args.cases.split(",")
    for name in [*(set(launchers) - set(LAUNCHERS)), *(set(cases) - set(CASES))]:
        parser.error(f"{name!r} is none of {', '.join([*LAUNCHERS, *CASES])}")
    chosen = [LAUNCHERS[name] for name in launchers]
    found: dict[tuple[str, str], list[float | None]] = {}
    with contextlib.ExitStack() as made:
        directory = made.enter_context(tempfile.TemporaryDirectory(prefix="recovery-etcd-"))
        etcd = {
            count: made.enter_context(serving(Path(directory, str(count)), count))
            for count in sorted({launcher.members for launcher in chosen})
        }
        for number in range(args.trials):
            for case in cases:
                for launcher in chosen:
                    seconds = trial(launcher, case, etcd[launcher.members], args.start_up_s)
                    found.setdefault((launcher.name, case), []).append(seconds)
                    print(f"trial {number + 1}: {launcher.name}, {case}: {seconds}", flush=True)
    show(chosen, cases, found)


def show(
    chosen: Sequence[Launcher],
    cases: Sequence[str],
    found: dict[tuple[str, str], list[float | None]],
) -> None:
    table = Table(title="seconds: median (range)")
    for head in ("case", *(launcher.name for launcher in chosen)):
        table.add_column(head)
    for case in cases:
        table.add_row(case, *(summary(found[launcher.name, case]) for launcher in chosen))
    Console().print(table)


def summary(values: Sequence[float | None]) -> str:
    done = [value for value in values if value is not None]
    never = f", {len(values) - len(done)} never" if len(done) < len(values) else ""
    if not done:
        return f"never within {LIMIT_S:g} s"
    return f"{statistics.median(done):.2f} ({min(done):.2f}-{max(done):.2f}){never}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; what is above was measured")
