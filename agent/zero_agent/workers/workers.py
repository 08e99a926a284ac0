"""The workers of this node: started, watched and stopped through the nursery.

`WorkerGroup` holds one round's workers and says how they stand as a whole. Output goes through
`output.Tap`s, exits and process ids arrive as events on the hub's thread.

Must always hold: no worker is started while another of an older round may be running; a group
whose first worker has failed is killed as a whole, since a collective with a dead member never
ends; `STOPPED`, `FAILED`, ... are said only when every process of the group is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zero_agent.limits import Stopwatch
from zero_agent.network import ANY_PORT
from zero_agent.supervise import Workers
from zero_agent.workers.exits import Exit, read_stacks
from zero_agent.workers.hub import Hub
from zero_agent.workers.nursery import FAREWELL, PACKET_BYTES
from zero_agent.workers.oom import OomKills
from zero_agent.workers.outbox import Outbox
from zero_agent.workers.output import STDERR, STDOUT, Tap
from zero_agent.workers.streams import Route
from zero_agent.workers.unkillable import GIVE_UP_S, describe
from zero_agent.workers.worker_main import ENV_ERROR_FILE, STACKS_SIGNAL, Program, stacks_file
from zero_contract.clock import Clock, SystemClock
from zero_contract.worker import ExitCode

log = logging.getLogger("zero")

CLOSE_TIMEOUT_S = 8.0
KILL_TIMEOUT_S = 5.0
ANSWER_S = 10.0
"""A nursery that has not obeyed an order for so long is stuck: it takes milliseconds."""


class Nursery:
    """The agent's handle on its nursery process."""

    def __init__(
        self,
        hub: Hub,
        env: Mapping[str, str],
        preload: Sequence[str],
        on_news: Callable[[Nursery, dict[str, Any]], None],
        clock: Clock | None = None,
    ) -> None:
        """Start it; `on_news` is called on any thread, with `{"gone": True}` at its end."""
        self._hub = hub
        self._on_news = on_news
        self.ready = False
        """It has imported what was to be preloaded."""
        self._obeyed = self._answered = 0
        self._mute = Stopwatch(clock or SystemClock())
        self._ids = itertools.count(1)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._outbox = Outbox(self._socket)
        fd = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zero_agent.workers.nursery", str(fd), *preload],
            pass_fds=[fd],
            env=dict(env),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        hub.add(self._socket.fileno(), self._on_readable)

    def start(
        self,
        program: Program,
        env: Mapping[str, str],
        out: Tap,
        err: Tap,
        cpus: Collection[int] = (),
    ) -> int:
        """Fork a worker, bound to some CPUs if any; its id, known from now on in `on_news`."""
        order = {"op": "start", "program": vars(program), "env": dict(env), "cpus": sorted(cpus)}
        worker = self._order(order, [out.write_fd, err.write_fd])
        out.started()
        err.started()
        return worker

    def host_store(self, address: str, ports: range = ANY_PORT) -> int:
        """Fork a process that hosts a TCPStore on an address, at one of these ports; its id.

        News will have the port, or, if none was free, its end.
        """
        ends = [ports.start, ports.stop]
        return self._order({"op": "store", "address": address, "ports": ends}, [])

    def host_timers(self, path: str) -> int:
        """Fork a process that hosts torch's file timers at a path; its id."""
        return self._order({"op": "timers", "path": path}, [])

    def keep_word(self, node: str, listener: int, secret: str) -> None:
        """Give it what it needs to answer in the agent's place, once that is dead."""
        self._order({"op": "word", "node": node, "secret": secret}, [listener])

    def signal(self, worker: int, number: int) -> None:
        """Signal a worker's whole process group; nothing happens if it is gone.

        One that waits for the imports is not started any more: that is its end, at once.
        """
        if self._outbox.withdraw(worker):
            self._on_news(self, {"id": worker, "status": -int(number)})
        else:
            self._outbox.give(worker, {"op": "signal", "signal": int(number)}, [])

    def stuck_s(self, imports_s: float) -> float | None:
        """For how long it has owed an answer, if that is too long; to be asked again and again.

        Args:
            imports_s: How long an order may wait for its imports.
        """
        limit_s = ANSWER_S if self.ready else imports_s
        answered = self._obeyed + self.ready
        if answered != self._answered or self._outbox.given <= self._obeyed:
            self._answered = answered
            self._mute.stop()
        else:
            self._mute.start()
        return self._mute.elapsed_s if self._mute.past(limit_s) else None

    def close(self) -> int:
        """End it and everything below it; its exit code, or the negative number of a signal."""
        with contextlib.suppress(OSError):  # it is gone, or stands still
            self._socket.send(FAREWELL, socket.MSG_DONTWAIT)
        self._hub.remove(self._socket.fileno(), self._socket.close)
        self._outbox.close()
        if not self.ready:  # it imports, and does not listen
            self.kill()
        try:
            return self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        try:
            return self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it cannot be killed
            return -signal.SIGKILL

    @property
    def pid(self) -> int:
        """Of its process, the parent of the workers."""
        return self._process.pid

    def kill(self) -> None:
        """With what its imports have started; the kernel kills the workers with it.

        From now on it has as long again before it counts as stuck.
        """
        self._mute.stop()
        with contextlib.suppress(ProcessLookupError):  # it has no group yet, or is gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def _order(self, order: dict[str, Any], fds: list[int]) -> int:
        worker = next(self._ids)
        self._outbox.give(worker, order, fds)
        return worker

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(PACKET_BYTES)
        except OSError:
            data = b""
        if not data:
            self._hub.remove(self._socket.fileno())
            self._on_news(self, {"gone": True})
            return
        news = json.loads(data)
        if "ready" in news:
            self.ready = True
            self._outbox.listens()
        self._obeyed += "obeyed" in news
        self._on_news(self, news)


