"""How fast do N agents agree on a round? The real round machine and client, without workers.

    python benchmarks/rendezvous.py --sizes 16,64,256,1000,2000 --trials 3

Each agent is a `Rendezvous` with a lease, a node and watches of its own, against a cluster of
three etcd servers on this machine, or `--members=3,1` in turn; `rendezvous_agents.py` runs up to
100 of them in a process, on one connection; the three that see the whole job have a process each.
Their workers are imaginary: they start at once and are gone at once. Measured:

- join: all but one agent wait. From the last one's first call to the moment when every agent
  knows its place in the round and where the round's TCPStore listens (p50, p99 and last agent).
- loss: one agent is found dead. From then to the moment when every other one knows its place in
  the next round.
- changes, calls: what one agent is told by its watches, and what it asks the store, on average
  in that second round (leases apart). Both stay the same with N if a round costs O(N) in total.
- events: what the agent's publisher writes of that round, with eight workers each; it has a
  connection of its own.
- floor: one key is written, and every agent has a watch on it: until the last one has been told.

`--logins` measures instead how N agents log in with a password, each on connections of its own
(`rendezvous_logins.py`).

torch's c10d dynamic rendezvous does the same `join` with all its handlers in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import multiprocessing
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rendezvous_agents import Command, serve
from rendezvous_c10d import c10d_join
from rendezvous_logins import logins
from rich.console import Console
from rich.table import Table

from zero_agent.etcd.etcd_process import EtcdProcess, Member, free_port
from zero_orchestrator.membership.job_view import FIRST
from zero_orchestrator.store.etcd.client import EtcdStore

PER_PROCESS = 100
LIMIT_S = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One job of one size. Seconds, and counts for each agent."""

    join_s: list[float]
    loss_s: list[float]
    floor_s: float
    changes: float
    calls: float
    transactions: float
    events: float


@contextlib.contextmanager
def serving(directory: Path, count: int) -> Iterator[str]:
    """A cluster of so many members; its endpoints."""
    directory.mkdir()
    members = [
        Member(
            name=f"m{i}", data=directory / f"m{i}", client_port=free_port(), peer_port=free_port()
        )
        for i in range(count)
    ]
    peers = ",".join(f"{member.name}={member.peer_url}" for member in members)
    with contextlib.ExitStack() as stack:
        started = []
        for member in members:
            server = EtcdProcess(
                dataclasses.replace(member, peers=peers), directory / f"{member.name}.log"
            )
            stack.callback(server.kill)
            started.append(server.start())
        for server in started:
            server.wait_healthy()
        yield ",".join(member.endpoint for member in members)


class Hosts:
    """The processes that run the agents; each obeys one command at a time."""

    def __init__(self, endpoints: str, job: str, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        names = [f"node-{index:05}" for index in range(count)]
        self._pipes: list[Connection] = []
        self._processes = []
        # Those that see the whole job have a process each, as they would have.
        shares = [[name] for name in names[:FIRST]]
        shares += [names[first : first + PER_PROCESS] for first in range(FIRST, count, PER_PROCESS)]
        for mine in shares:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, endpoints, job, mine, count), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def all(self, command: Command, *args: Any) -> list[Any]:
        """What each process answers."""
        for pipe in self._pipes:
            pipe.send((command, args))
        return self._answers()

    def last(self, command: Command, *args: Any) -> Any:
        """What the process with the last agent answers."""
        self._pipes[-1].send((command, args))
        return self._answer(self._pipes[-1])

    def wait_for_round(self, n: int, began: float) -> list[float]:
        """For each agent, the seconds from `began` until it knew its place in the round."""
        answers = self.all(Command.WAIT_FOR_ROUND, n)
        return [known - began for answer in answers for known in answer]

    def _answers(self) -> list[Any]:
        return [self._answer(pipe) for pipe in self._pipes]

    def _answer(self, pipe: Connection) -> Any:
        if not wait([pipe], LIMIT_S):
            raise TimeoutError(f"a process of agents did not answer within {LIMIT_S:g} s")
        answer = pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def trial(endpoints: str, count: int) -> Trial:
    """A job of `count` agents: they join, and lose one."""
    job = f"bench-{uuid.uuid4().hex[:8]}"
    with contextlib.closing(Hosts(endpoints, job, count)) as hosts:
        hosts.all(Command.JOIN_ALL_BUT_LAST)
        began = hosts.last(Command.JOIN_LAST)
        join = hosts.wait_for_round(1, began)
        hosts.all(Command.RESET_COUNTS)
        began = hosts.last(Command.LOSE_LAST)
        loss = hosts.wait_for_round(2, began)
        counts = [sum(kind) / count for kind in zip(*hosts.all(Command.COUNTS), strict=True)]
        floor = _floor(hosts, endpoints, job)
    changes, calls, transactions, events = counts
    return Trial(
        join_s=join,
        loss_s=loss,
        floor_s=floor,
        changes=changes,
        calls=calls,
        transactions=transactions,
        events=events,
    )


