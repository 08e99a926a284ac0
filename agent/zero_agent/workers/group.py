"""The workers of this node: started, watched and stopped through the forkserver.

`WorkerGroup` holds one round's workers and their state as a whole. No worker is started while
another of an older round may be running, unless that one has left its round and waits (it is
*parked*), to be taken over into the next. Round 0 is that of workers that warm up: they have no
process group, and are taken over as those that wait.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zero_agent.node.state import Workers
from zero_agent.workers.environment import StartOrder
from zero_agent.workers.exits import WATCHDOG_LINES, Exit, device_error, read_stacks
from zero_agent.workers.forkserver_client import ForkserverClient
from zero_agent.workers.oom import OomKills
from zero_agent.workers.output.recent import LIMIT_BYTES, RecentOutput
from zero_agent.workers.output.tap import STDERR, STDOUT, Tap
from zero_agent.workers.stacks import GIVE_UP_S, Process, ask, describe
from zero_agent.workers.worker_main import ENV_ERROR_FILE, Program, stacks_file
from zero_contract.clock import Clock, Stopwatch, SystemClock
from zero_contract.hub import Hub
from zero_contract.worker import ExitCode


class WorkerGroup:
    """This node's workers of one round; of round 0, those that warm up, if any do."""

    def __init__(
        self,
        forkserver: ForkserverClient,
        hub: Hub,
        n: int,
        *,
        fence: int,
        clock: Clock | None = None,
        recent: RecentOutput | None = None,
    ) -> None:
        self.round = n
        self.fence = fence
        self.exits: list[Exit] = []
        """The exits, in the order in which the workers ended."""
        self._forkserver = forkserver
        self._hub = hub
        self._recent = recent
        self._running: dict[int, StartOrder] = {}
        self._taps: dict[int, tuple[Tap, Tap]] = {}
        self._parked: set[int] = set()
        """Of those that run, who has left the round and waits."""
        self._lost: Exit | None = None
        """How the first of those lost a peer, if that is why they wait."""
        self._pids: dict[int, int] = {}
        self._stopping = False
        self._killed = Stopwatch(clock or SystemClock())
        self._hung: Exit | None = None
        self.hung = False
        """Whether a worker took no step for too long."""
        self._stacks: dict[int, Path] = {}
        self._oom = OomKills()

    def start(self, program: Program, orders: Sequence[StartOrder]) -> None:
        """Start all workers."""
        for order in orders:
            out = Tap.along(self._hub, STDOUT, order.out, self._recent)
            err = Tap.along(self._hub, STDERR, order.err, self._recent)
            local_rank = str(order.local_rank)  # for torchrun's only macro
            own = replace(
                program,
                arguments=[a.replace("${local_rank}", local_rank) for a in program.arguments],
                command=[word.replace("${local_rank}", local_rank) for word in program.command],
            )
            worker = self._forkserver.start(own, order.env, out, err, order.cpus)
            self._running[worker], self._taps[worker] = order, (out, err)

    def park(self, rank: int, lost: str = "") -> None:
        """Note that a worker has left the round, and waits for the next one.

        `lost` says how it lost a peer, if that is why.
        """
        # None where its process has ended since: its exit tells the rest.
        waiting = {worker for worker, order in self._running.items() if order.rank == rank}
        if waiting and lost and self._lost is None:
            self._lost = self._verdict(rank, ExitCode.PEER_LOST, lost)
        self._parked |= waiting

    def take_over(self, former: WorkerGroup, orders: Sequence[StartOrder]) -> dict[int, StartOrder]:
        """Take over the workers that wait; by the rank that each had, its order now."""
        by_local_rank = {order.local_rank: order for order in orders}
        taken = {}
        # One that has ended while it waited is none of them: another is started in its place.
        for worker in former._parked & former._running.keys():
            old = former._running.pop(worker)
            order = by_local_rank[old.local_rank]
            # It has opened the files of its start, such as that for its stacks, and keeps them.
            own = {ENV_ERROR_FILE: old.env[ENV_ERROR_FILE]}
            order = replace(order, env=order.env | own)
            taken[old.rank] = self._running[worker] = order
            self._taps[worker] = former._taps[worker]
            for tap, route in zip(self._taps[worker], (order.out, order.err), strict=True):
                tap.follow(route)
            if worker in former._pids:
                self._pids[worker] = former._pids[worker]
        return taken

    def stop(self, number: int) -> None:
        """Send a signal to all workers, which are to end: SIGTERM asks them, SIGKILL ends them.

        0 is no signal: they know already, or are killed later.
        """
        self._stopping = True
        if number == signal.SIGKILL:
            self._killed.start()
        for worker in self._running if number else ():
            self._forkserver.signal(worker, number)

    def show_stacks(self) -> None:
        """Have every worker that can write the stacks of its threads."""
        self._stacks = {
            order.rank: stacks_file(order.env[ENV_ERROR_FILE]) for order in self._running.values()
        }
        for process in self.processes:
            ask(process)

    @property
    def processes(self) -> list[Process]:
        """The processes of the workers that run; may be called on any thread."""
        return [
            Process(
                rank=order.rank,
                pid=pid,
                parent=self._forkserver.pid,
                file=stacks_file(order.env[ENV_ERROR_FILE]),
            )
            # A copy: the agent's thread changes it meanwhile.
            for worker, order in tuple(self._running.items())
            if (pid := self._pids.get(worker)) is not None
        ]

    def mark_hung(self, rank: int, reason: str) -> None:
        """Mark the group as hung: it has failed, at this rank, whatever its processes do.

        They write their stacks; the caller kills them soon after.
        """
        self.hung = True
        self._hung = self._verdict(rank, -signal.SIGKILL, reason)
        self.show_stacks()
        self.stop(0)

    def _verdict(self, rank: int, status: int, reason: str) -> Exit:
        """The exit of a running worker that counts as failed."""
        end = Exit(rank=rank, status=status, wanted=False, message=reason, traceback="")
        running = self._running.items()
        worker, order = next((worker, order) for worker, order in running if order.rank == rank)
        return self._placed(end, worker, order)

    def _placed(self, end: Exit, worker: int, order: StartOrder) -> Exit:
        """Add the worker's local rank, pid and error file to its exit."""
        file, pid = order.env[ENV_ERROR_FILE], self._pids.get(worker)
        left = file if os.path.exists(file) else ""  # `Path.exists` raises on a disk that fails
        return replace(end, local_rank=order.local_rank, pid=pid, error_file=left)

    def store_ended(self, status: int) -> None:
        """Fail the group: without the round's TCPStore no worker can find its peers, or save."""
        rank = min(order.rank for order in self._running.values())
        self._hung = self._verdict(rank, status, "the process with the round's TCPStore ended")
        self.stop(signal.SIGKILL)

    @property
    def ranks(self) -> list[int]:
        """The ranks of the workers that run, or wait to be started."""
        return [order.rank for order in self._running.values()]

    def runs_as(self, worker: int, pid: int) -> int | None:
        """Record a worker's pid; returns its rank, or None if it is not one of this group."""
        order = self._running.get(worker)
        if order is not None:
            self._pids[worker] = pid
        return order.rank if order else None

    @property
    def unkillable(self) -> str:
        """Which workers still exist long after SIGKILL, and where they wait; empty if none does."""
        if not (self._running and self._killed.past(GIVE_UP_S)):
            return ""
        # A worker without a pid is not forked yet, so its forkserver is what hangs.
        left = [
            f"rank {order.rank}: {describe(self._pids.get(worker, self._forkserver.pid))}"
            for worker, order in self._running.items()
        ]
        return f"not ended {GIVE_UP_S:g} s after SIGKILL: {'; '.join(left)}"

    def ended(self, worker: int, status: int) -> Exit | None:
        """Record a worker's end; None if it is not one of this group."""
        order = self._running.pop(worker, None)
        if order is None:
            return None
        error_file = Path(order.env[ENV_ERROR_FILE])
        wanted, killer = self._stopping, ""
        if status == -signal.SIGKILL and not wanted:
            killer = self._oom.blame()
        elif status == -signal.SIGABRT and not wanted and self._recent is not None:
            # torch's watchdog leaves no error file: it prints why, and aborts the process.
            page = self._recent.last(WATCHDOG_LINES, LIMIT_BYTES, order.rank)
            lines = b"".join(each.text for each in page.chunks if each.round == self.round)
            killer = device_error(lines.decode(errors="replace"))
        end = Exit.of(order.rank, status, error_file, wanted=wanted, killer=killer)
        end = self._placed(end, worker, order)
        self.exits.append(end)
        # A collective with a dead member never ends: the group ends as a whole. Of the workers that
        # warm up, all are needed; of those of a round, all that have not left.
        if status not in (ExitCode.OK, ExitCode.LEFT) or not self.round:
            self.stop(signal.SIGKILL)
        return end

    def orphaned(self) -> None:
        """Record the end of all workers, which the kernel kills with the forkserver."""
        for worker in list(self._running):
            self.ended(worker, -signal.SIGKILL)

    @property
    def state(self) -> Workers:
        """The state of the group as a whole; NONE before the first workers are started."""
        if self._running:
            waiting = Workers.PARKED if self._lost is None else Workers.STRANDED
            waits, runs = (waiting, Workers.RUNNING) if self.round else _OF_WARM_UP
            # As long as one has not left, the process group of the round may be in use.
            here = waits if self._parked >= self._running.keys() else runs
            return Workers.STOPPING if self._stopping else here
        ends = [end for end in self.exits if not end.wanted]
        if not self.round:  # an end before there is a round is a failure, whatever its code
            return Workers.FAILED if ends else Workers.NONE
        if self._hung is not None or any(map(_is_cause, ends)):
            return Workers.FAILED
        if any(end.symptom for end in ends):
            return Workers.PEER_LOST
        if ExitCode.LEFT in {end.status for end in ends}:
            return Workers.LEFT
        return Workers.STOPPED if self._stopping else Workers.SUCCEEDED

    @property
    def first_failure(self) -> Exit:
        """The exit that made the group fail: the first in order of exit, whatever clocks show."""
        if self._lost is not None and self.state is Workers.STRANDED:
            return self._lost
        if self._hung is not None:
            return replace(self._hung, traceback=read_stacks(self._stacks))
        unwanted = [end for end in self.exits if not end.wanted]
        failures = [end for end in unwanted if _is_cause(end)]
        # A worker that lost its peers may end before the one that made it lose them.
        symptoms = [end for end in unwanted if end.symptom]
        first = (failures or symptoms or unwanted or self.exits)[0]
        ended = [str(end.rank) for end in self.exits if end.status == ExitCode.OK]
        if not first.symptom or not ended:
            return first
        known = first.message or "a peer is gone"
        return replace(first, message=f"{known}; ended with exit code 0: rank {', '.join(ended)}")


_OF_WARM_UP = (Workers.READY, Workers.STARTING)


def _is_cause(end: Exit) -> bool:
    """Whether this end is the worker's own failure."""
    return end.status not in set(ExitCode) and not end.symptom
