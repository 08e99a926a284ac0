"""A node's workers of the current round, and the processes and sockets that they need.

Owns the forkserver that forks workers, the sockets and pipes that connect them to the agent, and
the TCPStore of a round whose first node this is. It carries out the agent's actions: every method
returns at once, and events of processes arrive through `post`, on the agent's thread.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_agent.errors import AgentFailed
from zero_agent.loop.config import AgentConfig
from zero_agent.loop.store_writes import Reply
from zero_agent.node.installed import Installed
from zero_agent.node.leave_request import LeaveRequests
from zero_agent.node.network import interface_of
from zero_agent.node.state import BUSY, WAITING, Workers
from zero_agent.workers.environment import ENV_TIMER_FILE, Orders, forkserver_env, timer_file
from zero_agent.workers.exits import describe
from zero_agent.workers.forkserver_client import ForkserverClient
from zero_agent.workers.group import WorkerGroup
from zero_agent.workers.hang import Elsewhere
from zero_agent.workers.output.recent import RecentOutput
from zero_agent.workers.output.tap import FILES, PAUSE_S
from zero_agent.workers.progress import Steps, load_in_words
from zero_agent.workers.stacks import is_stopped
from zero_agent.workers.world_size import WorldSize
from zero_contract.channel import Channel, WaitReplies
from zero_contract.clock import Clock, Stopwatch
from zero_contract.exit_codes import AgentExit
from zero_contract.hub import Hub
from zero_contract.journal import Journal
from zero_contract.signing import Key, Secret
from zero_contract.worker import (
    Ability,
    CommitReply,
    CommitRequest,
    Hello,
    Join,
    Leave,
    Left,
    Message,
    PeerMemoryReply,
    PeerMemoryRequest,
    Preparing,
    Progress,
    RankTimes,
    Restored,
    Saved,
    SaveWaits,
    WaitReply,
    WaitRequest,
    When,
)
from zero_contract.writer import LONGEST_FLUSH_S
from zero_orchestrator.membership.job_state import Node, Snapshot

log = logging.getLogger("zero")

_AT_BOUNDARY = (
    "the workers leave at the next step boundary, or, if only the script can save, with its next "
    "save"
)
_BY_ITSELF = "the script is asked to save and leave (zero_agent.should_leave)"
SOCKET = "agent.sock"
PARK_S = 10.0
"""Time for workers to leave a group that is lost, before they are killed: a wait for a peer ends at
once, and a long computation before the next exchange counts as well."""
WARM_UPS = 3
"""Kills in a row of workers that warm up, after which they are started for a round alone."""
STACKS_S = 0.5
"""Pause between the request for stacks and the kill; a recovery waits for it."""

Post = Callable[[Callable[..., None]], Callable[..., None]]
"""Wraps a handler so that it runs on the agent's thread."""


@dataclass(frozen=True, kw_only=True)
class Handlers:
    """What the agent does about its workers; called on the agent's thread."""

    on_port: Callable[[int, int], None]
    """Receives a round and the port of the TCPStore opened for it."""
    on_commit: Callable[[int, int, CommitRequest, Reply], None]
    """Receives the round, its fence, a worker's request to publish a checkpoint, and the function
    that replies to it."""
    on_peer_memory: Callable[[PeerMemoryRequest], PeerMemoryReply]
    """Replies to a worker that asks for memory for its checkpoints."""
    on_times: Callable[[RankTimes], None]
    """Receives the times of all ranks, if rank 0 is here."""
    why_stuck: Callable[[], str]
    """Returns who is waited for, if that is known and no rank takes a step."""


