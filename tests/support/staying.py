"""The workers of a job that stay in their processes, and a launcher that does as a test says.

The launcher's end of the contract is the product's own; what it decides is decided by the test.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.waiting import wait_for
from tests.support.world import forkserver
from zero_comm.worker.agent_link import AgentLink
from zero_comm.worker.distributed import MEETING
from zero_contract import worker as contract
from zero_contract.channel import Channel
from zero_contract.hub import Hub
from zero_contract.worker import ExitCode, Join, Leave, Message, When

_NEVER = 1 << 62
_QUIET_S = 3.0
"""Survivors notice a loss within this time; then they are told."""


class Job:
    """The workers of a job, in rounds; the place of a worker is its rank in its first round.

    In each round they wait after their first step until the test says what comes, so that nobody
    has ended before it does.
    """

    def __init__(self, directory: Path, script: Callable[..., Any], *given: Any) -> None:
        self._directory, self._script, self._given = directory, script, given
        self._hub = Hub()
        self._inbox: queue.Queue[tuple[int, Message]] = queue.Queue()
        self._channel = Channel(self._hub, directory / "agent.sock", self._take)
        self._context = forkserver()
        self._round = 0
        self._store: dist.TCPStore | None = None
        self._asked = False
        self._until = self._context.Value("q", 0)
        """Workers wait when they have done this step."""
        self.memory: Path | None = None
        """Where checkpoints in memory are; None: nowhere."""
        self.members: list[Any] = []
        """The processes of the round, by rank."""
        self.results: Any = self._context.Queue()
        self.can: dict[int, tuple[contract.Ability, ...]] = {}
        """What each rank has said last that it can."""

    def _take(self, rank: int, message: Message) -> None:
        """Answer a worker; on the hub's thread."""
        match message:
            case contract.CommitRequest():
                reply = contract.CommitReply(request=message.request, granted=True, reason="")
                self._channel.send(rank, reply)
            case contract.PeerMemoryRequest():
                self._channel.send(rank, self._memory_of(message.request))
            case contract.Progress() | contract.Left() | contract.Preparing():
                self._inbox.put((rank, message))
            case contract.Hello():
                self.can[rank] = message.can
            case _:
                pass

    def _memory_of(self, request: int) -> contract.PeerMemoryReply:
        """All ranks are on one node."""
        if self.memory is None:
            return contract.PeerMemoryReply(request=request, reason="no")
        key, budget_bytes = "0" * 64, 1 << 28
        return contract.PeerMemoryReply(
            request=request, directory=str(self.memory), key=key, budget_bytes=budget_bytes
        )

    def begin(self, stay: list[int], joining: int = 0, absent: int = 0) -> None:
        """Begin a round with those ranks of the last one, and new processes; some never come."""
        self._round, self._asked, self._until.value = self._round + 1, False, 0
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        world = len(stay) + joining + absent
        self._channel.hang_up(
            {
                former: Join(round=self._round, env=self._environ(rank, world))
                for rank, former in enumerate(stay)
            }
        )
        members = [self.members[former] for former in stay]
        joins = range(len(stay), len(stay) + joining)
        self.members = members + [self._start(self._environ(rank, world)) for rank in joins]

    def _start(self, environ: dict[str, str]) -> Any:
        given = (environ, self._until, self.results, self._script, *self._given)
        process = self._context.Process(target=run, args=given, daemon=True)
        process.start()
        return process

    def warm_up(self, rank: int) -> None:
        """Start one more member of the next round before that, and wait until it is ready."""
        of_no_round = {"MASTER_ADDR": "", "MASTER_PORT": "", contract.ENV_ROUND: "0"}
        self.run_on()
        self.members.append(self._start({**self._environ(rank, rank + 1), **of_no_round}))
        assert self._inbox.get(timeout=60) == (rank, contract.Left(round=0, step=0, stays=True))

    def _environ(self, rank: int, world: int) -> dict[str, str]:
        assert self._store is not None
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            contract.ENV_SOCKET: self._channel.path,
            contract.ENV_ROUND: str(self._round),
            contract.ENV_RUN: "the job",
        }

    def leave_at(self, step: int, *, stay: bool = True) -> int:
        """Ask the workers to leave after this step; returns the one after which all have.

        `stay`: what each of them says that it does.
        """
        left: dict[int, int] = {}
        self._until.value = step
        while len(left) < len(self.members):
            rank, message = self._inbox.get(timeout=60)
            if isinstance(message, contract.Left):
                assert message.stays is stay
                left[rank] = message.step
            elif (
                isinstance(message, contract.Progress) and message.step >= step and not self._asked
            ):
                self._asked = True
                leave = Leave(round=self._round, when=When.BOUNDARY, reason="a node joins")
                for each in range(len(self.members)):
                    self._channel.send(each, leave)
                self.run_on()
        (at,) = set(left.values())
        return at

    def run_on(self) -> None:
        """Let the workers of the round take all steps."""
        self._until.value = _NEVER

    def wait_for_loss(self, victim: int) -> None:
        """Wait until this rank is gone, and all others wait for the next round.

        As an agent does, tell those that wait for a survivor that has left already.
        """
        self.run_on()
        left: set[int] = set()
        others = set(range(len(self.members))) - {victim}
        lost = Leave(round=self._round, when=When.LOST, reason="a worker is lost")
        until_s = time.monotonic() + 60
        while left != others:
            assert time.monotonic() < until_s, f"{others - left} have not left"
            with suppress(queue.Empty):
                rank, message = self._inbox.get(timeout=_QUIET_S)
                if not isinstance(message, contract.Left):
                    continue
                assert (message.stays, bool(message.lost)) == (True, True)
                left.add(rank)
            # Or no survivor notices, as where a copy in memory waits for the vote of the victim.
            if left or self.members[victim].exitcode is not None:
                for each in others - left:
                    self._channel.send(each, lost)
        self.members[victim].join(60)
        assert self.members[victim].exitcode == -signal.SIGKILL

    def ask_at(self, step: int) -> None:
        """Ask the workers to leave when one has done this step."""
        self._until.value = step
        while not self._asked:
            with suppress(queue.Empty):
                _, message = self._inbox.get(timeout=0.1)
                if isinstance(message, contract.Progress) and message.step >= step:
                    self._asked = True
            if all(member.exitcode is not None for member in self.members):
                break
        leave = Leave(round=self._round, when=When.BOUNDARY, reason="a node joins")
        for each in range(len(self.members)):
            self._channel.send(each, leave)
        self.run_on()

    def parted(self) -> list[int] | None:
        """Wait until each worker has ended, or waits for the next round; who waits.

        None: the script has come to its end.
        """
        stay: dict[int, bool] = {}
        lost = Leave(round=self._round, when=When.LOST, reason="a worker is lost")

        def ended(rank: int) -> bool:
            return self.members[rank].exitcode is not None

        def are_parted() -> bool:
            with suppress(queue.Empty):
                while True:
                    rank, message = self._inbox.get_nowait()
                    if isinstance(message, contract.Left):
                        stay[rank] = message.stays
            ranks = range(len(self.members))
            gone = [rank for rank in ranks if ended(rank) or stay.get(rank)]
            killed = any(self.members[rank].exitcode == -signal.SIGKILL for rank in gone)
            if killed:
                for rank in set(ranks) - {*gone}:
                    self._channel.send(rank, lost)
            return len(gone) == len(self.members)

        wait_for(are_parted, 90, "all workers have left")
        codes = [member.exitcode for member in self.members]
        if all(code == 0 for code in codes):
            return None
        of_who_leaves = {None, 0, ExitCode.LEFT, ExitCode.PEER_LOST}
        # DDP's own exchanges fail as torch says when a peer dies within them.
        of_loss = {-signal.SIGKILL, 1} if -signal.SIGKILL in codes else set()
        assert {*codes} <= of_who_leaves | of_loss, codes
        return [rank for rank in sorted(stay) if stay[rank] and not ended(rank)]

    def wait_for_meeting(self) -> None:
        """Wait until a worker waits for the others of its round."""
        while self._inbox.get(timeout=60)[1] != contract.Preparing(what=MEETING):
            pass

    def let_go(self) -> None:
        """Close the connections: no round follows for the workers."""
        self.run_on()
        self._channel.hang_up()

    def to_end(self) -> list[Any]:
        """What the processes return whose script ends; others start anew, in further rounds."""
        self.run_on()
        while (stay := self.parted()) is not None:
            self.begin(stay, joining=len(self.members) - len(stay))
            self.run_on()
        return self.end()

    def end(self) -> list[Any]:
        """What the processes of the round return."""
        self.run_on()
        results = [self.results.get(timeout=60) for _ in self.members]
        for process in self.members:
            process.join(60)
            assert process.exitcode == 0
        return results

    def close(self) -> None:
        for process in self.members:
            process.kill()
        self._channel.close()
        self._hub.close(timeout_s=60)


def run(
    environ: dict[str, str], until: Any, results: Any, script: Callable[..., Any], *given: Any
) -> None:
    """Be a worker: run a script, which waits after each step for leave to go on."""
    torch.set_num_threads(1)
    # As a script may: no socket of ours has it. Those by which torch passes files have.
    socket.setdefaulttimeout(1)
    os.environ.update(environ)
    report = AgentLink.progress

    def progress(link: AgentLink, number: int, mine: contract.Progress) -> None:
        report(link, number, mine)
        wait_for(lambda: mine.step < until.value, 60, "the test lets the workers go on")

    AgentLink.progress = progress  # type: ignore[method-assign]
    results.put((os.getpid(), script(*given)))
