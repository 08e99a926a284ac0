"""The worker's link to its agent: the socket and its messages.

A process has one link, however many engines it has (a GAN, actor and critic): the agent sees one
worker. Without an agent (plain torchrun, or one process) everything here does nothing, and what
`zero_contract.notices` hears takes the place of a request to leave. Under torchrun with our plug-in
there are both: a socket for commits and requests, and torchrun's signals.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch.distributed as dist
from msgspec.structs import replace

from zero_comm.errors import LeavingNow
from zero_comm.waiting import Interrupt
from zero_comm.worker.distributed import connect_to_agent, hang_up_on_store, leave_group
from zero_comm.worker.flight_recorder import recorded
from zero_comm.worker.rank_times import WAITS, EveryonesTimes, StepTimer
from zero_contract import worker as contract
from zero_contract.errors import CommitRefused, PeerLost
from zero_contract.notices import Notice, heard
from zero_contract.worker import (
    Ability,
    CommitReply,
    ExitCode,
    Join,
    Leave,
    Message,
    PeerMemoryReply,
    WaitReply,
    WaitRequest,
    When,
)

_log = logging.getLogger(__name__)

COMMIT_TIMEOUT_S = 30.0
PEER_MEMORY_TIMEOUT_S = 10.0
WAIT_FOR_ETCD_S = 5.0
"""The time that one request for the last checkpoint of a script waits for etcd: another follows."""
ENDED_WITHIN_S = 30.0
"""Time for torchrun to learn why a worker has left: a node that is lost has a lease, for 3 s."""
LAST_SAVE = 0.75
"""The part of the drain timeout for which the last save may wait for etcd: the rest is needed to
exit, before the agent kills the worker."""
_LOOK_S = 0.05
_SEND_TIMEOUT = struct.pack("ll", 1, 0)  # a C timeval: 1 s
"""The timeout of a send to an agent that does not read: one step waits for it, and no further."""


def current_round() -> int:
    """The round this worker was started for; 0 without an agent."""
    return int(os.environ.get(contract.ENV_ROUND, "0"))


def current_job() -> str | None:
    """The job that this worker belongs to; None without an agent."""
    return os.environ.get(contract.ENV_JOB)


def committed_step() -> int:
    """The step of the newest checkpoint published when this worker was started; 0: none."""
    return int(os.environ.get(contract.ENV_COMMITTED, "0"))


class AgentLink:
    """The connection to the agent of this node, or its absence; `agent_link` makes it."""

    _join: Join | None = None
    """The next round, if this worker has got it."""
    _must_end = False
    """Whether the agent wants this process to end at once."""
    why_anew = ""
    """Why this process would be started anew if a peer were lost now; empty: nobody asks."""
    outlives = False
    """Whether the process goes on when a peer is lost: whoever has set this catches PeerLost."""

    def __init__(self, rank: int, path: str | None = None) -> None:
        """Connect to the agent's socket; without one every call does nothing.

        By default it is the one that the environment names.
        """
        self.round = current_round()
        self._rank = rank
        self._leave = threading.Event()
        # A fork, as of a DataLoader, inherits the handler of SIGTERM, and no agent speaks for it.
        self._pid = os.getpid()
        self._sigterm_came = False
        self._last_save_by_s = 0.0
        # Each engine gets the replies to its own requests.
        self._numbers = itertools.count(1)
        self._answers: dict[int, CommitReply | PeerMemoryReply] = {}
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._flags = 0
        path = path or os.environ.get(contract.ENV_SOCKET)
        self._socket = _connected(path) if path else None
        self.present = bool(path)
        """Whether this worker runs under an agent, reachable or not."""
        self.group_lost = threading.Event()
        """Set when a peer is lost: threads that wait for peers may stop waiting."""
        self.interrupt = Interrupt()
        """Ends every wait for peers when the agent asks this worker to leave at once."""
        self.leaves_with = 0
        """The exit code of all ranks, once some rank was asked to leave: equal on all of them after
        each step of an engine."""
        self.departure: str | None = None
        """How this worker leaves, if that is known."""
        self.may_leave = False
        """Whether everything is saved: the next step is the last."""
        self.clients: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """The engines of this process, by number, in the order in which the script made them."""
        self.ram_bytes: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        """The bytes of the node's memory that each of them has."""
        self.total_steps = 0
        """Steps of the whole run; 0: not known."""
        self._joined = self._left = 0
        self._shown: tuple[int, contract.Progress] | None = None
        self._saving_s = self._compute_s = self._wait_s = 0.0
        self._timer = StepTimer(WAITS)
        self._written = (0.0, 0.0)
        self._everyones = EveryonesTimes() if rank == 0 else None
        # In another group the process has another link, see `agent_link`.
        self.group = ref(dist.group.WORLD) if dist.is_initialized() else lambda: None
        if self._socket is not None:
            threading.Thread(target=self._read, args=(self._socket,), daemon=True).start()
            self.announce(Ability.BOUNDARY)

    def announce(self, *can: Ability) -> None:
        """Tell the agent what this worker supports; all of it, each time."""
        self._send(contract.Hello(rank=self._rank, pid=os.getpid(), can=can, round=self.round))

    def handles_sigterm(self) -> bool:
        """Note a SIGTERM; whether the agent, and not the signal, decides about this process."""
        self._sigterm_came = True
        return self._pid == os.getpid() and self._socket is not None and not self._must_end

    @property
    def launched(self) -> bool:
        """Whether torchrun with our plug-in is in the place of the agent."""
        return self.present and contract.ENV_LAUNCHER in os.environ

    @property
    def leave_asked(self) -> int:
        """The exit code of a worker that its agent wants out of its group, or a notice; 0: stay.

        From the first call on, a worker without an agent heeds notices.
        """
        if self._leave.is_set():
            return ExitCode.LEFT
        notice = self._notice
        return notice.code if notice is not None else 0

    @property
    def _notice(self) -> Notice | None:
        """The notice that this process has heard itself; under an agent, the agent hears."""
        return heard() if self.launched or not self.present else None

    @property
    def leaving(self) -> bool:
        """Whether some rank was asked to leave; equal on all ranks after each step of an engine."""
        # Decided by the step of any engine, for all: the process leaves at the next save of them
        # all, because the script alone knows at which point their states belong together.
        return self.leaves_with > 0

    def raise_if_leaving(self, what: str) -> None:
        """Raise LeavingNow, which names what this worker does, if it is to leave at once."""
        if self.interrupt.reason:
            raise LeavingNow(f"{what}: asked to leave: {self.interrupt.reason}")

    def add(self, client: object) -> int:
        """Register an engine of this process; returns its number."""
        number, self._joined = self._joined, self._joined + 1
        self.clients[number] = client
        return number

    @property
    def is_over(self) -> bool:
        """Whether there were engines, and none is left."""
        return self._joined > 0 and not self.clients

    def is_alone(self) -> bool:
        """Whether the script has one engine, and others only that it has destroyed."""
        return self._joined - self._left == 1

    def note_schedule(self, scheduler: object) -> None:
        """Note the steps of the whole run, if a scheduler is made for a number of steps."""
        total_steps = getattr(scheduler, "total_steps", None)  # as torch's OneCycleLR has it
        if isinstance(total_steps, int):
            self.total_steps = total_steps

    def remove(self, number: int) -> None:
        """Unregister an engine that is destroyed; the last one closes the connection."""
        self._left += self.clients.pop(number, None) is not None
        if self._shown is not None and self._shown[0] == number:
            self._shown = None
        if not self.clients:
            self.close()

    def progress(self, number: int, mine: contract.Progress) -> None:
        """Report the end of an engine's step to the agent; the most advanced engine is shown."""
        mine = replace(mine, total_steps=self.total_steps)
        if self._shown is None or self._shown[0] == number or mine.step > self._shown[1].step:
            self._shown = number, mine
        self.heartbeat()

    def heartbeat(self) -> None:
        """Send the last progress again: this worker waits and is not hung."""
        if self._shown is not None:
            self._send(
                replace(
                    self._shown[1],
                    saving_s=self._saving_s,
                    compute_s=self._compute_s,
                    wait_s=self._wait_s,
                )
            )
            self._saving_s = self._compute_s = self._wait_s = 0.0

    def saved(self, stall_s: float) -> None:
        """Note for how long a save has blocked training; the next progress reports it."""
        self._saving_s += stall_s
        self._timer.saved(stall_s)

    def restored(self, restored: contract.Restored) -> None:
        """Report on rank 0 that all ranks have loaded a checkpoint, and verified what they read."""
        self._send(restored)

    def preparing(self, what: str, part: float | None = None) -> None:
        """Say what this worker does before its first step, for `zero-ctl status`.

        Such as `loading step-000000040.g1.3fa9`; the part that is done is 0 to 1, None: not known.
        """
        if self._shown is None:
            self._send(contract.Preparing(what=what, part=part))

    def saved_file(self, saved: contract.Saved) -> None:
        """Report the end of a save."""
        if saved.write_s > 0 and not saved.in_memory:  # the rate of the storage
            self._written = (saved.size_bytes / saved.write_s, saved.write_s)
        self._send(saved)

    def save_waits(self, step: int, what: str, left_s: float) -> None:
        """Report that the last save waits; also a heartbeat, or the agent would mark it hung."""
        self._send(contract.SaveWaits(step=step, what=what, left_s=left_s))
        self.heartbeat()

    def step_times(self) -> tuple[float, float, float, float]:
        """At the end of a step, what `everyones_times` needs of each rank.

        The seconds in which this rank computed in the step, and in which it waited; and the bytes
        per second and the seconds of its part of the last checkpoint.
        """
        compute_s, wait_s = self._timer.step()
        self._compute_s += compute_s
        self._wait_s += wait_s
        return compute_s, wait_s, *self._written

    def everyones_times(self, step: int, times: Sequence[Sequence[float]]) -> None:
        """On rank 0: report the `step_times` of all ranks in a step, from time to time."""
        if self._everyones is not None and self.present:
            report = self._everyones.add(step, times)
            if report is not None:
                self._send(report)

    def leave(self, step: int) -> NoReturn:
        """Exit this worker, which has left its group and saved `step`.

        Raises:
            SystemExit: Always, with the exit code of a worker that has left.
        """
        notice = self._notice is not None
        self._send(contract.Left(round=self.round, step=step, notice=notice))
        leave_group()
        self.await_end()
        raise SystemExit(self.leaves_with)

    @property
    def may_stay(self) -> bool:
        """Whether an agent can take this process into the next round."""
        return self._socket is not None and not self.launched

    def stay(self, step: int, lost: str = "") -> Mapping[str, str]:
        """Leave the group after `step`, and wait for the next round; returns its environment.

        `lost` says how a peer was lost, if that is why.

        Raises:
            SystemExit: There is none for this process, as `leave`.
        """
        # First: who has said that it stays counts as stopped, and its round may end.
        leave_group()
        self._send(contract.Left(round=self.round, step=step, stays=True, lost=lost))
        # No timeout: the agent sends the next round or closes the connection, as its own end does.
        with self._changed:
            self._changed.wait_for(
                lambda: self._join is not None or self._socket is None or self._must_end
            )
        if self._join is None:
            raise SystemExit(ExitCode.PEER_LOST if lost else self.leaves_with)
        # A handler would run only after torch's wait for the next group: an agent that gives this
        # round up, too, ends a process that founds its group with SIGTERM.
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is _on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return self._join.env

    def await_end(self) -> None:
        """Wait for torchrun, if that is the launcher, to end this process, which has no group."""
        # torchrun charges a restart for a worker that ends by itself, and none for one it signals.
        by_s = time.monotonic() + ENDED_WITHIN_S
        while self.launched and heard() is None and time.monotonic() < by_s:
            with self._changed:
                self._changed.wait_for(lambda: self._socket is None, _LOOK_S)
                if self._socket is None:
                    return

    def request_peer_memory(self, budget_bytes: int | None) -> PeerMemoryReply:
        """Ask where this node keeps in-memory checkpoints; no reply in time is a refusal."""
        number = next(self._numbers)
        if not self.present:
            return PeerMemoryReply(request=number, reason="there is no zero-agent to keep them")
        request = contract.PeerMemoryRequest(request=number, budget_bytes=budget_bytes)
        answer = self._ask(request, PEER_MEMORY_TIMEOUT_S)
        if isinstance(answer, PeerMemoryReply):
            return answer
        return PeerMemoryReply(request=number, reason=str(answer))

    def _ask(
        self, request: contract.CommitRequest | contract.PeerMemoryRequest, timeout_s: float
    ) -> CommitReply | PeerMemoryReply | str:
        """The agent's reply, or why there is none."""
        number = request.request
        self._send(request)
        with self._changed:
            self._changed.wait_for(
                lambda: number in self._answers or self._socket is None, timeout_s
            )
            answer = self._answers.pop(number, None)
        if answer is not None:
            return answer
        # A commit is granted by a reply only, never by a timeout.
        if self._socket is None:
            return "the agent is gone"
        return f"the agent did not answer within {timeout_s:g} s"

    def fence(
        self,
        step: int,
        tag: str,
        samples: int,
        *,
        in_memory: bool = False,
        last: bool = False,
        written: str = "",
        root: str = "",
    ) -> Callable[[str], None] | None:
        """A function to call with a manifest's digest before publishing it; None without an agent.

        It raises CommitRefused, a fence for workers of an earlier round.

        `last`: the workers leave with this checkpoint, so it waits for etcd as long as they may.
        `written` says where its files are, if the script ends with it: it waits for etcd a while.
        `root` is where the job's checkpoints are, if this is one of those on disk.
        """
        if not self.present:
            return None

        def check(digest: str) -> None:
            patience_s = WAIT_FOR_ETCD_S if written else 0.0
            if last:
                patience_s = max(0.0, self._last_save_by_s - time.monotonic())
            request = contract.CommitRequest(
                request=next(self._numbers),
                step=step,
                tag=tag,
                digest=digest,
                samples=samples,
                in_memory=in_memory,
                patience_s=patience_s,
                round=self.round,
                written=written,
                root=root,
            )
            reply = self._ask(request, patience_s + COMMIT_TIMEOUT_S)
            if not isinstance(reply, CommitReply):  # no reply in time is a refusal
                reply = CommitReply(request=request.request, granted=False, reason=str(reply))
            if not reply.granted:
                raise CommitRefused(
                    f"checkpoint {tag} may not be published: {reply.reason}", passing=reply.passing
                )

        return check

    def close(self) -> None:
        """Close the connection; later calls do nothing."""
        self._disconnect(None)

    def _send(self, message: Message) -> None:
        with self._sending:
            if self._socket is None:
                return
            try:
                self._socket.sendall(contract.encode(message), self._flags)
                self._flags = 0
            # An agent that stands still (Ctrl-Z) loses reports, and keeps its link: it goes on.
            except BlockingIOError:
                self._flags = socket.MSG_DONTWAIT
            # A lost socket never stops training: the agent has other means to stop a worker.
            except OSError as error:
                self._disconnect(f"cannot send to the agent: {error}")

    def _read(self, connection: socket.socket) -> None:
        """The reader thread: receive the agent's messages until the connection ends."""
        reason = "the agent closed the connection"
        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    self._receive(contract.decode(line))
        except (OSError, ValueError, contract.ContractError) as error:
            reason = f"the connection to the agent failed: {error}"
        self._disconnect(reason)

    def _receive(self, message: Message) -> None:
        match message:
            # One of another round is not for this worker: its agent has begun the next one.
            case Leave(round=self.round):
                lost, now = message.when is When.LOST, message.when is When.NOW
                when = "at the end of a step" if not (lost or now) else "at once"
                _log.info("asked to leave round %d %s: %s", message.round, when, message.reason)
                if not lost:
                    self._last_save_by_s = time.monotonic() + LAST_SAVE * message.within_s
                    self._leave.set()
                self._must_end |= now
                if lost or now:
                    self.interrupt.request(message.reason)
                    self.group_lost.set()
                    hang_up_on_store()  # a save in flight may wait for it
                if now:
                    with self._changed:
                        self._changed.notify_all()
                    if self._sigterm_came:  # before the request, so it was ignored
                        os.kill(os.getpid(), signal.SIGTERM)
            case Join():
                with self._changed:
                    self._join = message
                    self._changed.notify_all()
            case CommitReply() | PeerMemoryReply():
                with self._changed:
                    self._answers[message.request] = message
                    self._changed.notify_all()
            case WaitRequest():
                self._send(_wait_reply(message.request))
            case _:
                _log.debug("not for this worker: %s", message)

    def _disconnect(self, reason: str | None) -> None:
        with self._changed:
            connection, self._socket = self._socket, None
            self._changed.notify_all()
        if connection is not None:
            with suppress(OSError):
                # It ends a read of the reader thread, which a close alone does not.
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
            if reason:
                _log.warning("%s; training continues", reason)