class NodeWorkers:
    """This node's workers; nothing runs before `start`."""

    _leave: Leave | None = None
    """What the workers were asked last; who announces itself later is asked then."""

    def __init__(
        self,
        config: AgentConfig,
        job: str,
        scratch: Path,
        *,
        clock: Clock,
        journal: Journal,
        environ: Mapping[str, str],
        post: Post,
        handlers: Handlers,
    ) -> None:
        """Start the forkserver, so that its imports overlap with the rendezvous.

        `scratch` has the socket, and without a log directory the workers' error files as well.
        """
        self._config = config
        self._clock = clock
        self._journal = journal
        self._post = post
        self._handlers = handlers
        self.steps = Steps(config.hang, clock)
        self.steps.ask = lambda rank: self._channel.send(rank, WaitRequest(request=0))
        self.steps.is_stopped = lambda rank: any(
            is_stopped(one.pid) for one in self.group.processes if one.rank == rank
        )
        self.recent = RecentOutput()
        """The last output of the workers; may be read on any thread."""
        self._env = forkserver_env(environ, config.slots, interface_of(config.address))
        self._hub = Hub()
        self._channel = Channel(self._hub, scratch / SOCKET, post(self._on_message))
        self._timers = timer_file(environ, scratch / "timers")
        self._timer_host: int | None = None
        if self._timers is not None:
            self._env[ENV_TIMER_FILE] = str(self._timers)
        self._installed = Installed()
        log_dir = config.log_dir or scratch / "logs"
        self._orders = Orders(
            job,
            log_dir,
            self._env,
            self._channel.path,
            streams=config.streams,
            cpus=config.cpus,
            virtual_local_rank=config.virtual_local_rank,
            # NAT need not lead back from behind itself.
            store_host=config.address if config.advertised else "",
        )
        self._word: tuple[int, Key] | None = None
        self._directory: Path | None = None
        """The directory of the last round's files."""
        self._forkserver = self._open_forkserver()
        self._imports_lost = False
        """Whether the forkserver before this one was killed while it imported."""
        self.group = self._new_group(0, 0)
        """The workers of the last round."""
        self._stopped_s: float | None = None
        """When the last of its workers has ended, or left it; the wall clock."""
        self._can_leave, self._can_stay = set[int](), set[int]()
        self.stays = False
        """Whether the workers stay from round to round, as they have said last."""
        self._world_size = WorldSize(clock)
        self._askings = LeaveRequests({})
        self._asked, self._released, self._stopping, self._dying, self._warming = (
            Stopwatch(clock) for _ in range(5)
        )
        """Since the workers were asked to leave, to leave a lost group, to stop, and to write their
        stacks before a kill; and since they warm up."""
        self._waits = False
        """Whether a worker is late, and waits for one that hangs."""
        self._killed_early = 0
        """How often in a row workers were killed that had no round yet."""
        self.cold = False
        """Whether workers are started for a round alone, since they cannot warm up."""
        self._wait_replies = WaitReplies()
        self._stores: dict[int, int] = {}
        """TCPStores hosted here: id of the process -> the fence of its round."""
        self._listening: set[int] = set()
        """The ids of those TCPStores that have a port."""

    # ---- the state ----

    @property
    def prepared(self) -> bool:
        """Whether workers can be started at once: what they need has been imported."""
        return self._forkserver.ready

    @property
    def asked_to_leave(self) -> bool:
        """Whether the workers were asked to leave."""
        return self._asked.running

    @property
    def can_leave(self) -> bool:
        """Whether every worker can save and leave when asked: its engine, or its script."""
        ranks = self.group.ranks
        return all(rank in self._can_leave or self._askings.listens(rank) for rank in ranks)

    @property
    def can_stay(self) -> bool:
        """Whether a worker may wait for the next round where a peer is lost, and has time left."""
        some = any(rank in self._can_stay for rank in self.group.ranks)
        return some and not self._released.past(PARK_S)

    @property
    def released(self) -> bool:
        """Whether the workers were told that their group is lost."""
        return self._released.running

    @property
    def overdue(self) -> bool:
        """Whether the workers have not left in time after they were asked to."""
        return self._asked.past(self._config.boundary_timeout_s)

    def waits(self, within_s: float) -> dict[int, dict[str, Any]]:
        """Ask each worker what it waits for; must not be called on the agent's own thread."""
        ranks = {one.rank for one in self.group.processes}

        def ask(number: int) -> None:
            for rank in ranks:
                self._channel.send(rank, WaitRequest(request=number))

        return self._wait_replies.collect(ranks, self._post(ask), within_s)

    def hosts_store_of(self, fence: int) -> bool:
        """Whether the TCPStore of the round of this fence is, or is about to be, on this node."""
        return fence in self._stores.values()

    # ---- actions ----

    def leave_word(self, listener: int, key: Key) -> None:
        """Give the forkserver what it needs to prove this agent's death to its ring neighbour."""
        self._word = listener, key
        self._pass_word()

    def _pass_word(self) -> None:
        if self._word is not None and self._forkserver.ready:
            self._forkserver.keep_word(self._config.node_id, *self._word)

    def host_store(self, fence: int) -> None:
        """Open a TCPStore for a round; `on_port` receives the fence, and the port that it has."""
        config = self._config
        store = self._forkserver.host_store(config.store_listens_on, config.store_ports)
        self._stores[store] = fence

    def warm_up(self, job: Snapshot, node: Node, secret: Secret) -> None:
        """Start workers that run the script to its engine, and wait there for a round."""
        self._forget()
        self._warming.start()
        self._channel.hang_up()  # no late message of the last workers counts as one of these
        self.group = self._new_group(0, 0)
        orders = self._orders.of(job.warming_up(node), node, secret)
        self.group.start(self._config.program, orders)
        self._journal.tell("warm up", "the workers warm up before they take part in a round")

    def _forget(self) -> None:
        """Drop what the last workers have said, and what they were asked."""
        self._can_leave.clear()
        self._can_stay.clear()
        self._waits, self._leave = False, None
        for since in (self._asked, self._released, self._stopping, self._dying):
            since.stop()

    def start(self, job: Snapshot, node: Node, secret: Secret) -> None:
        """Start the workers of the job's round on this node, given the job's secret."""
        self._forget()
        self._warming.stop()
        # The workers of rounds before have gone, so nobody uses their stores any more.
        for store, fence in list(self._stores.items()):
            if fence != job.fence:
                del self._stores[store]
                self._forkserver.signal(store, signal.SIGKILL)
        former, self.group = self.group, self._new_group(job.n, job.fence)
        # A new one in each round: torch's timer server ends when it has ended a worker.
        if self._timers is not None:
            if self._timer_host is not None:
                self._forkserver.signal(self._timer_host, signal.SIGKILL)
            self._timer_host = self._forkserver.host_timers(str(self._timers))
        lease_s = job.members.leases_end_s
        elsewhere = Elsewhere(
            world_size=job.members.world_size,
            lease_s=lease_s,
            patience_s=max(self._config.timing.symptom_patience_s, lease_s),
        )
        self._world_size.begin(job.members.world_size, tells=job.members.index(node) == 0)
        self._askings = LeaveRequests(self._orders.askings(job, node))
        orders = self._orders.of(job, node, secret)
        directory = self._orders.directory(job)
        if self._config.log_dir is not None and directory != self._directory:
            self._journal.tell("logs", f"the workers' output is kept in {directory}")
        self._directory = directory
        stay = self.group.take_over(former, orders)
        # Those that have only warmed up have no state yet, so their first step has no limit.
        stayed = [order.rank for order in stay.values()] if former.round else []
        self.steps.begin(self._orders.heartbeats(job, node), elsewhere, stayed)
        joins = {rank: Join(round=job.n, env=order.env) for rank, order in stay.items()}
        # Who stays connects again, under the rank of this round.
        self._channel.hang_up(joins)
        of_all = set(self.group.ranks)
        self.group.start(self._config.program, [o for o in orders if o.rank not in of_all])
        how = "in the same process" if former.round else "have warmed up"
        same = f"; {len(stay)} of {len(orders)} {how}" if stay else ""
        self._journal.tell(
            "start",
            f"round {job.n}: this node runs rank {', '.join(str(o.rank) for o in orders)} "
            f"of {job.members.world_size}{same}",
            round=job.n,
            world_size=job.members.world_size,
            stay=len(stay) if former.round else 0,
            stopped_s=self._stopped_s if former.round else None,
        )

    def ask_to_leave(self, reason: str, within_s: float) -> None:
        """Ask the workers to save and leave at their next step boundary, within `within_s`."""
        self._asked.start()
        within_s = min(within_s, self._config.boundary_timeout_s)
        self._ask(self._can_leave, When.BOUNDARY, reason, within_s)
        how = _BY_ITSELF if self._askings.ask() else _AT_BOUNDARY
        self._journal.tell("leave", f"{reason}: {how}, within {within_s:.0f} s")

    def release(self, reason: str) -> None:
        """Have the workers leave a group that is lost; who cannot wait for the next one exits."""
        self._released.start()
        self._ask(self._can_stay, When.LOST, reason)

    def _ask(self, ranks: set[int], when: When, reason: str, within_s: float = 0.0) -> None:
        self._leave = Leave(round=self.group.round, when=when, reason=reason, within_s=within_s)
        for rank in ranks:
            self._channel.send(rank, self._leave)

    def stop(self, reason: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Send this signal now, and SIGKILL once the shutdown timeout since the first is over."""
        self._stopping.start()
        if self.group.state in WAITING:  # they exit by themselves, as who leaves does
            self._channel.hang_up()
            self.group.stop(0)
            self._journal.tell("stop", reason, round=self.group.round)
            return
        self._ask(self._can_leave, When.NOW, reason)  # until then they ignore SIGTERM
        self._end(number, reason)

    def pass_on(self, number: signal.Signals) -> None:
        """Forward a signal of the agent to workers that cannot stop at a step boundary."""
        if self.group.state in BUSY and not self.can_leave:
            self.stop(f"{number.name} is passed on to the workers", number)

    def kill(self, reason: str, *, show_stacks: bool = False) -> None:
        """Send SIGKILL to all workers; on request after they have written their stacks."""
        # Those that waited have written them: now they may be on the way out.
        if not show_stacks or self._waits:
            self._end(signal.SIGKILL, reason)
            return
        self._dying.start()  # `check_limits` kills them
        self._show_stacks(reason)
        self.group.stop(0)

    def _show_stacks(self, reason: str) -> None:
        self.group.show_stacks()
        self._journal.tell("stacks", f"{reason}: the workers' stacks are in {self._directory}")

    def check_limits(self, *, etcd_answers: bool = True) -> None:
        """Kill workers that hang, or were asked to stop too long ago, and a stuck forkserver."""
        if self._stopping.past(self._config.shutdown_timeout_s):
            self._stopping.stop()
            self.kill("the workers did not stop in time")
        if self._dying.past(STACKS_S):
            self._dying.stop()
            self.group.stop(signal.SIGKILL)
        if self._warming.past(self._config.join_timeout_s):
            raise AgentFailed(
                AgentExit.UNHEALTHY,
                f"the workers of node {self._config.node_id} have not come to their engine within "
                f"{self._config.join_timeout_s:g} s (--join-timeout): the job goes on without this "
                "node. Their output says how far they came; `zero-ctl stack` shows where they are",
            )
        # A worker that has taken no step for too long makes the whole group fail.
        if self.group.state is Workers.RUNNING and not self.released:
            hung = self.steps.too_slow(etcd_answers=etcd_answers)
            if hung is not None and hung.rank is not None:
                self._end_hung(hung.rank, hung.reason)
            elif hung is not None and not self._waits:
                self._show_stacks(hung.reason)  # it may end with the one that it waits for
            self._waits = hung is not None
        if self.group.state in (Workers.RUNNING, Workers.SUCCEEDED):
            done = self.group.state is Workers.SUCCEEDED
            if text := self._world_size.warning(done=done):
                self._journal.tell("world size", text, level=logging.WARNING)
        # A forkserver that is stuck would keep its workers, and the whole job, for ever. The limit
        # is no shorter than by default: torchrun's "timeout" of --rdzv-conf is about nodes alone.
        imports_s = max(self._config.join_timeout_s, AgentConfig.join_timeout_s)
        unresponsive_s = self._forkserver.stuck_s(imports_s)
        if unresponsive_s is not None:
            text = f"the forkserver has not answered for {unresponsive_s:.0f} s: it is killed"
            text += ", and the workers with it"
            self._journal.tell("forkserver", text, level=logging.WARNING)
            self._forkserver.kill()

    def _end_hung(self, rank: int, verdict: str) -> None:
        if why := self._handlers.why_stuck():
            verdict = f"{verdict}; {why}"
        self._dying.start()
        self.group.mark_hung(rank, verdict)
        pid, text = self.group.first_failure.pid, f"rank {rank}: {verdict}"
        self._journal.tell("hang", text, level=logging.WARNING, rank=rank, pid=pid)

    def close(self) -> None:
        """End every process of this node."""
        self._forkserver.close()  # the workers die with it
        deadline_s = time.monotonic() + LONGEST_FLUSH_S
        while self._hub.pauses and time.monotonic() < deadline_s:
            time.sleep(PAUSE_S)  # their last output waits for a slow reader
        self._channel.close()
        self._hub.close()
        FILES.flush()

    def _end(self, number: signal.Signals, reason: str) -> None:
        self._journal.tell("stop", reason, round=self.group.round, signal=number.name)
        self.group.stop(number)

    # ---- events ----

    def _new_group(self, n: int, fence: int) -> WorkerGroup:
        return WorkerGroup(
            self._forkserver, self._hub, n, fence=fence, clock=self._clock, recent=self.recent
        )

    def _open_forkserver(self) -> ForkserverClient:
        news = self._post(self._on_news)
        return ForkserverClient(self._hub, self._env, self._config.preload, news, self._clock)

    def _on_news(self, forkserver: ForkserverClient, news: dict[str, Any]) -> None:
        """Handle a message of the forkserver."""
        if forkserver is not self._forkserver:  # news of the one before it, which is gone
            return
        if "gone" in news:
            self._forkserver_is_gone()
        elif "ready" in news:
            self._pass_word()
        elif "left_out" in news:
            module = news["left_out"]
            text = f"{news['why']}: each worker imports {module} itself, at every start"
            self._journal.tell("forkserver", text, level=logging.WARNING, left_out=module)
        elif "port" in news and news["id"] in self._stores:
            self._listening.add(news["id"])
            self._handlers.on_port(self._stores[news["id"]], news["port"])
        elif "pid" in news:
            pid = news["pid"]
            if (rank := self.group.runs_as(news["id"], pid)) is not None:
                text = f"rank {rank} runs as process {pid}"
                self._journal.tell("worker", text, level=logging.DEBUG, rank=rank, pid=pid)
        elif "status" in news:
            self._process_ended(news["id"], news["status"])

    def _process_ended(self, process: int, status: int) -> None:
        # A negative status is a signal's: a store is killed here after its round.
        if process in self._stores and process not in self._listening and status > 0:
            raise AgentFailed(
                AgentExit.UNHEALTHY,
                f"the workers' store cannot listen on {self._config.store_listens_on}; the message "
                "of torch's TCPStore is above",
            )
        if self._stores.pop(process, 0) == self.group.fence and self.group.state is Workers.RUNNING:
            self.group.store_ended(status)
            self._journal.tell("exit", self.group.first_failure.summary, round=self.group.round)
        end = self.group.ended(process, status)
        if end is None:
            return
        self._stopped_s = time.time()
        self.steps.ended(end.rank)
        if self.group.round and end.status != 0 and not end.wanted:
            facts = {"symptom": True} if end.symptom else {}
            self._journal.tell(
                "exit", end.summary, round=self.group.round, rank=end.rank, pid=end.pid, **facts
            )
        elif not self.group.round and not end.wanted:
            # Each attempt has its own time, and a spare that is cold makes none any more.
            self._warming.stop()
            # A kill need not repeat. What the script does would: it cannot warm up, for example,
            # if it makes a process group before its engine.
            self._killed_early += 1
            self.cold = end.status >= 0 or self._killed_early >= WARM_UPS
            then = "from now on workers start with their round" if self.cold else "they start again"
            text = f"{end.summary}, before the workers had a round; {then}"
            self._journal.tell("warm up", text, level=logging.WARNING, rank=end.rank, pid=end.pid)

    def _forkserver_is_gone(self) -> None:
        status = self._forkserver.close()
        imports = not self._forkserver.ready
        # An import that failed with a message would fail again. A kill (the OOM killer's, for
        # example) need not repeat.
        if imports and (status > 0 or self._imports_lost):
            how = "; its own message is above" if status > 0 else f": {describe(status)}"
            raise AgentFailed(
                AgentExit.UNHEALTHY,
                "the process that starts the workers ended while it imported "
                f"{', '.join(self._config.preload)}{how}",
            )
        self._imports_lost = imports
        text = f"the forkserver is gone: {describe(status)}"
        self._journal.tell("forkserver", text, level=logging.WARNING)
        # All its children died with it: workers, stores, and torch's timer server.
        self.group.orphaned()
        self._stores.clear()
        self._timer_host = None
        if path := self._installed.changed:
            raise AgentFailed(
                AgentExit.UNHEALTHY,
                f"{path} has changed since this agent began, and an agent starts no process of "
                "another version than its own; start the agent again",
            )
        self._forkserver = self._open_forkserver()

    def _on_message(self, rank: int, message: Message) -> None:
        """Handle a message of a worker."""
        match message:
            case Hello() | CommitRequest() if message.round not in (0, self.group.round):
                # The worker is gone: a reply would reach nobody, and the fence is another round's.
                log.debug("rank %d of round %d, which is over: %s", rank, message.round, message)
            case Hello() if Ability.BOUNDARY in message.can:
                self._world_size.announced()
                # Its hello may cross with the request: then it ignores the SIGTERM.
                if self._leave is not None and rank not in self._can_leave:
                    self._channel.send(rank, self._leave)
                self._can_leave.add(rank)
                # A worker announces all that it can, and again when that changes.
                if Ability.REJOIN in message.can:
                    self._can_stay.add(rank)
                    self.stays = True
                elif rank in self._can_stay:  # its script has done what a newcomer does not do
                    self._can_stay.remove(rank)
                    self.stays = False
                self.steps.promise()
            case CommitRequest():
                request = message.request
                self._handlers.on_commit(
                    self.group.round,
                    self.group.fence,
                    message,
                    lambda granted, reason, passing: self._channel.send(
                        rank,
                        CommitReply(
                            request=request, granted=granted, reason=reason, passing=passing
                        ),
                    ),
                )
            case PeerMemoryRequest():
                self._channel.send(rank, self._handlers.on_peer_memory(message))
            case Restored():
                self._journal.tell(
                    "restore",
                    load_in_words(message, begun=self.steps.begun),
                    step=message.step,
                    tag=message.tag,
                    in_memory=message.in_memory,
                    load_s=message.load_s,
                    read_bytes=message.read_bytes,
                )
                self.steps.restored(rank, message)
            case RankTimes():
                self._handlers.on_times(message)
            case _:
                self._on_report(rank, message)

    def _on_report(self, rank: int, message: Message) -> None:
        """Handle a message in which a worker says what it does, and asks for nothing."""
        match message:
            case Left():
                if message.round:  # else it has warmed up, and has had no step
                    what = f"lost a peer after step {message.step}: {message.lost}"
                    how = what if message.lost else f"left at step {message.step}"
                    self._journal.tell("left", f"rank {rank} {how}")
                if message.stays and message.round == self.group.round:
                    self._stopped_s = time.time()
                    self.group.park(rank, message.lost)
                    self.steps.ended(rank)
                if self.group.state is Workers.READY:  # it was the last one
                    self._warming.stop()
                    self._killed_early = 0
                    self._journal.tell("warm up", "the workers have warmed up: they can join")
            case Progress():
                self.steps.beat(rank, message)
                log.debug("rank %d: step %d, loss %s", rank, message.step, message.loss)
            case WaitReply():
                self._wait_replies.add(rank, message)
                self.steps.answered(rank, message)
            case Saved():
                self.steps.saved(rank, message)
            case SaveWaits():
                self.steps.on_saved(rank, message)
            case Preparing():
                self.steps.prepares(rank, message)
            case _:
                pass
