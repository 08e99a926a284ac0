"""The agent's loop: observe, decide, act.

One thread owns everything here. Whatever happens elsewhere (a worker ends, the store changes, a
signal arrives) comes as an event through the inbox; after each event the loop polls the
rendezvous, asks `supervise.next_action`, and carries the answer out. So there is one place where
things happen, and any of them may happen at any time.

Events are handled also while the loop waits for etcd (`PumpedStore`). So a handler only notes
what has happened, or acts on this node; what it wants of etcd is an errand for the next turn.

Must always hold: no call here waits without a limit; when the store is out of reach the workers
go on (their commits are refused) until `etcd_grace_s`; a store that is full is waited for; when the
agent returns or dies in any way, none of its workers is left.
"""

from __future__ import annotations

import logging
import queue
import secrets
import signal
from collections.abc import Callable, Mapping

from zero_agent.errors import AgentFailed
from zero_agent.loop.config import AgentConfig
from zero_agent.loop.leaving import Leaving, failure_of, root_cause, tell_end, tell_traceback
from zero_agent.loop.limits import STORE_FAILS, Limits, pause_when_full_s
from zero_agent.loop.node_workers import NodeWorkers
from zero_agent.loop.pumped_store import PumpedStore
from zero_agent.loop.saying import Sayings
from zero_agent.loop.store_writes import StoreWrites
from zero_agent.loop.supervise import Action, Situation, next_action
from zero_agent.loop.suspects import Suspects
from zero_agent.node.health_checks import HealthChecks
from zero_agent.node.health_endpoint import STALLED_S, Status
from zero_agent.node.memory import Ram
from zero_agent.node.ring import Ring
from zero_agent.node.scratch import Scratch
from zero_agent.node.state import BUSY, Workers
from zero_contract.clock import Clock
from zero_contract.exit_codes import AgentExit
from zero_contract.journal import Journal
from zero_orchestrator.ctl.events import Publisher
from zero_orchestrator.errors import StoreFull, StoreUnavailable
from zero_orchestrator.membership.job_state import ENDED, Failure, Node, State
from zero_orchestrator.membership.moves import Move
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.store.kv import KeyValueStore

log = logging.getLogger("zero")

TICK_S = 0.1
"""The longest the loop sleeps: the resolution of its timers."""
SAID_BY_ALL = frozenset({Move.INTERRUPT, Move.FAIL, Move.GIVE_UP})
"""Moves whose cause every agent says, and not the one that made it alone."""