def _connected(path: str) -> socket.socket | None:
    try:
        connection = connect_to_agent(path)
    except OSError as error:
        _log.warning("no agent at %s (%s); training continues without it", path, error)
        return None
    # For sending only: the reader thread waits however long the agent sends nothing.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
    return connection


def _wait_reply(request: int) -> WaitReply:
    """The wait of this process, for the agent."""
    reply = WaitReply(
        request=request,
        begun=WAITS.begun,
        last=WAITS.last,
        collectives=tuple(recorded()),
    )
    longest = WAITS.longest()
    if longest is None:
        return reply
    wait, waited_s = longest
    return replace(reply, awaits=wait.what, turn=wait.turn, waited_s=round(waited_s, 3))


_link: AgentLink | None = None


def preparing(what: str, part: float | None = None) -> None:
    """See `AgentLink.preparing` of this process, if it has a link."""
    if _link is not None:
        _link.preparing(what, part)


def agent_link(rank: int) -> AgentLink:
    """The link of this process, shared by all engines of its group, until the last one is gone.

    What is made before the first engine, as by `zero.Init`, shares it, too.
    """
    global _link  # noqa: PLW0603 - it is the process that has one
    if _link is None or _link.is_over or _link.group() is not dist.group.WORLD:
        if _link is not None and not _link.clients:  # engines that a script drops do not close it
            _link.close()
        _link = AgentLink(rank)
        in_main_thread = threading.current_thread() is threading.main_thread()
        agent = _link.present and not _link.launched
        # Slurm and others signal every process of a job; the agent decides what its workers do.
        # A handler of the script's own stays.
        if agent and in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _on_sigterm)
    return _link


