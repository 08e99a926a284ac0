"""From a fault, or a change of nodes, to the next finished step: zero-agent beside its peers.

    python benchmarks/recovery.py --trials 5
    python benchmarks/recovery.py --cases join,drain
    python benchmarks/recovery.py --launchers zero-agent,zero-agent-3    # etcd with 3 members
    python benchmarks/recovery.py --launchers in-place,restart --start-up-s 10 --nodes 4
    python benchmarks/recovery.py --launchers in-place --parameters 30e6 --stage 3 --nodes 4

Nodes with one worker each run `recovery_worker.py`, a plain script: what is measured is the
launcher alone, no engine and no checkpoint. "in-place" and "restart" run
`recovery_engine_worker.py`, with each step in memory, and `elastic.in_place` on or off;
"ddp-in-place" and "ddp-restart" the same with DDP, by `recovery_ddp_worker.py`. Launchers take
turns within each trial; medians and ranges are printed, in seconds, and the median time of a step
to which nothing happens:

    worker   a worker is killed with -9: from then to the next step finished in a new group
    node     agent and worker at once, the same
    two      two nodes at once that do not keep each other's copies; needs 4 nodes
    silent   agent and worker are suspended, as if the power had gone: nothing is reset
    cut      a node's packets vanish; root, each node is a network namespace
    hang     the worker alone is suspended, and its agent lives
    join     one more node comes: how much longer than a step the others stand still
    drain    the agent of one gets a SIGTERM: how much longer than a step the others stand still

With state, each rank is the victim in turn, one in each trial. Without, it is rank 0's node for
zero-agent; torchrun's job cannot outlive the node that hosts its store, so there it is the other
one. "tuned" is the shortest setting of torchrun that was found to be stable: a last call of 1 s,
keep-alives of 1 s, and 5 s until gloo gives up on a peer. Where a worker hangs, zero-agent takes it
for hung after 2 s without a step, and torchrun has gloo's limit.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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

sys.path.append(str(Path(__file__).parents[1]))

from rendezvous import serving
from rich.console import Console
from rich.table import Table

from tests.support.etcd_server import EtcdServer
from tests.support.partition import Network
from zero_agent.etcd.etcd_process import Member, free_port
from zero_agent.node.process_control import children

HERE = Path(__file__).resolve().parent
LIMIT_S = 120.0
STEPS = 10_000
PACE_S = 0.2
HANG_S = 2
ETCD_PORT = 2379
"""In a namespace, where nothing else listens."""
WARM_STEPS = 10
TUNED = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=4"


@dataclass(frozen=True)
class Site:
    """Where nodes run, and what they train."""

    nodes: int
    endpoint: str
    """etcd's."""
    network: Network | None
    """Of namespaces named `n0`, `n1`, ...; None: they share this machine's loopback."""
    hangs: bool
    """Whether ranks wait for a silent one: none of them counts as hung, however short its limit."""
    start_up_s: float
    parameters: float
    stage: int


@dataclass(frozen=True)
class Launcher:
    name: str
    command: Callable[[Site, int, str, int], Sequence[str]]
    """(site, node, the job's name, a free port) -> what comes before the script."""
    victim: int | None = None
    """The node that can be killed; 0 hosts torchrun's store. None: each rank's in turn."""
    peer_timeout_s: float = 600
    """How long gloo waits for a silent peer, in a script without state."""
    members: int = 1
    """Of etcd."""
    trained_by: str = ""
    """The script with state: "engine" or "ddp"; empty: a plain one, with none."""
    goes_on: str = ""
    """How such a script goes on in the next round."""


def zero_agent(site: Site, node: int, job: str, port: int) -> Sequence[str]:
    return [
        *(sys.executable, "-m", "zero_agent", f"--nnodes=1:{site.nodes}", "--max-restarts=50"),
        *([f"--hang-timeout={HANG_S}"] if site.hangs else []),
        *(f"--rdzv-endpoint={site.endpoint}", f"--rdzv-id={job}", f"--node-id=n{node}"),
    ]


def torchrun(conf: str) -> Callable[[Site, int, str, int], Sequence[str]]:
    def command(site: Site, node: int, job: str, port: int) -> Sequence[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{site.nodes}"),
            *("--max-restarts=50", "--nproc-per-node=1", "--rdzv-backend=c10d"),
            *("--local-addr=127.0.0.1", f"--rdzv-endpoint=127.0.0.1:{port}"),
            *(f"--rdzv-id=bench{port}", f"--rdzv-conf=is_host={int(node == 0)}{conf}"),
        ]

    return command


def trained(name: str, by: str, goes_on: str) -> Launcher:
    return Launcher(name, zero_agent, trained_by=by, goes_on=goes_on)


LAUNCHERS = {
    "zero-agent": Launcher("zero-agent", zero_agent, 0),
    "zero-agent-3": Launcher("zero-agent, 3 members", zero_agent, 0, members=3),
    "in-place": trained("zero-agent, in place", "engine", "in-place"),
    "restart": trained("zero-agent, restarted", "engine", "restart"),
    "ddp-in-place": trained("DDP, in place", "ddp", "in-place"),
    "ddp-restart": trained("DDP, restarted", "ddp", "restart"),
    "torchrun-tuned": Launcher("torchrun, tuned", torchrun(f",{TUNED}"), 1, 5),
    "torchrun": Launcher("torchrun, defaults", torchrun(""), 1, 1800),
}