class Agent:
    """One node's part in one job."""

    def __init__(
        self,
        config: AgentConfig,
        job: str,
        store: KeyValueStore,
        clock: Clock,
        environ: Mapping[str, str],
        *,
        telemetry: KeyValueStore,
    ) -> None:
        """Nothing is written before `run`.

        Args:
            config: What it was asked to do.
            job: The job's name.
            store: Where the job is.
            clock: Measures its limits.
            environ: The environment that workers inherit.
            telemetry: The same store, for events and progress: they are many, and must not keep the
                others waiting.
        """
        self._config = config
        self._job = job
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._turned_s = clock.now()
        self._scratch = Scratch("zero-agent-")
        events = config.log_dir and config.log_dir / job / f"events-{config.node_id}.jsonl"
        incarnation = secrets.token_hex(4)
        self._publisher = Publisher(telemetry, job, config.node_id, incarnation, clock)
        self._journal = Journal(
            config.node_id, events, publish=self._publisher.event, unsaid=SAID_BY_ALL
        )
        self._limits = Limits(config, clock, self._journal)
        self._suspects = Suspects(self._journal, clock)
        self._errands = StoreWrites(self._journal, clock, self._limits.store_fails)
        self._crew = NodeWorkers(
            config,
            job,
            self._scratch.path,
            clock=clock,
            journal=self._journal,
            environ=environ,
            post=self._post,
            on_port=lambda n, port: self._errands.master(n, config.where_store_is(port)),
            on_commit=self._errands.commit,
            on_ram=lambda request: self._ram.open(request, self._rdzv.secret),
        )
        self._ram = Ram(
            job,
            config.host or config.node_id,
            config.address,
            limit_bytes=config.ram_budget_bytes,
            ports=config.ports,
            advertised=config.advertised,
        )
        self._ring = _ring(config, self._post(self._suspects.add))
        self._store = PumpedStore(store, self._meanwhile, self._post(lambda: None))
        self._rdzv = Rendezvous(
            self._store,
            job,
            config.spec,
            config.node(incarnation, self._ring.port),
            clock=clock,
            journal=self._journal,
            timing=config.timing,
            lease_ttl_s=config.lease_ttl_s,
            on_change=self._post(lambda: None),
            works=lambda: clock.now() - self._turned_s < STALLED_S,
        )
        self._leaving = Leaving(self._rdzv, self._journal, clock, config.shutdown_timeout_s)
        self._fitness = HealthChecks(
            config.surroundings(environ),
            config.join_timeout_s,
            max_nodes=config.spec.max_nodes,
            clock=clock,
            journal=self._journal,
            post=self._post,
        )
        self._sayings = Sayings(clock)
        self._over = 0
        self.took_part = False
        """It saw the job before its end."""

    @property
    def ended(self) -> bool:
        """The job is over, for every node."""
        return self._rdzv.snapshot.state in ENDED

    @property
    def root_cause(self) -> Failure | None:
        """What made the job fail, from whichever node; None if no worker reported a failure."""
        return root_cause(self._rdzv.snapshot)

    @property
    def status(self) -> Status:
        """How this agent is; may be read on any thread."""
        job = self._rdzv.snapshot
        return Status(
            job=self._job,
            node=self._config.node_id,
            round=job.n,
            state=job.state or "",
            reason=self._rdzv.reason,
            workers=self._crew.state,
            workers_round=self._crew.round,
            turned_s=self._clock.now() - self._turned_s,
            store_silent_s=self._limits.store_silent_s,
        )

    # ---- the loop ----

    def run(self) -> int:
        """Take part until the job ends or this node leaves it; the agent's exit code.

        Raises:
            ZeroError: The agent cannot go on; nothing of it is left running.
        """
        if self._config.preload:
            log.info("starting: importing %s", ", ".join(self._config.preload))
        try:
            while not self._joined():
                self._handle_events()
            self._ring.start(self._rdzv.node, self._rdzv.secret)
            self._crew.leave_word(self._ring.listener, self._rdzv.secret)
            while (code := self._turn()) is None:
                pass
            return code
        finally:
            self.close()

    def close(self) -> None:
        """Stop everything that belongs to this agent and leave the job.

        What goes wrong in that neither keeps the rest from being stopped nor hides why it ends.
        """
        self._store.leave_alone()
        parts = (self._crew, self._ram, self._rdzv, self._ring, self._publisher)
        for part in (*parts, self._journal, self._scratch):
            try:
                part.close()
            except Exception:
                log.exception("zero-agent: internal error in %s", part.close)

    def on_signal(self, number: int) -> None:
        """One of --signals-to-handle: leave at the next step boundary; the same twice: at once.

        May be called from a signal handler.
        """
        self._inbox.put(lambda: self._signalled(signal.Signals(number)))

    def _signalled(self, number: signal.Signals) -> None:
        self._leaving.signalled(number)
        self._crew.pass_on(number)

    def _joined(self) -> bool:
        """Become a node of the job, unless etcd is out of reach just now."""
        self._turned_s = self._clock.now()
        try:
            self._prepare()
            self._leaving.obey(None)
            self._rdzv.register()
        except StoreUnavailable as error:
            self._limits.store_fails(error)
            self._leaving.check_limit()
            return False
        self._limits.store_answers(self._rdzv.snapshot.fence)
        return True

    def _prepare(self) -> None:
        """No round but the first stops, or waits, for a node that could not start workers at once.

        In the first round all nodes import at the same time, and whoever registers is waited for.
        """
        if not self._rdzv.has_begun():
            return
        while not (self._crew.prepared or self._leaving.begun):
            self._turned_s = self._clock.now()
            self._limits.check_waiting(self._rdzv.snapshot, "the workers' imports are not done")
            self._handle_events()

    def _turn(self) -> int | None:
        """One turn of the loop; the exit code when it was the last."""
        self._turned_s = self._clock.now()
        try:
            self._errands.run(self._rdzv, self._crew.fence if self._crew.state in BUSY else 0)
            self._suspects.run(self._rdzv)
            self._rdzv.poll()
            self._ring.follow(self._rdzv.node, self._rdzv.snapshot.nodes)
            # Publish the progress of the job and of this node's workers.
            job = self._rdzv.snapshot
            self.took_part |= job.state not in ENDED
            self._journal.round, self._journal.nodes = job.n, len(job.members.nodes)
            self._publisher.alive(nodes=len(job.members.nodes))
            if self._crew.steps.begun:
                self._rdzv.stepped(self._crew.round)
            if (last := self._crew.steps.last) is not None:
                nodes = len(job.members.nodes)
                lease, use = self._rdzv.lease, self._ram.use
                self._publisher.progress(last, lease=lease, nodes=nodes, ram=use)
            # Before this node says that it is quiet, the others know whether it is fit.
            if not self._fitness.checking and self._fitness.complaint != self._rdzv.node.unfit:
                self._rdzv.set_unfit(self._fitness.complaint)
            stopping = self._crew.state is Workers.STOPPING
            self._leaving.obey(self._rdzv.snapshot.drain_order(self._rdzv.node), stopping=stopping)
            action, reason = next_action(self._situation())
            if action is Action.EXIT:
                return tell_end(
                    self._job,
                    self._rdzv,
                    self._journal,
                    left=self._leaving.code,
                    stopped=self._config.stop_exit_code,
                    named=self._config.job is not None,
                )
            if action is not Action.WAIT:
                _ACTIONS[action](self, reason)
            self._limits.store_answers(self._rdzv.snapshot.fence)
            self._say_over()
            if action is not Action.WAIT:
                return None
        except STORE_FAILS as error:
            self._limits.store_fails(error)
            if isinstance(error, StoreFull):
                self._rest(pause_when_full_s(len(self._rdzv.snapshot.nodes)))
        if not self.ended:  # how it ended is said when the workers are gone
            self._say(self._rdzv.reason)
        self._crew.check_limits()
        self._leaving.check_limit()
        alone = len(self._rdzv.snapshot.nodes) <= 1 and not self._ram.is_open
        self._fitness.check_limit(needed=not alone)
        self._limits.check_waiting(self._rdzv.snapshot, self._rdzv.reason, self._rdzv.confirm)
        self._handle_events()
        return None

    def _rest(self, seconds: float) -> None:
        """Ask nothing of etcd for a while."""
        until_s = self._clock.now() + seconds
        while self._clock.now() < until_s:
            self._meanwhile()

    def _meanwhile(self) -> None:
        """While a call to etcd is under way."""
        self._turned_s = self._clock.now()
        self._crew.check_limits()
        self._leaving.check_limit()
        self._handle_events()

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
            unkillable=crew.unkillable,
            checking=self._fitness.checking,
            hosting=crew.hosts_store_of(job.n),
        )

    # ---- actions ----

    def _start(self, reason: str) -> None:
        self._crew.start(self._rdzv.snapshot, self._rdzv.node, self._rdzv.secret)

    def _kill(self, reason: str) -> None:
        hang = any(failure.hang for failure in self._rdzv.snapshot.failures)
        self._crew.kill(reason, show_stacks=hang)

    def _abandon(self, reason: str) -> None:
        """Leave first: others go on at once, and what is left here can publish nothing any more."""
        self._journal.tell("unkillable", f"{reason}; this node leaves", level=logging.ERROR)
        self._rdzv.close()
        raise AgentFailed(
            AgentExit.UNFIT,
            f"this node has left the job, which goes on without it: {reason}. What holds such a "
            "process (a device, a file server, a frozen cgroup, a tracer) must end, or the machine "
            "be restarted, before an agent starts here again",
        )

    def _report_failure(self, reason: str) -> None:
        failure = failure_of(self._crew, self._rdzv.node.id)
        self._rdzv.report_failure(self._crew.round, failure)
        if not failure.symptom:
            self._fitness.examine()  # ends before this node says that it is quiet

    # ---- what is said ----

    def _say_over(self) -> None:
        """Once, on every node: which failure the round has ended with, and what it costs.

        With the traceback on the node where it is from. That of the last failure is told at the
        end.
        """
        job = self._rdzv.snapshot
        if job.state is not State.FORMING or job.n == self._over:
            return
        self._over = job.n
        text = f"round {job.n} is over: {job.cause}"
        told = self._journal.last.startswith(text)  # the workers were stopped for it
        if job.by == Move.INTERRUPT and not told:
            log.warning("%s", text)
        if (cause := self.root_cause) and cause.node == self._rdzv.node.id:
            tell_traceback(cause)

    def _say(self, reason: str) -> None:
        if self._sayings.is_news(reason) and reason != self._journal.last:
            log.info("%s", reason)


