"""Many agents in one process, for `rendezvous.py`: real rendezvous, imaginary workers.

A process obeys one command at a time, each answered when it is done. Meanwhile its lanes, each a
thread for a few agents, poll every agent whose watch has told it something, and all of them now
and then, as an agent's own loop does. Times are of the system's monotonic clock, one for all.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from enum import StrEnum
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from zero_contract.clock import SystemClock
from zero_contract.journal import Journal
from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.membership.job_state import Node, State
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.membership.rounds import Timing
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe.events import Publisher
from zero_orchestrator.store.etcd.client import EtcdStore
from zero_orchestrator.store.kv import NO_LEASE, Change, Range, Read, TxnResult, Watch, Write

TICK_S = 0.25
LANES = 20
"""Threads of a process: so many of its agents can wait for the store at once."""
LEASE_S = 30
"""Long, because all agents of all machines share this one: keep-alives are not measured."""
TIMEOUT_S = 60.0
WORKERS = 8
"""Of each agent: what is told of them in a round is told as an agent does."""
PATIENT = Timing(settle_s=1e9, grow_after_s=1e9)
"""No round begins before all are there."""


class Command(StrEnum):
    """What a process can be told to do."""

    JOIN_ALL_BUT_LAST = "join all but last"
    JOIN_LAST = "join last"
    WAIT_FOR_ROUND = "wait for round"
    LOSE_LAST = "lose last"
    RESET_COUNTS = "reset counts"
    COUNTS = "counts"
    WATCH = "watch"
    WAIT_FOR_CHANGE = "wait for change"


class CountingStore(EtcdStore):
    """Counts what is asked and what is told; leases are not counted."""

    def __init__(self, endpoints: str) -> None:
        super().__init__(endpoints, timeout_s=TIMEOUT_S)
        self.changes = self.calls = self.transactions = self.puts = 0

    def put(self, key: str, value: str, *, lease: int = NO_LEASE) -> int:
        self.puts += 1
        return super().put(key, value, lease=lease)

    def get(self, key: str) -> Any:
        self.calls += 1
        return super().get(key)

    def range(self, prefix: str, **how: Any) -> Range:
        self.calls += 1
        return super().range(prefix, **how)

    def read(self, reads: Sequence[Read]) -> tuple[Range, ...]:
        self.calls += 1
        return super().read(reads)

    def txn(self, compares: Sequence[Any], writes: Sequence[Write]) -> TxnResult:
        self.calls += 1
        self.transactions += 1
        return super().txn(compares, writes)

    def watch(
        self, prefix: str, on_changes: Callable[[Sequence[Change]], None], **how: Any
    ) -> Watch:
        def count(changes: Sequence[Change]) -> None:
            self.changes += len(changes)
            on_changes(changes)

        return super().watch(prefix, count, **how)


class Hosted:
    """One agent with imaginary workers."""

    def __init__(
        self,
        store: CountingStore,
        telemetry: CountingStore,
        job: str,
        name: str,
        count: int,
        wake: Any,
    ) -> None:
        self.pen = Publisher(telemetry, job, name, "1", SystemClock())
        self.journal = Journal(name, publish=self.pen.event)
        self.journal.nodes = count
        node = Node(
            id=name,
            incarnation=f"{abs(hash(name)):016x}"[:8],
            address=f"{name}.cluster.local",
            slots=WORKERS,
            ring=f"{name}.cluster.local:40000",
        )
        self.rdzv = Rendezvous(
            store,
            job,
            JobSpec(min_nodes=max(1, count - 1), max_nodes=count, max_restarts=9),
            node,
            clock=SystemClock(),
            journal=self.journal,
            timing=PATIENT,
            lease_ttl_s=LEASE_S,
            on_change=lambda: wake(self),
        )
        self.known_s: dict[int, float] = {}
        """When it knew its place in a round, by round."""

    def poll(self) -> None:
        """What an agent's loop does, with workers that take no time."""
        job = self.rdzv.poll()
        index = job.members.index(self.rdzv.node)
        if index is None:
            return
        if job.state is State.FORMING and self.rdzv.node.id not in job.quiet:
            for rank in range(WORKERS):
                self.journal.tell("exit", f"rank {rank} lost its peers", symptom=True)
            self.journal.tell("stop", job.cause)
            self.rdzv.report_quiet(job.n)
        elif job.state is State.ACTIVE and job.master is not None:
            if job.n not in self.known_s:
                self.known_s[job.n] = time.monotonic()
                self.journal.tell("start", f"round {job.n}: this node runs {WORKERS} ranks")
                for rank in range(WORKERS):
                    self.journal.tell("worker", f"rank {rank} runs", level=logging.DEBUG)
        elif job.state is State.ACTIVE and index == 0:
            self.rdzv.publish_master(job, "node:1")