def note_total_steps(total_steps: int) -> None:
    """Note the steps of the whole run, for the engines that this process has."""
    if _link is not None:
        _link.total_steps = total_steps


def _on_sigterm(number: int, _frame: object) -> None:
    """Leave SIGTERM to the agent while there is one."""
    # A handler, not SIG_IGN: programs that the script executes begin with the default.
    if _link is None or not _link.handles_sigterm():
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


@contextmanager
def exit_on_peer_loss(link: AgentLink | None = None) -> Iterator[None]:
    """Under an agent, exit when a peer is lost: the agent forms the next round.

    Without a link there is no group yet, and so no rank.

    Raises:
        SystemExit: A peer is lost, and there is an agent; with the exit code of a lost peer.
        PeerLost: A peer is lost, and there is no agent, or the process goes on all the same.
    """
    try:
        yield
    except PeerLost as error:
        if link is not None:
            link.group_lost.set()
            if link.outlives:
                raise
        if not (link.present if link is not None else contract.ENV_SOCKET in os.environ):
            raise
        _log.error("leaving a broken group: %s", error)
        if link is not None and link.why_anew:
            _log.info("this process is started anew: %s", link.why_anew)
        leave_group()
        if link is not None:
            link.await_end()
        raise SystemExit(ExitCode.PEER_LOST) from error
