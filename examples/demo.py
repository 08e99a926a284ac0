"""`make demo`: a job loses a node, continues, and has the same result as an undisturbed run.

Four agents on this machine train `train_gpt.py`. One agent is killed with its worker during the
run, and started again later. Then a single process trains the same model without a disturbance.
The last table lists the claims. The exit code is 0 only if all of them hold.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from zero_agent.etcd.local_etcd import private_server
from zero_agent.node.process_control import children
from zero_contract.errors import ZeroError
from zero_data.ledger import Report, read_ledger, verify
from zero_orchestrator.ctl import report_command
from zero_orchestrator.ctl.page import picture
from zero_orchestrator.store.etcd.client import EtcdStore

HERE = Path(__file__).resolve().parent
JOB = "demo"
NODES = ("node-a", "node-b", "node-c", "node-d")
VICTIM = "node-b"
SAMPLES = 32 * 75 + 10  # 76 steps, the last of them short
SAVE_EVERY = 10
LIMIT_S = 150.0
"""The time limit of the demo: every wait below ends by then."""

console = Console(highlight=False)


class DemoFailed(Exception):
    """The demo could not show that its claims hold."""


@dataclass
class Demo:
    """The agents of the job, and what the job shows from outside."""

    directory: Path
    endpoint: str
    deadline: float
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    told: set[tuple[str, str]] = field(default_factory=set)

    def start(self, node: str) -> None:
        """Start an agent, as a user would in a terminal."""
        command = [
            *(sys.executable, "-m", "zero_agent", "--nnodes=1:4", "--max-restarts=3"),
            *(f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={JOB}", f"--node-id={node}"),
            f"--log-dir={self.directory / 'logs'}",
            *training(self.directory / "disturbed"),
        ]
        log = (self.directory / f"{node}.log").open("ab")
        self.agents[node] = subprocess.Popen(
            command, stdout=log, stderr=log, env=one_thread(), start_new_session=True
        )
        log.close()

    def kill(self, node: str) -> None:
        """`kill -9` an agent and its descendants at once, as a power failure of the node would."""
        agent = self.agents[node]
        for pid in [agent.pid, *descendants(agent.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def ledger(self) -> Report:
        """The steps that the workers have finished so far."""
        return verify(read_ledger(self.directory / "disturbed" / "ledger"), SAMPLES)

    def events(self) -> list[dict[str, object]]:
        """The decisions of the agents so far, oldest first."""
        lines = [
            json.loads(line)
            for path in (self.directory / "logs" / JOB).glob("events-*.jsonl")
            for line in path.read_text().splitlines()
        ]
        return sorted(lines, key=lambda line: line["time"])

    def show_news(self) -> None:
        """Print the decisions since the last call."""
        for event in self.events():
            line = (str(event["event"]), str(event["text"]))
            if line not in self.told and line[0] in STORY:
                self.told.add(line)
                console.print(f"  [dim]{STORY[line[0]]}[/] {line[1]}")

    def wait(
        self, what: str, condition: Callable[[Report], bool], watch: Callable[[Report], None]
    ) -> None:
        """Show the progress of the job until `condition` holds."""
        while time.monotonic() < self.deadline:
            report = self.ledger()
            watch(report)
            self.show_news()
            if condition(report):
                return
            failed = [n for n, agent in self.agents.items() if agent.poll() not in (None, 0)]
            if failed and failed != [VICTIM]:
                raise DemoFailed(f"{', '.join(failed)} ended; see {self.directory}/{failed[0]}.log")
            time.sleep(0.1)
        raise DemoFailed(f"{what}: not within {LIMIT_S:g} s; see {self.directory}")

    def close(self) -> None:
        """End all processes of the demo."""
        for node, agent in self.agents.items():
            if agent.poll() is None:
                self.kill(node)


STORY = {
    "activate": "round ",
    "yield": "grow  ",
    "interrupt": "fault ",
    "exit": "worker",
    "fail": "failed",
    "finish": "done  ",
}
"""The events that are printed, with the name of each."""


def training(directory: Path) -> list[str]:
    """The script and its arguments, which are the same for both runs."""
    return [
        str(HERE / "train_gpt.py"),
        f"--samples={SAMPLES}",
        f"--save-every={SAVE_EVERY}",
        f"--checkpoints={directory / 'checkpoints'}",
        f"--ledger={directory / 'ledger'}",
    ]


def one_thread() -> dict[str, str]:
    """Equal bits need the same number of threads per worker; here one."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def descendants(pid: int) -> list[int]:
    """All descendants of a process."""
    below = children(pid)
    return below + [grandchild for child in below for grandchild in descendants(child)]