class Lane(threading.Thread):
    """A thread that runs the loops of a few agents: they wait for nobody outside."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.inbox: queue.SimpleQueue[Hosted | Callable[[], None]] = queue.SimpleQueue()
        self.joined: list[Hosted] = []
        self._due_s = 0.0
        self.start()

    def do(self, action: Callable[[], Any]) -> Future[Any]:
        """Let the thread call this."""
        done: Future[Any] = Future()

        def act() -> None:
            try:
                done.set_result(action())
            except Exception as error:
                done.set_exception(error)

        self.inbox.put(act)
        return done

    def join_job(self, agent: Hosted) -> None:
        agent.rdzv.register()
        self.joined.append(agent)
        agent.poll()

    def run(self) -> None:
        while True:
            self._turn()

    def _turn(self) -> None:
        """Poll the agents that have been told something, or all when that is due."""
        woken = set()
        try:
            news = self.inbox.get(timeout=max(0.0, self._due_s - time.monotonic()))
            while True:
                if isinstance(news, Hosted):
                    woken.add(news)
                else:
                    news()
                news = self.inbox.get_nowait()
        except queue.Empty:
            pass
        if time.monotonic() >= self._due_s:
            woken |= set(self.joined)
            self._due_s = time.monotonic() + TICK_S
        for agent in woken & set(self.joined):
            with contextlib.suppress(StoreUnavailable):
                agent.poll()


class Process:
    """The agents of one process, on their lanes."""

    def __init__(self, endpoints: str, job: str, names: Sequence[str], count: int) -> None:
        self._store = CountingStore(endpoints)
        self._telemetry = CountingStore(endpoints)
        self._lanes = [Lane() for _ in range(min(LANES, len(names)))]
        self._agents = [
            (lane, Hosted(self._store, self._telemetry, job, name, count, lane.inbox.put))
            for name, lane in zip(names, itertools.cycle(self._lanes), strict=False)
        ]
        self._has_last = names[-1].endswith(f"{count - 1:05}")
        self._told: list[float] = []

    def obey(self, command: Command, args: tuple[Any, ...]) -> Any:
        return _COMMANDS[command](self, *args)

    @property
    def _joined(self) -> list[Hosted]:
        return [agent for lane in self._lanes for agent in lane.joined]

    def join_all_but_last(self) -> None:
        agents = self._agents[: -1 if self._has_last else None]
        wait([lane.do(partial(lane.join_job, agent)) for lane, agent in agents])

    def join_last(self) -> float:
        lane, agent = self._agents[-1]
        began = time.monotonic()
        lane.do(lambda: lane.join_job(agent))
        return began

    def wait_for_round(self, n: int) -> list[float]:
        deadline = time.monotonic() + TIMEOUT_S
        while not all(n in agent.known_s for agent in self._joined):
            if time.monotonic() > deadline:
                waiting = [a.rdzv.reason for a in self._joined if n not in a.known_s]
                raise TimeoutError(f"round {n} did not begin: {waiting[0]}")
            time.sleep(0.005)
        return [agent.known_s[n] for agent in self._joined]

    def lose_last(self) -> float:
        """The last agent stops, and its neighbour finds it dead."""
        lane, dead = self._agents[-1]
        lane.do(lambda: lane.joined.remove(dead)).result()
        lane, neighbour = self._agents[0]
        began = time.monotonic()
        lane.do(lambda: neighbour.rdzv.evict(dead.rdzv.node, ended=True)).result()
        return began

    def reset_counts(self) -> None:
        self._store.changes = self._store.calls = self._store.transactions = 0
        self._telemetry.puts = 0

    def counts(self) -> tuple[int, int, int, int]:
        for _, agent in self._agents:
            agent.pen.close()  # what it has to tell is told
        store, events = self._store, self._telemetry.puts
        return store.changes, store.calls, store.transactions, events

    def watch(self, key: str) -> None:
        after = self._store.range(key).revision
        for _ in self._joined:
            EtcdStore.watch(
                self._store, key, lambda changes: self._told.append(time.monotonic()), after=after
            )

    def wait_for_change(self) -> float:
        deadline = time.monotonic() + TIMEOUT_S
        while len(self._told) < len(self._joined):
            if time.monotonic() > deadline:
                raise TimeoutError("a watch has not been told")
            time.sleep(0.001)
        return max(self._told, default=0.0)


_COMMANDS: dict[Command, Callable[..., Any]] = {
    Command.JOIN_ALL_BUT_LAST: Process.join_all_but_last,
    Command.JOIN_LAST: Process.join_last,
    Command.WAIT_FOR_ROUND: Process.wait_for_round,
    Command.LOSE_LAST: Process.lose_last,
    Command.RESET_COUNTS: Process.reset_counts,
    Command.COUNTS: Process.counts,
    Command.WATCH: Process.watch,
    Command.WAIT_FOR_CHANGE: Process.wait_for_change,
}


def serve(pipe: Connection, endpoints: str, job: str, names: Sequence[str], count: int) -> None:
    """A process's life: commands until it is killed."""
    logging.disable(logging.CRITICAL)
    threading.stack_size(256 * 1024)
    process = Process(endpoints, job, names, count)
    pipe.send(None)
    while True:
        try:
            pipe.send(process.obey(*pipe.recv()))
        except Exception as error:
            pipe.send(error)
