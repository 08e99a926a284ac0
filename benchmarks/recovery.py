"""From a fault to the next finished step: zero-agent beside torchrun, on this machine.

    python benchmarks/recovery.py --trials 5

Two nodes with one worker each run `recovery_worker.py`, a plain script: what is measured is the
launcher alone, no engine and no checkpoint. Then one worker, or one whole node (agent and worker
at once), is killed with -9. The figure is the time from the kill to the next step finished in a
new group. Launchers take turns within each trial; medians and ranges are printed.

For zero-agent the node that dies is rank 0's. torchrun's job cannot outlive the node that hosts
its store, so there the other one is killed. "tuned" is the shortest setting of torchrun that was
found to be stable: a last call of 1 s, keep-alives of 1 s, and 5 s until gloo gives up on a peer.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zero_agent.etcd_process import free_port
from zero_agent.local_etcd import private_server
from zero_agent.process_control import children

HERE = Path(__file__).resolve().parent
LIMIT_S = 120.0
STEPS = 10_000
TUNED = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=4"


@dataclass(frozen=True)
class Launcher:
    name: str
    flags: Callable[[int, str, int], Sequence[str]]
    """(node, etcd's endpoint, a free port) -> the command before the script."""
    peer_timeout_s: float
    """How long gloo waits for a silent peer."""
    victim: int
    """The node that can be killed; 0 hosts torchrun's store."""


def zero_agent(node: int, etcd: str, port: int) -> Sequence[str]:
    return [
        *(sys.executable, "-m", "zero_agent", "--nnodes=1:2", "--max-restarts=50"),
        *(f"--rdzv-endpoint={etcd}", f"--rdzv-id=bench{port}", f"--node-id=n{node}"),
    ]


def torchrun(conf: str) -> Callable[[int, str, int], Sequence[str]]:
    def command(node: int, etcd: str, port: int) -> Sequence[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--max-restarts=50"),
            *("--nproc-per-node=1", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"),
            *(f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id=bench{port}"),
            f"--rdzv-conf=is_host={int(node == 0)}{conf}",
        ]

    return command


LAUNCHERS = {
    "zero-agent": Launcher("zero-agent", zero_agent, 600, victim=0),
    "torchrun-tuned": Launcher("torchrun, tuned", torchrun(f",{TUNED}"), 5, victim=1),
    "torchrun": Launcher("torchrun, defaults", torchrun(""), 1800, victim=1),
}


@dataclass
class Job:
    """Two nodes of one launcher."""

    directory: Path
    agents: list[subprocess.Popen[bytes]]

    def steps(self) -> list[tuple[float, int, int]]:
        """(time, step, world size) of every step, oldest first."""
        notes = [line.split() for f in (self.directory / "steps").iterdir() for line in f.open()]
        return sorted((float(t), int(s), int(w)) for t, s, w in notes if t)

    def wait(self, condition: Callable[[], float | None]) -> float | None:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ValueError):  # a line that is being written
                if (value := condition()) is not None:
                    return value
            time.sleep(0.02)
        return None

    def next_step(self, after: float, files: set[str]) -> float | None:
        """Seconds from `after` to the first step of a worker started since."""
        for path in (self.directory / "steps").iterdir():
            if path.name not in files and (lines := path.read_text().splitlines()):
                return float(lines[0].split()[0]) - after
        return None


@contextlib.contextmanager
def running(launcher: Launcher, etcd: str) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        directory, port = Path(name), free_port()
        (directory / "steps").mkdir()
        script = [str(HERE / "recovery_worker.py"), str(directory / "steps")]
        arguments = [*script, str(launcher.peer_timeout_s), str(STEPS)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (directory / "log").open("wb") as log:
            agents = [
                subprocess.Popen(
                    [*launcher.flags(node, etcd, port), *arguments],
                    stdout=log,
                    stderr=log,
                    env=env,
                    start_new_session=True,
                )
                for node in (0, 1)
            ]
        try:
            yield Job(directory, agents)
        finally:
            for agent in agents:
                kill(agent.pid)
                agent.wait()


def below(pid: int) -> list[int]:
    return [pid, *(deeper for child in children(pid) for deeper in below(child))]


def kill(pid: int) -> None:
    """`kill -9` a process and all below it."""
    for one in below(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def trial(launcher: Launcher, fault: str, etcd: str) -> float | None:
    """Seconds from the fault to the next finished step; None if there was none in time."""
    with running(launcher, etcd) as job:
        begun = job.wait(lambda: len([1 for _, _, w in job.steps() if w == 2]) >= 10 or None)
        if begun is None:
            return None
        files = {path.name for path in (job.directory / "steps").iterdir()}
        victim = job.agents[launcher.victim].pid
        killed = time.time()
        if fault == "node":
            kill(victim)
        else:
            pids = [int(name.split("-")[1]) for name in files]
            os.kill(next(p for p in below(victim) if p in pids), signal.SIGKILL)
        return job.wait(lambda: job.next_step(killed, files))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--faults", default="worker,node")
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    args = parser.parse_args()
    chosen = [LAUNCHERS[name] for name in args.launchers.split(",")]
    faults = args.faults.split(",")
    found: dict[tuple[str, str], list[float | None]] = {}
    with private_server() as etcd:
        for number in range(args.trials):
            for launcher in chosen:
                for fault in faults:
                    seconds = trial(launcher, fault, etcd)
                    found.setdefault((launcher.name, fault), []).append(seconds)
                    print(f"trial {number + 1}: {launcher.name}, {fault}: {seconds}", flush=True)
    show(chosen, faults, found)


def show(
    chosen: Sequence[Launcher],
    faults: Sequence[str],
    found: dict[tuple[str, str], list[float | None]],
) -> None:
    table = Table(title="seconds from kill -9 to the next step: median (range)")
    table.add_column("launcher")
    for fault in faults:
        table.add_column(f"{fault} killed")
    for launcher in chosen:
        table.add_row(launcher.name, *(summary(found[launcher.name, fault]) for fault in faults))
    Console().print(table)


def summary(values: Sequence[float | None]) -> str:
    done = [value for value in values if value is not None]
    never = f", {len(values) - len(done)} never" if len(done) < len(values) else ""
    if not done:
        return f"never within {LIMIT_S:g} s"
    return f"{statistics.median(done):.2f} ({min(done):.2f}-{max(done):.2f}){never}"


if __name__ == "__main__":
    main()