@dataclass(frozen=True, kw_only=True)
class Order:
    """One worker to start."""

    rank: int
    local_rank: int
    env: dict[str, str]
    out: Route = field(default_factory=Route)
    err: Route = field(default_factory=Route)
    cpus: Collection[int] = ()
    """Those it is bound to; none: all."""


class WorkerGroup:
    """This node's workers of one round."""

    def __init__(
        self, nursery: Nursery, hub: Hub, n: int, *, fence: int, clock: Clock | None = None
    ) -> None:
        self.round = n
        self.fence = fence
        self.exits: list[Exit] = []
        """In the order in which the workers ended."""
        self._nursery = nursery
        self._hub = hub
        self._running: dict[int, Order] = {}
        self._pids: dict[int, int] = {}
        self._stopping = False
        self._killed = Stopwatch(clock or SystemClock())
        self._condemned: Exit | None = None
        self.hung = False
        """Its workers took no step for too long."""
        self._stacks: dict[int, Path] = {}
        self._oom = OomKills()

    def start(self, program: Program, orders: Sequence[Order]) -> None:
        """Start all workers."""
        for order in orders:
            out = Tap.along(self._hub, STDOUT, order.out)
            err = Tap.along(self._hub, STDERR, order.err)
            own = _with_local_rank(program, order.local_rank)
            worker = self._nursery.start(own, order.env, out, err, order.cpus)
            self._running[worker] = order

    def stop(self, number: int) -> None:
        """Ask (SIGTERM) or make (SIGKILL) all workers end."""
        self._stopping = True
        if number == signal.SIGKILL:
            self._killed.start()
        for worker in self._running:
            self._nursery.signal(worker, number)

    def show_stacks(self) -> None:
        """Have every worker write down where it is; it is to be killed soon after."""
        self._stacks = {
            order.rank: stacks_file(order.env[ENV_ERROR_FILE]) for order in self._running.values()
        }
        self.stop(STACKS_SIGNAL)

    def condemn(self, rank: int, reason: str) -> None:
        """Take the group for hung: it has failed, by this rank, whatever its processes do."""
        self.hung = True
        self._condemned = self._verdict(rank, -signal.SIGKILL, reason)
        self.show_stacks()

    def _verdict(self, rank: int, status: int, reason: str) -> Exit:
        """The end of a worker that this agent takes for failed."""
        end = Exit(rank=rank, status=status, wanted=False, message=reason, traceback="")
        of_rank = (worker for worker, order in self._running.items() if order.rank == rank)
        worker = next(of_rank)
        return self._placed(end, worker, self._running[worker])

    def _placed(self, end: Exit, worker: int, order: Order) -> Exit:
        """With where it was: people look for its process and its files."""
        file, pid = Path(order.env[ENV_ERROR_FILE]), self._pids.get(worker)
        left = str(file) if file.exists() else ""
        return replace(end, local_rank=order.local_rank, pid=pid, error_file=left)

    def store_ended(self, status: int) -> None:
        """It has failed: without the round's TCPStore no worker can find its peers, or save."""
        rank = min(order.rank for order in self._running.values())
        self._condemned = self._verdict(rank, status, "the process with the round's TCPStore ended")
        self.stop(signal.SIGKILL)

    @property
    def ranks(self) -> list[int]:
        """Of the workers that run, or wait to be started."""
        return [order.rank for order in self._running.values()]

    def runs_as(self, worker: int, pid: int) -> int | None:
        """Take note of a worker's process; its rank, or None if it is not one of this group."""
        order = self._running.get(worker)
        if order is not None:
            self._pids[worker] = pid
        return order.rank if order else None

    @property
    def unkillable(self) -> str:
        """Which workers are left long after SIGKILL, and where they are; empty if none is."""
        if not (self._running and self._killed.past(GIVE_UP_S)):
            return ""
        left = [
            f"rank {order.rank}: {describe(self._pids.get(worker, self._nursery.pid))}"
            for worker, order in self._running.items()
        ]
        return f"not ended {GIVE_UP_S:g} s after SIGKILL: {'; '.join(left)}"

    def ended(self, worker: int, status: int) -> Exit | None:
        """Take note of a worker's end; None if it is not one of this group."""
        order = self._running.pop(worker, None)
        if order is None:
            return None
        error_file = Path(order.env[ENV_ERROR_FILE])
        wanted = self._stopping
        killer = self._oom.blame() if status == -signal.SIGKILL and not wanted else ""
        end = Exit.of(order.rank, status, error_file, wanted=wanted, killer=killer)
        end = self._placed(end, worker, order)
        self.exits.append(end)
        if status not in (ExitCode.OK, ExitCode.LEFT):
            self.stop(signal.SIGKILL)
        return end

    def orphaned(self) -> None:
        """The nursery is gone, and the workers with it."""
        for worker in list(self._running):
            self.ended(worker, -signal.SIGKILL)

    @property
    def state(self) -> Workers:
        """How the group stands as a whole."""
        if self._running:
            return Workers.STOPPING if self._stopping else Workers.RUNNING
        statuses = {end.status for end in self.exits if not end.wanted}
        if self._condemned is not None or statuses - set(ExitCode):
            return Workers.FAILED
        if ExitCode.PEER_LOST in statuses:
            return Workers.PEER_LOST
        if ExitCode.LEFT in statuses:
            return Workers.LEFT
        return Workers.STOPPED if self._stopping else Workers.SUCCEEDED

    @property
    def first_failure(self) -> Exit:
        """The exit that made the group fail: by order of exit, not by anybody's clock."""
        if self._condemned is not None:
            return replace(self._condemned, traceback=read_stacks(self._stacks))
        unwanted = [end for end in self.exits if not end.wanted]
        failures = [end for end in unwanted if end.status not in set(ExitCode)]
        return (failures or unwanted or self.exits)[0]


def _with_local_rank(program: Program, local_rank: int) -> Program:
    """Fill in torchrun's one macro, `${local_rank}` in an argument."""

    def fill(texts: list[str]) -> list[str]:
        return [text.replace("${local_rank}", str(local_rank)) for text in texts]

    return replace(program, arguments=fill(program.arguments), command=fill(program.command))