def _ring(config: AgentConfig, on_dead: Callable[[Node, bool], None]) -> Ring:
    """This node's part of the ring.

    Raises:
        AgentFailed: It cannot listen.
    """
    try:
        return Ring(config.address, on_dead, config.ports)
    except OSError as error:
        text = f"this node cannot listen on {config.address}: {error.strerror}"
        raise AgentFailed(AgentExit.UNFIT, text) from error


_ACTIONS: Mapping[Action, Callable[[Agent, str], None]] = {
    Action.HOST_STORE: lambda agent, reason: agent._crew.host_store(agent._rdzv.snapshot.n),
    Action.START: Agent._start,
    Action.ASK_TO_LEAVE: lambda agent, reason: agent._crew.ask_to_leave(
        reason, agent._leaving.left_s
    ),
    Action.STOP: lambda agent, reason: agent._crew.stop(reason),
    Action.KILL: Agent._kill,
    Action.REPORT_DONE: lambda agent, reason: agent._rdzv.report_done(agent._rdzv.snapshot.n),
    Action.REPORT_QUIET: lambda agent, reason: agent._rdzv.report_quiet(agent._rdzv.snapshot.n),
    Action.REPORT_FAILURE: Agent._report_failure,
    Action.ABANDON: Agent._abandon,
}
