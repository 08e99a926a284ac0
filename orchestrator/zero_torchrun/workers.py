"""The plug-in's end of the contract with the workers of this node, which torchrun starts and ends.

    worker  -- Hello, Progress, Left, CommitRequest -->  a socket of torchrun's process
    worker  <-- CommitReply, Leave --------------------  (zero_contract.channel)

torchrun's own way to change a round is SIGTERM to all workers. Those of this project are asked
first: they finish the step together, save, say that they have left, and wait for the signal, so
that torchrun charges no restart, whichever node notices first. A script without the engine or
`zero_torch.protect` never connects, and gets the signal at once.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from zero_contract import owned_dir, worker
from zero_contract.channel import Channel
from zero_contract.hub import Hub
from zero_contract.journal import Journal
from zero_contract.worker import (
    Ability,
    CommitReply,
    CommitRequest,
    Hello,
    Leave,
    Left,
    Message,
    PeerMemoryReply,
    PeerMemoryRequest,
    Preparing,
    Progress,
    When,
)
from zero_orchestrator.errors import StoreError
from zero_orchestrator.membership.job_state import Snapshot, round_env
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.store import retry

_PREFIX = "zero-torchrun-"
_PARENT_BYTES = 60
"""With the rest, the path of a Unix socket has at most 107 bytes."""
LEAVE_WITHIN_S = 600.0
"""The longest wait for a step and a save; then torchrun's SIGTERM follows, and in 30 s its SIGKILL.
zero-agent has --shutdown-timeout for it, and torchrun no such flag."""


class Workers:
    """The workers of a round that speak with this process."""

    def __init__(self, rdzv: Rendezvous, journal: Journal, on_notice: Callable[[], None]) -> None:
        """Listen; `on_notice` is called on another thread when a notice lets a worker leave."""
        self._rdzv, self._journal, self._on_notice = rdzv, journal, on_notice
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) > _PARENT_BYTES:  # Slurm makes long TMPDIRs
            parent = Path("/tmp")
        owned_dir.sweep(parent, f"{_PREFIX}*")  # those of processes that were killed
        self._scratch = owned_dir.make(parent, _PREFIX)
        self._hub = Hub()
        self._channel = Channel(self._hub, self._scratch.path / "agent", self._on_message)
        self._changed = threading.Lock()
        self._environ: dict[str, str | None] = {}
        """The former values of the variables by which the workers get to know their round."""
        self._begin(0, 0)

    def _begin(self, round: int, fence: int) -> None:
        self.round, self._fence = round, fence
        self.pids: dict[int, int] = {}
        self.preparing = ""
        self.progress: Progress | None = None
        """The report of the last step of the lowest rank here."""
        self._can_leave: set[int] = set()
        self._left: set[int] = set()
        self._asked: dict[int, When] = {}
        self._asked_s: float | None = None

    def begin(self, job: Snapshot, name: str) -> None:
        """Let torchrun give the workers that it starts next what they need to know of the round."""
        self._channel.hang_up()
        with self._changed:
            self._begin(job.n, job.fence)
        rdzv = self._rdzv
        told = round_env(job, name, rdzv.node, rdzv.secret, self._channel.path)
        told[worker.ENV_LAUNCHER] = "torchrun"
        # For `close`: torchrun's launcher may be called as a function, and the caller goes on.
        for key in told.keys() - self._environ.keys():
            self._environ[key] = os.environ.get(key)
        os.environ |= told  # torchrun starts workers with its own environment

    @property
    def have_left(self) -> bool:
        """Whether all workers that can leave have done so, at the same step boundary."""
        with self._changed:
            return bool(self._left) and self._left >= self._can_leave

    def ask_to_leave(self, reason: str) -> bool:
        """Ask for the end of the step; whether there is nobody to be waited for."""
        with self._changed:
            waits_for = self._can_leave - self._left
        if not waits_for:
            return True
        if self._asked_s is None:
            self._asked_s = time.monotonic()
        self._ask(When.BOUNDARY, reason, waits_for)
        return time.monotonic() - self._asked_s > LEAVE_WITHIN_S

    def interrupt(self, reason: str) -> None:
        """Let all stop to wait for peers: the round is over."""
        with self._changed:
            connected = set(self.pids)
        self._ask(When.NOW, reason, connected)

    def _ask(self, when: When, reason: str, ranks: set[int]) -> None:
        # Each of them once: torchrun asks this process several times a second.
        for rank in ranks:
            if self._asked.get(rank) is not when:
                self._asked[rank] = when
                leave = Leave(round=self.round, when=when, reason=reason, within_s=LEAVE_WITHIN_S)
                self._channel.send(rank, leave)

    def close(self) -> None:
        """Hear nothing more."""
        for key, before in self._environ.items():
            if before is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = before
        self._environ.clear()
        self._channel.close()
        self._hub.close()
        self._scratch.remove()

    # ---- the hub's thread ----

    def _on_message(self, rank: int, message: Message) -> None:
        with self._changed:
            match message:
                case Hello() if message.round == self.round:
                    self.pids[rank] = message.pid
                    if Ability.BOUNDARY in message.can:
                        self._can_leave.add(rank)
                case Left() if message.round == self.round:
                    self._left.add(rank)
                case Preparing():
                    self.preparing = message.what
                case Progress() if rank == min(self.pids, default=rank):
                    self.preparing, self.progress = "", message
        match message:
            case CommitRequest():
                # Etcd may keep it waiting, and the hub's thread must not wait. The fence is that of
                # now: the next round may have begun when the thread runs.
                commit = threading.Thread(
                    target=self._commit, args=(rank, message, self._fence), daemon=True
                )
                commit.start()
            case PeerMemoryRequest():
                reason = "torchrun keeps no checkpoints in memory; zero-agent does"
                self._channel.send(rank, PeerMemoryReply(request=message.request, reason=reason))
            case Left():
                self._journal.tell("left", f"rank {rank} left at step {message.step}")
                if message.notice:  # on a thread as well: that waits for etcd, and for `_turn`
                    threading.Thread(target=self._on_notice, daemon=True).start()
            case _:
                pass

    def _commit(self, rank: int, request: CommitRequest, fence: int) -> None:
        granted, reason, passing = False, f"round {request.round} is over", False
        if request.round == self.round:
            try:
                attempt = retry.within(request.patience_s)
                granted = attempt(self._rdzv.commit, fence, request)
            except StoreError as error:
                reason, passing = f"etcd did not take it: {error}", True
        reply = CommitReply(
            request=request.request,
            granted=granted,
            reason="" if granted else reason,
            passing=passing,
        )
        self._channel.send(rank, reply)