@contextlib.contextmanager
def progress_line(total: int) -> Iterator[Callable[[Report], None]]:
    """A bar of steps with the world size beside it."""
    columns = (
        TextColumn("[bold]{task.description:<22}"),
        BarColumn(bar_width=36),
        TextColumn("step {task.completed:>3}/{task.total}"),
        TextColumn("{task.fields[world]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task: TaskID = progress.add_task("starting", total=total, world="")

        def watch(report: Report) -> None:
            if report.steps:
                world = report.world_by_step[report.steps]
                blocks = "■" * world + "□" * (len(NODES) - world)
                progress.update(
                    task,
                    completed=report.steps,
                    description="training",
                    world=f"world size {world} {blocks}",
                )

        yield watch


def disturbed_run(demo: Demo) -> float:
    """Train on four agents, kill one and restart it; return the seconds until the next step."""
    steps = -(-SAMPLES // 32)
    with progress_line(steps) as watch:
        for node in NODES:
            demo.start(node)
        demo.wait("25 steps at world size 4", lambda r: world_after(r, 25) == 4, watch)
        before = demo.ledger().steps
        console.print(f"  [bold red]kill -9[/] {VICTIM} with its worker, at step {before}")
        demo.kill(VICTIM)
        killed = time.monotonic()
        demo.wait("a step at world size 3", lambda r: 3 in r.world_by_step.values(), watch)
        gap_s = time.monotonic() - killed
        demo.wait("15 steps more", lambda r: r.steps >= before + 15, watch)
        console.print(f"  [bold green]start[/] {VICTIM} again")
        demo.start(VICTIM)
        demo.wait("world size 4 again", lambda r: world_after(r, r.steps) == 4, watch)
        demo.wait("the end", lambda r: not any(running(demo)), watch)
    return gap_s


def world_after(report: Report, step: int) -> int:
    """The world size after `step` steps; 0 before that."""
    return report.world_by_step[report.steps] if report.steps >= max(step, 1) else 0


def running(demo: Demo) -> Iterator[bool]:
    return (agent.poll() is None for agent in demo.agents.values())


def undisturbed_run(directory: Path) -> str:
    """Train the same model in one process without agents, and return its output."""
    with console.status("the same on one worker, undisturbed"):
        done = subprocess.run(
            [sys.executable, *training(directory / "undisturbed")],
            env=one_thread(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    if done.returncode != 0:
        raise DemoFailed(f"the undisturbed run failed:\n{done.stderr}")
    return done.stdout


def final_hash(output: str) -> str:
    """The weight hash that `train_gpt.py` prints at its end."""
    hashes = re.findall(r"^done: .* weight hash (\S+)$", output, re.MULTILINE)
    return hashes[-1] if hashes else "none"


def world_sizes(report: Report) -> str:
    """`4 (steps 1-30), 3 (31-45), 4 (46-76)`."""
    parts = []
    for world, steps in itertools.groupby(sorted(report.world_by_step), report.world_by_step.get):
        numbers = list(steps)
        parts.append(f"{world} (steps {numbers[0]}-{numbers[-1]})")
    return ", ".join(parts)


def show_claims(demo: Demo, gap_s: float, alone: str) -> bool:
    """Print the table of claims; return whether every claim holds."""
    report, events = demo.ledger(), demo.events()
    output = "".join((demo.directory / f"{node}.log").read_text() for node in NODES)
    disturbed_hash, alone_hash = final_hash(output), final_hash(alone)
    worlds = [world for world, _ in itertools.groupby(report.world_by_step.values())]
    restarts = sum(event["event"] == "interrupt" for event in events)
    repeated = report.repeated_steps
    claims = [
        ("world size over steps", world_sizes(report), worlds[-3:] == [4, 3, 4]),
        ("restarts charged", str(restarts), restarts == 1),
        ("steps repeated after the kill", str(repeated), repeated <= SAVE_EVERY),
        ("kill to next step, here and now", f"{gap_s:.1f} s", True),
        (
            f"all {SAMPLES} samples consumed once each",
            "yes" if report.exact else "; ".join(report.problems[:3]),
            report.exact and report.samples == SAMPLES,
        ),
        ("weight hash, disturbed run", disturbed_hash[:32], disturbed_hash != "none"),
        ("weight hash, undisturbed, 1 worker", alone_hash[:32], disturbed_hash == alone_hash),
    ]
    table = Table(title="One node lost and back, one result", title_justify="left")
    table.add_column("claim")
    table.add_column("found")
    table.add_column("")
    for claim, found, true in claims:
        table.add_row(claim, found, "[green]ok[/]" if true else "[bold red]WRONG[/]")
    console.print(table)
    return all(true for _, _, true in claims)


def write_report(endpoint: str, path: Path) -> None:
    """Write the report of the disturbed run, and say where it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(EtcdStore(endpoint)) as store:
            report_command.write(picture.read(store, JOB), path)
    except (OSError, ZeroError) as error:
        console.print(f"there is no report: {error}", soft_wrap=True)
    else:
        console.print(f"What happened, with charts: [bold]{path}[/]", soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs and checkpoints here")
    keep = parser.parse_args().keep
    with contextlib.ExitStack() as stack:
        directory = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-")))
        directory.mkdir(parents=True, exist_ok=True)
        endpoint = stack.enter_context(private_server())
        demo = Demo(directory, endpoint, time.monotonic() + LIMIT_S)
        stack.callback(demo.close)
        console.print(
            f"[bold]{len(NODES)} agents[/] train examples/train_gpt.py; etcd at {endpoint}"
        )
        try:
            gap_s = disturbed_run(demo)
            true = show_claims(demo, gap_s, undisturbed_run(directory))
            write_report(endpoint, (keep or Path("build")).resolve() / "demo.html")
        except DemoFailed as failure:
            console.print(f"[bold red]failed:[/] {failure}")
            return 1
    return 0 if true else 1


if __name__ == "__main__":
    sys.exit(main())