def _floor(hosts: Hosts, endpoints: str, job: str) -> float:
    key = f"/floor/{job}"
    hosts.all(Command.WATCH, key)
    store = EtcdStore(endpoints)
    began = time.monotonic()
    store.put(key, "")
    told = hosts.all(Command.WAIT_FOR_CHANGE)
    store.close()
    return max(told) - began


def row(name: str, trials: Sequence[Trial]) -> list[str]:
    def spread(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"

    def mean(what: str) -> str:
        return f"{statistics.mean(getattr(trial, what) for trial in trials):.1f}"

    return [
        name,
        *(spread([quantile(trial.join_s, q) for trial in trials]) for q in (0.5, 0.99, 1.0)),
        spread([max(trial.loss_s) for trial in trials]),
        *(mean(what) for what in ("changes", "calls", "transactions", "events")),
        spread([trial.floor_s for trial in trials]),
    ]


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that is not below a share `q` of all."""
    ordered = sorted(values)
    return ordered[math.ceil(q * len(ordered)) - 1]


COLUMNS = (
    "agents",
    "join p50",
    "p99",
    "last",
    "loss",
    "changes",
    "calls",
    "txns",
    "events",
    "floor",
)


def show_logins(sizes: Sequence[int], bcrypt_cost: int, at_once: int) -> None:
    """A line for each size."""
    for count in sizes:
        found = logins(count, bcrypt_cost, at_once or count)
        print(
            f"{count} agents: logged in after {found.p50_s:.1f} s (p50), {found.last_s:.1f} s "
            f"(last); passwords checked for each: {found.checks:.2f}, and after a pause of etcd "
            f"{found.checks_after_pause:.2f}; streams of keep-alives: {found.streams:.2f}; etcd "
            f"has computed {1000 * found.server_s:.1f} ms for each",
            flush=True,
        )


def in_turn(text: str) -> list[int]:
    """The numbers, each 1 or more, of "3,1"; argparse says what is wrong."""
    found = [int(each) for each in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=in_turn, default="16,64,256,1000", help="agents, in turn")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument(
        "--members", type=in_turn, default="3", help="of etcd; several numbers: in turn"
    )
    parser.add_argument("--c10d-up-to", type=int, default=64, help="agents; 0: not at all")
    parser.add_argument("--logins", action="store_true", help="measure logins alone")
    parser.add_argument("--bcrypt-cost", type=int, default=10, help="of passwords (etcd's is 10)")
    parser.add_argument("--at-once", type=int, default=0, help="log in so many at a time; 0: all")
    args = parser.parse_args()
    if args.logins:
        show_logins(args.sizes, args.bcrypt_cost, args.at_once)
        return
    table = Table(*COLUMNS, title="seconds: median (range); counts for each agent in one round")
    for count in args.sizes:
        sizes, peers = args.members, []
        found: dict[int, list[Trial]] = {members: [] for members in sizes}
        with tempfile.TemporaryDirectory(prefix="rendezvous-") as name:
            for number in range(args.trials):
                for members, trials in found.items():
                    with serving(Path(name, f"{number}-{members}"), members) as endpoints:
                        trials.append(trial(endpoints, count))
                    print(f"{count} agents, {members}: {row('', trials[-1:])}", flush=True)
                if count <= args.c10d_up_to:
                    peers.append(c10d_join(count))
                    print(f"c10d, {count} handlers: {peers[-1]:.2f}", flush=True)
        for members, trials in found.items():
            table.add_row(*row(f"{count}, {members} members", trials))
        if peers:
            last = f"{statistics.median(peers):.2f} ({min(peers):.2f}-{max(peers):.2f})"
            table.add_row(f"{count}, c10d", "", "", last)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
