"""The agent's loop: observe, decide, act.

One thread owns everything here. Whatever happens elsewhere (a worker ends, the store changes, a
signal arrives) comes as an event through the inbox; after each event the loop polls the
rendezvous, asks `supervise.next_action`, and carries the answer out. So there is one place where
things happen, and any of them may happen at any time.

Must always hold: no call here waits without a limit; when the store is out of reach the workers
go on (their commits are refused) until `etcd_grace_s`; when the agent returns or dies in any
way, none of its workers is left.
"""

from __future__ import annotations

import logging
import queue
import secrets
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from zero_agent.config import AgentConfig, AgentExit, AgentFailed
from zero_agent.crew import Crew
from zero_agent.health import Status
from zero_agent.ring import Ring
from zero_agent.supervise import Action, Situation, Workers, next_action
from zero_orchestrator.clock import Clock
from zero_orchestrator.contract import CommitRequest
from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.events import Publisher
from zero_orchestrator.job_state import ENDED, Failure, Node, State
from zero_orchestrator.journal import Journal
from zero_orchestrator.kv import KeyValueStore
from zero_orchestrator.rendezvous import Rendezvous

log = logging.getLogger("zero")

TICK_S = 0.1
"""The longest the loop sleeps: the resolution of its timers."""


class Agent:
    """One node's part in one job."""

    def __init__(
        self,
        config: AgentConfig,
        job: str,
        store: KeyValueStore,
        clock: Clock,
        environ: Mapping[str, str],
    ) -> None:
        self._config = config
        self._job = job
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._scratch = tempfile.TemporaryDirectory(prefix="zero-agent-")
        log_dir = (config.log_dir or Path(self._scratch.name)) / job
        events = log_dir / f"events-{config.node_id}.jsonl" if config.log_dir else None
        incarnation = secrets.token_hex(4)
        self._publisher = Publisher(store, job, config.node_id, incarnation, clock)
        self._journal = Journal(config.node_id, events, publish=self._publisher.event)
        self._crew = Crew(
            config,
            job,
            log_dir,
            clock=clock,
            journal=self._journal,
            environ=environ,
            post=self._post,
            on_port=self._store_listens,
            on_commit=self._commit,
        )
        self._ring = Ring(config.address, self._post(self._peer_is_dead))
        self._rdzv = Rendezvous(
            store,
            job,
            config.spec,
            Node(
                id=config.node_id,
                incarnation=incarnation,
                address=config.address,
                slots=config.slots,
                ring=self._ring.address,
                role=config.role,
            ),
            clock=clock,
            journal=self._journal,
            timing=config.timing,
            lease_ttl_s=config.lease_ttl_s,
            on_change=self._post(lambda: None),
        )
        self._signal: int | None = None
        self._drain_s: float | None = None
        self._drain_code: int = AgentExit.OK
        self._outage_s: float | None = None
        self._waiting_s: float | None = None
        self._said = ""
        self._turned_s = clock.now()
        self.took_part = False
        """It saw the job before its end."""

    @property
    def ended(self) -> bool:
        """The job is over, for every node."""
        return self._rdzv.snapshot.state in ENDED

    @property
    def root_cause(self) -> Failure | None:
        """What made the job fail, from whichever node; None if no worker reported a failure."""
        causes = self._rdzv.snapshot.failures
        return min(causes, key=lambda cause: (cause.symptom, cause.revision), default=None)

    @property
    def status(self) -> Status:
        """How this agent is; may be read on any thread."""
        job, now_s, outage_s = self._rdzv.snapshot, self._clock.now(), self._outage_s
        return Status(
            job=self._job,
            node=self._config.node_id,
            round=job.n,
            state=job.state or "",
            reason=self._rdzv.reason,
            workers=self._crew.state,
            workers_round=self._crew.round,
            turned_s=now_s - self._turned_s,
            store_silent_s=None if outage_s is None else now_s - outage_s,
        )

    # ---- the loop ----

    def run(self) -> int:
        """Take part until the job ends or this node leaves it; the agent's exit code.

        Raises:
            ZeroError: The agent cannot go on; nothing of it is left running.
        """
        try:
            self._rdzv.register()
            self._ring.start(self._rdzv.node, self._rdzv.secret)
            while (code := self._turn()) is None:
                pass
            return code
        finally:
            self.close()

    def close(self) -> None:
        """Stop everything that belongs to this agent and leave the job."""
        self._crew.close()
        self._rdzv.close()
        self._ring.close()
        self._publisher.close()
        self._scratch.cleanup()

    def on_signal(self, number: int) -> None:
        """SIGTERM, SIGINT or SIGHUP: leave at the next step boundary; twice: at once.

        May be called from a signal handler.
        """
        self._inbox.put(lambda: self._signalled(number))

    def _turn(self) -> int | None:
        """One turn of the loop; the exit code when it was the last."""
        self._turned_s = self._clock.now()
        try:
            self._rdzv.poll()
            self._store_answers()
            self._ring.follow(self._rdzv.node, self._rdzv.snapshot.nodes)
            self._show()
            self._obey()
            action, reason = next_action(self._situation())
            if action is Action.EXIT:
                return self._exit_code()
            if action is not Action.WAIT:
                _ACTIONS[action](self, reason)
                return None
        except StoreUnavailable as error:
            self._store_is_silent(error)
        self._say(self._rdzv.reason)
        self._check_limits()
        self._handle_events()
        return None

    def _handle_events(self) -> None:
        """Wait for an event, then take all there are: a burst is one decision."""
        try:
            self._inbox.get(timeout=TICK_S)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _post(self, handler: Callable[..., None]) -> Callable[..., None]:
        """`handler`, to be run by the loop."""
        return lambda *args: self._inbox.put(lambda: handler(*args))

    def _situation(self) -> Situation:
        job, crew = self._rdzv.snapshot, self._crew
        return Situation(
            job=job,
            node=self._rdzv.node,
            workers=crew.state,
            round=crew.round,
            asked_to_leave=crew.asked_to_leave,
            can_leave=crew.can_leave,
            overdue=crew.overdue,
            hosting=crew.hosts_store_of(job.n),
        )

    # ---- limits ----

    def _check_limits(self) -> None:
        self._crew.check_limits()
        if self._past(self._drain_s, self._config.shutdown_timeout_s):
            raise AgentFailed(
                self._drain_code,
                f"the node could not leave within {self._config.shutdown_timeout_s:g} s "
                "(--shutdown-timeout); its workers are killed",
            )
        if self._rdzv.snapshot.state not in {None, State.FORMING}:
            self._waiting_s = None
        elif self._waiting_s is None:
            self._waiting_s = self._clock.now()
        elif self._past(self._waiting_s, self._config.join_timeout_s):
            raise AgentFailed(
                AgentExit.NO_NODES,
                f"no round began within {self._config.join_timeout_s:g} s: {self._rdzv.reason}. "
                "Start more agents, lower the minimum of --nnodes, or raise --join-timeout",
            )

    def _past(self, since_s: float | None, limit_s: float) -> bool:
        return since_s is not None and self._clock.now() - since_s > limit_s

    def _store_is_silent(self, error: StoreUnavailable) -> None:
        if self._outage_s is None:
            self._outage_s = self._clock.now()
            self._journal.tell(
                "store",
                f"etcd cannot be reached ({error}); the workers go on, nothing is committed",
                level=logging.WARNING,
            )
        if self._past(self._outage_s, self._config.etcd_grace_s):
            raise AgentFailed(
                AgentExit.NO_STORE,
                f"etcd has been out of reach for more than {self._config.etcd_grace_s:g} s "
                f"(--etcd-grace): {error}",
            )

    def _store_answers(self) -> None:
        if self._outage_s is not None:
            self._outage_s = None
            self._journal.tell("store", "etcd answers again")

    # ---- actions ----

    def _host_store(self, reason: str) -> None:
        self._crew.host_store(self._rdzv.snapshot.n)

    def _start(self, reason: str) -> None:
        self._crew.start(self._rdzv.snapshot, self._rdzv.node)

    def _kill(self, reason: str) -> None:
        hang = any(failure.hang for failure in self._rdzv.snapshot.failures)
        self._crew.kill(reason, show_stacks=hang)

    def _report_done(self, reason: str) -> None:
        self._rdzv.report_done(self._rdzv.snapshot.n)

    def _report_quiet(self, reason: str) -> None:
        self._rdzv.report_quiet(self._rdzv.snapshot.n)

    def _report_failure(self, reason: str) -> None:
        end = self._crew.first_failure
        failure = Failure(
            node=self._rdzv.node.id,
            symptom=self._crew.state is Workers.PEER_LOST,
            summary=f"{end.summary} on node {self._rdzv.node.id}",
            rank=end.rank,
            traceback=end.traceback,
            hang=self._crew.hung,
        )
        self._rdzv.report_failure(self._crew.round, failure)

    # ---- events ----

    def _store_listens(self, n: int, port: int) -> None:
        try:
            self._rdzv.publish_master(n, f"{self._config.address}:{port}")
        except StoreUnavailable as error:
            self._store_is_silent(error)
            self._inbox.put(lambda: self._store_listens(n, port))  # the loop polls in between

    def _peer_is_dead(self, node: Node) -> None:
        try:
            evicted = self._rdzv.evict(node)
        except StoreUnavailable:
            return  # its lease will say the same
        if evicted:
            self._journal.tell(
                "dead", f"the agent of node {node.id} is gone: nothing listens there"
            )

    def _commit(self, request: CommitRequest) -> tuple[bool, str]:
        """May this checkpoint be published? Only while its workers' round is the current one."""
        try:
            granted = self._rdzv.commit(
                self._crew.fence,
                step=request.step,
                tag=request.tag,
                digest=request.digest,
                samples=request.samples,
            )
        except StoreUnavailable as error:
            return False, f"etcd cannot be reached: {error}"
        return granted, "" if granted else f"round {self._crew.round} is over"

    def _show(self) -> None:
        """Note how the job and this node's workers are getting on, for those who look at it."""
        job = self._rdzv.snapshot
        self.took_part |= job.state not in ENDED
        self._journal.round = job.n
        if self._crew.progress is not None:
            nodes = len(job.members.nodes)
            self._publisher.progress(self._crew.progress, lease=self._rdzv.lease, nodes=nodes)

    def _obey(self) -> None:
        """Leave if somebody wants this node to."""
        order = self._rdzv.snapshot.drain_order(self._rdzv.node)
        if order is not None and self._drain_s is None:
            why = f"zero-ctl drain by {order.by}: leaving at the next step boundary"
            self._drain(AgentExit.DRAINED, why)

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._signal is not None:
            raise AgentFailed(128 + number, f"{name} again: the workers are killed")
        self._signal = number
        why = f"{name}: leaving at the next step boundary; once more to leave at once"
        try:
            self._drain(128 + number, why)
        except StoreUnavailable as error:
            raise AgentFailed(128 + number, f"{name} while etcd is away: {error}") from error

    def _drain(self, code: int, why: str) -> None:
        """Leave at the next step boundary and exit with `code`, unless that has begun already."""
        if self._drain_s is None:
            revision = self._rdzv.drain()
            self._drain_s, self._drain_code = self._clock.now(), code
            self._journal.tell("drain", why, revision=revision)
        else:
            self._journal.tell("drain", why)

    # ---- the end ----

    def _exit_code(self) -> int:
        job = self._rdzv.snapshot
        if job.state is State.FAILED:
            self._show_root_cause()
            return AgentExit.JOB_FAILED
        if job.state is State.DONE:
            self._journal.tell("done", f"job {self._job} is done")
            return AgentExit.OK
        if job.state is State.STOPPED:
            text = f"job {self._job} has been stopped: {job.cause}"
            self._journal.tell("stopped", f"{text}; to run it again, give another --rdzv-id")
            return AgentExit.STOPPED
        self._journal.tell("drained", f"node {self._rdzv.node.id} has left the job")
        return self._drain_code

    def _show_root_cause(self) -> None:
        job = self._rdzv.snapshot
        self._journal.tell(
            "failed", f"job {self._job} has failed: {job.cause}", level=logging.ERROR
        )
        if (cause := self.root_cause) and cause.traceback:
            log.error("%s\n%s", cause.summary, cause.traceback.rstrip())

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            log.info("%s", reason)


_ACTIONS: Mapping[Action, Callable[[Agent, str], None]] = {
    Action.HOST_STORE: Agent._host_store,
    Action.START: Agent._start,
    Action.ASK_TO_LEAVE: lambda agent, reason: agent._crew.ask_to_leave(reason),
    Action.STOP: lambda agent, reason: agent._crew.stop(reason),
    Action.KILL: Agent._kill,
    Action.REPORT_DONE: Agent._report_done,
    Action.REPORT_QUIET: Agent._report_quiet,
    Action.REPORT_FAILURE: Agent._report_failure,
}