class Job:
    """Nodes of one launcher, and what their workers have noted."""

    def __init__(self, launcher: Launcher, directory: Path, site: Site, trial: int) -> None:
        self.launcher, self.site = launcher, site
        self._directory, self._trial, self._port = directory, trial, free_port()
        self._log = (directory / "log").open("wb")
        self.agents: list[subprocess.Popen[bytes]] = []
        (directory / "steps").mkdir()

    def start_nodes(self, count: int) -> None:
        for _ in range(count):
            self.start_node()

    def start_node(self) -> None:
        """Start the agent of one more node."""
        launcher, site, node = self.launcher, self.site, len(self.agents)
        command = launcher.command(site, node, self._directory.name, self._port)
        by = launcher.trained_by
        script = HERE / (f"recovery_{by}_worker.py" if by else "recovery_worker.py")
        state = (launcher.goes_on, site.start_up_s, site.parameters, site.stage)
        facts = state if by else (launcher.peer_timeout_s,)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with site.network.inside(f"n{node}") if site.network else contextlib.nullcontext():
            agent = subprocess.Popen(
                [*command, script, self._directory / "steps", *map(str, (*facts, STEPS, PACE_S))],
                stdout=self._log,
                stderr=self._log,
                env=env,
                start_new_session=True,
            )
        self.agents.append(agent)

    def victim(self, number: int = 0) -> int:
        """Which node can be lost; another one for each `number`."""
        if self.launcher.victim is not None:
            return self.launcher.victim
        # From the last rank down; two in turn are not neighbours, which keep each other's copies.
        rank = (self.site.nodes - 1 - self._trial - 2 * number) % self.site.nodes
        files = [path.name.split("-") for path in self.notes()]
        pids = {int(pid) for _, pid, of_rank in files if int(of_rank) == rank}
        return next(at for at, agent in enumerate(self.agents) if pids & set(below(agent.pid)))

    def worker(self, node: int) -> int:
        """The pid of a node's worker."""
        pids = {int(path.name.split("-")[1]) for path in self.notes()}
        return next(pid for pid in below(self.agents[node].pid) if pid in pids)

    def notes(self) -> set[Path]:
        """The files of all workers there have been."""
        return set((self._directory / "steps").iterdir())

    def steps(self) -> list[tuple[float, int]]:
        """(time, world size) of every step, oldest first."""
        return sorted(step for steps in self._steps_by_file() for step in steps)

    def step_s(self, world: int) -> float:
        """The median time of a step at a world size."""
        return statistics.median(
            later - at
            for steps in self._steps_by_file()
            for (at, size), (later, _) in itertools.pairwise(steps)
            if size == world
        )

    def _steps_by_file(self) -> list[list[tuple[float, int]]]:
        lines = [[line.split() for line in file.read_text().splitlines()] for file in self.notes()]
        return [
            [(float(words[0]), int(words[2])) for words in steps if len(words) == 3]
            for steps in lines
        ]

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
        if self.site.network is not None:
            for node in range(len(self.agents)):
                self.site.network.plug_in(f"n{node}")
        self._log.close()


def below(pid: int) -> list[int]:
    return [pid, *(deeper for child in children(pid) for deeper in below(child))]


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process and all below it."""
    for one in below(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, number)


@dataclass(frozen=True)
class Measured:
    seconds: float
    step_s: float
    """A step to which nothing happens, at the world size before."""


def recovery(fault: Callable[[Job], None]) -> Callable[[Job], Measured]:
    """Seconds from the fault to the next step of a new group."""

    def case(job: Job) -> Measured:
        nodes = job.site.nodes
        job.start_nodes(nodes)
        job.at_world(nodes, steps=WARM_STEPS * nodes)
        before, step_s = job.notes(), job.step_s(nodes)
        begin = time.time()
        fault(job)
        return Measured(job.next_step(before) - begin, step_s)

    return case


def join(job: Job) -> Measured:
    nodes = job.site.nodes
    job.start_nodes(nodes - 1)
    job.at_world(nodes - 1)
    job.start_node()
    return stall(job, before=nodes - 1, after=nodes)


def drain(job: Job) -> Measured:
    nodes = job.site.nodes
    job.start_nodes(nodes)
    job.at_world(nodes)
    os.kill(job.agents[job.victim()].pid, signal.SIGTERM)
    return stall(job, before=nodes, after=nodes - 1)


def stall(job: Job, before: int, after: int) -> Measured:
    """Between the last step at one world size and the first at the next, beyond a step's time."""
    begins = job.at_world(after, steps=1)
    step_s = job.step_s(before)
    return Measured(begins - max(at for at, _ in job.steps() if at < begins) - step_s, step_s)


def kill_two(job: Job) -> None:
    for agent in [job.agents[job.victim(number)] for number in range(2)]:
        kill(agent.pid)


def unplug(job: Job) -> None:
    assert job.site.network is not None
    job.site.network.unplug(f"n{job.victim()}")


CASES: dict[str, Callable[[Job], Measured]] = {
    "worker": recovery(lambda job: os.kill(job.worker(job.victim()), signal.SIGKILL)),
    "node": recovery(lambda job: kill(job.agents[job.victim()].pid)),
    "two": recovery(kill_two),
    "silent": recovery(lambda job: kill(job.agents[job.victim()].pid, signal.SIGSTOP)),
    "cut": recovery(unplug),
    "hang": recovery(lambda job: os.kill(job.worker(job.victim()), signal.SIGSTOP)),
    "join": join,
    "drain": drain,
}


def trial(launcher: Launcher, case: str, site: Site, number: int) -> Measured | None:
    """What a case costs; None if it did not end in time."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        job = Job(launcher, Path(name), site, number)
        try:
            return CASES[case](job)
        except TimeoutError:
            return None
        finally:
            job.close()


@contextlib.contextmanager
def on_loopback(directory: Path, members: int) -> Iterator[tuple[str, Network | None]]:
    """Endpoints of an etcd with so many members."""
    with serving(directory, members) as endpoint:
        yield endpoint, None


@contextlib.contextmanager
def in_namespaces(directory: Path, nodes: int) -> Iterator[tuple[str, Network | None]]:
    """A network of nodes and a machine for etcd; its endpoint, from all of them."""
    directory.mkdir()
    names = ("etcd", *(f"n{node}" for node in range(nodes)))
    with contextlib.closing(Network(names)) as network:
        everywhere = f"--listen-client-urls=http://0.0.0.0:{ETCD_PORT}"
        member = Member(
            name="etcd",
            data=directory / "data",
            client_port=ETCD_PORT,
            peer_port=ETCD_PORT + 1,
            options=(everywhere,),
        )
        with contextlib.closing(EtcdServer(directory, member)) as etcd:
            with network.inside("etcd"):
                etcd.start()
            yield f"{network.address('etcd')}:{ETCD_PORT}", network


def main() -> None:
    args = arguments()
    chosen = [LAUNCHERS[name] for name in args.launchers.split(",")]
    cases: list[str] = args.cases.split(",")
    found: dict[tuple[str, str], list[Measured | None]] = {}
    with contextlib.ExitStack() as made:
        directory = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="recovery-etcd-")))
        places = {
            members: made.enter_context(on_loopback(directory / str(members), members))
            for members in sorted({launcher.members for launcher in chosen})
        }
        namespaces = (
            made.enter_context(in_namespaces(directory / "network", args.nodes))
            if "cut" in cases
            else None
        )
        for number in range(args.trials):
            for case in cases:
                for launcher in chosen:
                    cut = namespaces if case == "cut" else None
                    place = cut or places[launcher.members]
                    site = Site(
                        args.nodes,
                        *place,
                        case in ("silent", "cut", "hang"),
                        args.start_up_s,
                        args.parameters,
                        args.stage,
                    )
                    measured = trial(launcher, case, site, number)
                    found.setdefault((launcher.name, case), []).append(measured)
                    print(f"trial {number + 1}: {launcher.name}, {case}: {measured}", flush=True)
    show(chosen, cases, found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--cases", default="worker,node,silent,hang,join,drain")
    parser.add_argument("--launchers", default="zero-agent,torchrun-tuned,torchrun")
    state = parser.add_argument_group("of the scripts with state")
    state.add_argument("--start-up-s", type=float, default=0.0)
    state.add_argument("--parameters", type=float, default=66e3)
    state.add_argument("--stage", type=int, default=2, help="of the engine")
    args = parser.parse_args()
    launchers, cases = args.launchers.split(","), args.cases.split(",")
    for name in [*(set(launchers) - set(LAUNCHERS)), *(set(cases) - set(CASES))]:
        parser.error(f"{name!r} is none of {', '.join([*LAUNCHERS, *CASES])}")
    if "cut" in cases and os.geteuid():
        parser.error("a cut network needs root, which makes the namespaces; leave out 'cut'")
    if "two" in cases and args.nodes < 4:
        parser.error("two nodes at once need --nodes=4: of three, two are neighbours")
    return args


def show(
    chosen: Sequence[Launcher],
    cases: Sequence[str],
    found: dict[tuple[str, str], list[Measured | None]],
) -> None:
    table = Table(title="seconds: median (range); a step")
    for head in ("case", *(launcher.name for launcher in chosen)):
        table.add_column(head)
    for case in cases:
        table.add_row(case, *(summary(found[launcher.name, case]) for launcher in chosen))
    Console().print(table)


def summary(values: Sequence[Measured | None]) -> str:
    measured = [value for value in values if value is not None]
    never = f", {len(values) - len(measured)} never" if len(measured) < len(values) else ""
    if not measured:
        return f"never within {LIMIT_S:g} s"
    done = [value.seconds for value in measured]
    step_s = statistics.median(value.step_s for value in measured)
    return f"{statistics.median(done):.2f} ({min(done):.2f}-{max(done):.2f}){never}; {step_s:.2f}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; what is above was measured")
