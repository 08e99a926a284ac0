"""The agent's loop: observe, decide, act.

One thread owns all state here. Whatever happens elsewhere (a worker ends, the store changes, a
signal arrives) comes as an event through the inbox. After each event the loop polls the rendezvous,
calls `supervise.next_action`, and carries the action out. It handles events also while it waits for
etcd (`PumpedStore`): a handler only records, or acts on this node; its writes to etcd are queued.

Must always hold: every wait is bounded; while the store is out of reach the workers continue, and
their commits are refused, until `etcd_grace_s`; the agent waits for a full store; however it ends,
none of its workers is left.
"""

from __future__ import annotations

import logging
import queue
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from zero_agent.errors import AgentFailed
from zero_agent.loop.answers import Answers, kinds_of, last_output, prober, reacher
from zero_agent.loop.config import AgentConfig
from zero_agent.loop.job_history import JobHistory
from zero_agent.loop.leaving import Leaving, failure_of, log_end, log_traceback, root_cause
from zero_agent.loop.limits import STORE_FAILS, Limits, LogLimit, pause_when_full_s
from zero_agent.loop.link_watch import Links, reach_by
from zero_agent.loop.node_time import NodeTime, await_ledgers, in_a_sentence
from zero_agent.loop.node_workers import SOCKET, Handlers, NodeWorkers
from zero_agent.loop.pumped_store import PumpedStore
from zero_agent.loop.store_writes import StoreWrites
from zero_agent.loop.supervise import Action, Situation, next_action
from zero_agent.loop.suspects import Suspects
from zero_agent.loop.traces import Traces
from zero_agent.loop.verdicts import Verdicts, ask_through
from zero_agent.node.health_checks import HealthChecks
from zero_agent.node.health_endpoint import STALLED_S, Status
from zero_agent.node.memory import NodeMemory
from zero_agent.node.ring import Ring
from zero_agent.node.scratch import Scratch
from zero_agent.node.state import BUSY, Workers
from zero_agent.node.strain import Strain, devices
from zero_contract.clock import Clock
from zero_contract.exit_codes import AgentExit
from zero_contract.journal import Journal
from zero_contract.signing import Purpose, derive
from zero_contract.values import in_words
from zero_contract.worker import Progress, Saved, SaveWaits
from zero_orchestrator.errors import StoreFull, StoreUnavailable
from zero_orchestrator.membership.job_state import ENDED, Failure, Node, State
from zero_orchestrator.membership.moves import Move, Wait
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.observe.detectors.detector import Idle
from zero_orchestrator.observe.events import Publisher
from zero_orchestrator.observe.goodput import Use, in_parts, to_record, total_ns
from zero_orchestrator.store.kv import KeyValueStore

log = logging.getLogger("zero")

TICK_S = 0.1
"""The longest time the loop sleeps: the resolution of its timers."""
LAST_OUTPUT_BYTES = 16 << 10
"""Output of a node's workers that stays in etcd after its agent, compressed."""
LAST_OUTPUT_OF_ALL_BYTES = 1 << 20
"""The same for all nodes of a job together."""
SAID_BY_ALL = frozenset({Move.INTERRUPT, Move.FAIL, Move.GIVE_UP})
"""Transitions whose cause every agent logs, and not only the agent that decided them."""


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
        before_ns: Mapping[Use, int] = MappingProxyType({}),
    ) -> None:
        """Nothing is written before `run`.

        Args:
            config: What this agent was asked to do.
            job: The job's name.
            store: The key-value store with the job's state.
            clock: Measures the agent's limits.
            environ: The environment that workers inherit.
            telemetry: Another connection to the same store, for events and progress: they are many,
                and must not delay the calls of the rendezvous.
            before_ns: What the time of this process was used for until now.
        """
        self._config = config
        self._job = job
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._turned_s = clock.now()
        self._scratch = Scratch("zero-agent-", socket=SOCKET)
        events = config.log_dir and config.log_dir / job / f"events-{config.node_id}.jsonl"
        incarnation = secrets.token_hex(4)
        self._publisher = Publisher(telemetry, job, config.node_id, incarnation, clock)
        self._journal = Journal(
            config.node_id, events, publish=self._publisher.event, unlogged=SAID_BY_ALL
        )
        self._limits = Limits(config, clock, self._journal)
        self._suspects = Suspects(self._journal, clock)
        self._store_writes = StoreWrites(self._journal, clock, self._limits.store_fails)
        self._limits.remark = lambda: self._store_writes.remark
        ask = partial(ask_through, telemetry, job)
        self._verdicts = Verdicts(self._publisher, self._journal, clock, self._post, ask)
        self._node_workers = self._make_workers(environ)
        self._strain = Strain(clock)
        self._devices = devices()
        self._ram = NodeMemory(
            job,
            config.host or config.node_id,
            config.address,
            limit_bytes=config.ram_budget_bytes,
            ports=config.ports,
            advertised=config.advertised,
        )
        self._time = NodeTime(clock, before_ns)
        self._history = JobHistory()
        self._store_writes.on_published = self._history.saved
        self._traces = Traces(job, config.node_id, telemetry, environ)
        self._ring = _ring(config, self._post(self._suspects.add))
        reach = reach_by(self._ring)
        self._links = Links(clock, self._journal, self._post, reach)
        self._store = PumpedStore(store, self._meanwhile, self._post(lambda: None))
        self._rdzv = self._make_rendezvous(incarnation)
        kinds = kinds_of(self._node_workers, incarnation)
        kinds["probe"] = prober(self._ring, lambda: self._rdzv.snapshot.nodes)
        kinds["reach"] = reacher(reach, self._rdzv)
        self._answers = Answers(telemetry, job, config.node_id, kinds)
        self._leaving = Leaving(self._rdzv, self._journal, clock, config.shutdown_timeout_s)
        self._health_checks = HealthChecks(
            config.surroundings(environ),
            config.join_timeout_s,
            max_nodes=config.spec.max_nodes,
            clock=clock,
            journal=self._journal,
            post=self._post,
        )
        self._log_limit = LogLimit(clock)
        self._over = 0
        self.took_part = False
        """This agent saw the job before its end."""

    def _make_workers(self, environ: Mapping[str, str]) -> NodeWorkers:
        """Start the forkserver, and connect its events with the parts that handle them."""
        handlers = Handlers(
            on_port=lambda n, port: self._store_writes.master(n, self._config.where_store_is(port)),
            on_commit=self._store_writes.commit,
            on_peer_memory=lambda request: self._ram.open(request, self._rdzv.secret),
            on_times=self._verdicts.add,
            why_stuck=lambda: self._verdicts.why_stuck,
        )
        made = NodeWorkers(
            self._config,
            self._job,
            self._scratch.path,
            clock=self._clock,
            journal=self._journal,
            environ=environ,
            post=self._post,
            handlers=handlers,
        )
        made.steps.on_report = self._on_step
        made.steps.on_saved = self._on_saved
        return made

    def _make_rendezvous(self, incarnation: str) -> Rendezvous:
        """The connection to the job; this node registers in `run`."""
        return Rendezvous(
            self._store,
            self._job,
            self._config.spec,
            self._config.node(incarnation, self._ring.port),
            clock=self._clock,
            journal=self._journal,
            timing=self._config.timing,
            lease_ttl_s=self._config.lease_ttl_s,
            on_change=self._post(lambda: None),
            works=lambda: self._clock.now() - self._turned_s < STALLED_S,
        )

    @property
    def ended(self) -> bool:
        """Whether the job is over, for every node."""
        return self._rdzv.snapshot.state in ENDED

    @property
    def root_cause(self) -> Failure | None:
        """The failure that made the job fail, from any node; None if no worker reported one."""
        return root_cause(self._rdzv.snapshot)

    @property
    def preparing(self) -> str:
        """What the workers do before their first step of the round; may be read on any thread."""
        workers = self._node_workers
        if workers.state is not Workers.RUNNING or workers.steps.begun:
            return ""
        rank = min(workers.ranks, default=0)
        return self._links.meeting(rank) or workers.steps.preparing

    @property
    def status(self) -> Status:
        """The state of this agent for the health endpoint; may be read on any thread."""
        job = self._rdzv.snapshot
        return Status(
            job=self._job,
            node=self._config.node_id,
            round=job.n,
            state=job.state or "",
            reason=self._rdzv.reason,
            workers=self._node_workers.state,
            workers_round=self._node_workers.round,
            preparing=self.preparing,
            turned_s=self._clock.now() - self._turned_s,
            store_silent_s=self._limits.store_silent_s,
        )

    def metrics(self) -> bytes:
        """The metrics of this node for Prometheus; may be called on any thread."""
        from zero_agent.loop.metrics import Readings, of_node  # 0.1 s
        from zero_orchestrator.observe.metrics import exposition

        steps = self._node_workers.steps
        readings = Readings(
            status=self.status,
            used_ns=self._time.settled_ns(),
            progress=steps.last,
            step_times=steps.times.read(),
            spent=steps.spent,
            etcd=self._store.durations,
            memory=self._ram.use(),
            speed=steps.speed,
            published=self._history.published,
        )
        return exposition(lambda: of_node(readings))

    # ---- the loop ----

    def run(self) -> int:
        """Take part until the job ends or this node leaves it; the agent's exit code.

        Raises:
            ZeroError: The agent cannot continue; none of its processes is left.
        """
        if imports := self._config.imports:
            log.info("starting: importing %s", imports)
        try:
            while not self._joined():
                self._handle_events()
            key = derive(self._rdzv.secret, Purpose.RING)
            self._ring.start(self._rdzv.node, key)
            self._node_workers.leave_word(self._ring.listener, key)
            while (code := self._turn()) is None:
                pass
            return code
        finally:
            self.close()

    def close(self) -> None:
        """Stop everything that belongs to this agent and leave the job.

        An error in one part is logged: the other parts are stopped, and the agent's own error is
        not hidden.
        """
        self._store.leave_alone()
        closes: list[Callable[[], object]] = [
            self._answers.close,
            self._node_workers.close,
            self._publish_last_output,
            self._ram.close,
            self._rdzv.close,
            self._ring.close,
            partial(self._publish_time, nodes=0, last=True),
            self._traces.close,
            self._publisher.close,
            self._journal.close,
            self._scratch.close,
        ]
        for close in closes:
            try:
                close()
            except Exception:
                log.exception("zero-agent: internal error in %s", close)

    def on_signal(self, number: int) -> None:
        """Leave at the next step boundary, or at once if this signal has come before.

        May be called from a signal handler.

        Args:
            number: One of --signals-to-handle.
        """

        def leave() -> None:
            self._leaving.signalled(number)
            self._node_workers.pass_on(signal.Signals(number))

        self._inbox.put(leave)

    def _joined(self) -> bool:
        """Register this node with the job; False if etcd is out of reach."""
        self._turned_s = self._clock.now()
        try:
            # In the first round all nodes import at the same time, and a node that has registered
            # is waited for. No later round stops, or waits, for a node that could not start its
            # workers at once.
            if self._rdzv.has_begun():
                while not (self._node_workers.prepared or self._leaving.begun):
                    self._turned_s = self._clock.now()
                    self._limits.check_waiting(
                        self._rdzv.snapshot, "the workers' imports are not done", Wait.IMPORTS
                    )
                    self._handle_events()
            self._leaving.obey(None)
            self._rdzv.register()
        except StoreUnavailable as error:
            self._limits.store_fails(error)
            self._leaving.check_limit()
            return False
        self._limits.store_answers(self._rdzv.snapshot.fence)
        return True

    def _turn(self) -> int | None:
        """One turn of the loop; the exit code when it was the last."""
        self._turned_s = self._clock.now()
        try:
            self._store_writes.run(
                self._rdzv, self._node_workers.fence if self._node_workers.state in BUSY else 0
            )
            self._suspects.run(self._rdzv)
            self._rdzv.poll()
            self._links.run(self._rdzv, self._node_workers)
            self._ring.follow(self._rdzv.node, self._rdzv.snapshot.nodes)
            self._look_at_time()
            self._publish_progress()
            # The other nodes learn whether this node is healthy before it reports that its workers
            # have stopped.
            if (
                not self._health_checks.checking
                and self._health_checks.complaint != self._rdzv.node.unhealthy
            ):
                self._rdzv.set_unhealthy(self._health_checks.complaint)
            action, reason = self._next_action()
            if action is Action.EXIT:
                self._log_time()
                return log_end(
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
            self._log_end_of_round()
            if action is not Action.WAIT:
                return None
        except STORE_FAILS as error:
            self._limits.store_fails(error)
            if isinstance(error, StoreFull):  # send no request to etcd for a while
                pause_s = pause_when_full_s(len(self._rdzv.snapshot.nodes))
                until_s = self._clock.now() + pause_s
                while self._clock.now() < until_s:
                    self._meanwhile()
        # The end of the job is logged once the workers have ended.
        reason, waits_for = self._rdzv.reason, self._rdzv.waits_for
        if (
            not self.ended
            and self._log_limit.is_news(reason, waits_for)
            and reason != self._journal.last
        ):
            log.info("%s", reason)
        self._node_workers.check_limits()
        self._leaving.check_limit()
        alone = len(self._rdzv.snapshot.nodes) <= 1 and not self._ram.is_open
        self._health_checks.check_limit(needed=not alone)
        self._limits.check_waiting(self._rdzv.snapshot, reason, waits_for, self._rdzv.confirm)
        self._handle_events()
        return None

    def _next_action(self) -> tuple[Action, str]:
        """The next action, once the job knows of this node's wish to leave.

        That its workers are done is reported first: then no other node stops for the wish.
        """
        action, reason = next_action(self._situation())
        if action is Action.REPORT_DONE:
            return action, reason
        stopping = self._node_workers.state is Workers.STOPPING
        self._leaving.obey(self._rdzv.snapshot.drain_order(self._rdzv.node), stopping=stopping)
        return next_action(self._situation())

    def _meanwhile(self) -> None:
        """Check the limits and handle events once, while a call to etcd is under way."""
        self._turned_s = self._clock.now()
        self._node_workers.check_limits()
        self._leaving.check_limit()
        self._handle_events()

    def _handle_events(self) -> None:
        """Wait for an event, then handle all that have come: a burst leads to one decision."""
        try:
            self._inbox.get(timeout=TICK_S)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _post(self, handler: Callable[..., None]) -> Callable[..., None]:
        """Wrap `handler` so that the loop's thread runs it."""
        return lambda *args: self._inbox.put(lambda: handler(*args))

    def _situation(self) -> Situation:
        job, node_workers = self._rdzv.snapshot, self._node_workers
        return Situation(
            job=job,
            node=self._rdzv.node,
            workers=node_workers.state,
            round=node_workers.round,
            asked_to_leave=node_workers.asked_to_leave,
            can_leave=node_workers.can_leave,
            overdue=node_workers.overdue,
            unkillable=node_workers.unkillable,
            checking=self._health_checks.checking,
            hosting=node_workers.hosts_store_of(job.n),
        )

    # ---- actions ----

    def _abandon(self, reason: str) -> None:
        """Leave first: other nodes continue at once, and the fence stops what is left here."""
        self._journal.tell("unkillable", f"{reason}; this node leaves", level=logging.ERROR)
        self._rdzv.close()
        raise AgentFailed(
            AgentExit.UNHEALTHY,
            f"this node has left the job, which continues without it: {reason}. What holds such a "
            "process (a device, a file server, a frozen cgroup, a tracer) must end, or the machine "
            "be restarted, before an agent starts here again",
        )

    def _report_failure(self, reason: str) -> None:
        failure = failure_of(self._node_workers, self._rdzv.node.id)
        self._rdzv.report_failure(self._node_workers.round, failure)
        if not failure.symptom:
            self._health_checks.examine()  # ends before this node reports its workers as stopped

    # ---- what is published and logged ----

    def _publish_progress(self) -> None:
        """Publish the state and the progress of this node's workers, for `zero-ctl status`."""
        job = self._rdzv.snapshot
        nodes = len(job.members.nodes)
        self.took_part |= job.state not in ENDED
        self._journal.round, self._journal.nodes = job.n, nodes
        self._publisher.alive(nodes=nodes)
        steps, runs = self._node_workers.steps, self._node_workers.state is Workers.RUNNING
        if steps.begun:
            self._rdzv.stepped(self._node_workers.round, steps.idle_s())
        preparing = self.preparing
        if self._config.imports and not self._node_workers.prepared:
            preparing = f"importing {self._config.imports}"
        self._publisher.progress(
            steps.last,
            lease=self._rdzv.lease,
            nodes=nodes,
            preparing=preparing,
            pids={each.rank: each.pid for each in self._node_workers.processes},
            devices=self._devices,
            ram=self._ram.use,
            strain=self._strain.look,
            pace=lambda: steps.pace,
        )
        self._verdicts.follow(job, self._rdzv.lease)
        idle_s = steps.idle_s() if runs and steps.is_missing() else None
        if job.members.index(self._rdzv.node) == 0:
            warming_up = steps.may_be_warming_up
            now = Idle(step=steps.finished or 0, idle_s=idle_s, warming_up=warming_up)
            self._verdicts.add(now)
        else:
            self._verdicts.listen(idle_s)

    def _publish_last_output(self) -> None:
        """Leave the workers' last output in etcd, for `zero-ctl logs` after the end."""
        nodes = max(1, len(self._rdzv.snapshot.members.nodes))
        limit_bytes = min(LAST_OUTPUT_BYTES, LAST_OUTPUT_OF_ALL_BYTES // nodes)
        recent, incarnation = self._node_workers.recent, self._rdzv.node.incarnation
        node = self._config.node_id
        self._publisher.last_output(last_output(recent, node, incarnation, limit_bytes))

    # ---- the goodput ledger, and the history of the job ----

    def _on_step(self, rank: int, progress: Progress, took_s: float | None) -> None:
        self._time.report(rank, progress, self._node_workers.steps.long_s)
        self._history.report(rank, progress, took_s)
        if rank == 0:
            self._traces.stepped(self._node_workers.round, time.time())

    def _on_saved(self, rank: int, saved: Saved | SaveWaits) -> None:
        if rank == 0:
            self._history.heard(saved, self._journal, self._traces.saved)

    def _look_at_time(self) -> None:
        """Mark what this node does, and publish its ledger and the history, for `zero-ctl`."""
        workers = self._node_workers
        reports = workers.steps.finished is not None
        self._time.look(self._situation(), prepared=workers.prepared, reports=reports)
        led = self._history.leads
        self._history.look(self._rdzv.snapshot, self._rdzv.node)
        if led and not self._history.leads:
            self._publish_history(last=True)
        self._publish_time(nodes=len(self._rdzv.snapshot.members.nodes), last=False)

    def _log_time(self) -> None:
        used_ns = self._time.used_ns()
        total = in_words(total_ns(used_ns) / 1e9)
        text = f"this node's time, {total}: {in_parts(used_ns)}"
        self._journal.tell("time", text, ns=to_record(used_ns))
        members = self._rdzv.snapshot.members
        if not self.ended or members.index(self._rdzv.node) != 0 or len(members.nodes) < 2:
            return
        self._publish_time(nodes=0, last=True)
        ending = [node.id for node in self._rdzv.snapshot.nodes]  # spares as well
        of_all_ns, missing = await_ledgers(self._store, self._job, ending)
        if of_all_ns:
            sentence = in_a_sentence(of_all_ns, missing)
            self._journal.tell("job time", sentence, ns=to_record(of_all_ns), missing=missing)

    def _publish_time(self, *, nodes: int, last: bool) -> None:
        used_ns, lane = self._time.used_ns, self._time.lane
        self._publisher.goodput(used_ns, nodes=nodes, last=last, lane=lane)
        if self._history.leads:
            self._publish_history(last=last)

    def _publish_history(self, *, last: bool) -> None:
        history = self._history
        self._publisher.history(history.history, reign=history.reign, last=last)

    def _log_end_of_round(self) -> None:
        """Log, once and on every node, the failure that has ended the round, and its cost.

        The node of the failure logs its traceback as well. The job's last failure is logged at its
        end.
        """
        job = self._rdzv.snapshot
        if job.state is not State.FORMING or job.n == self._over:
            return
        self._over = job.n
        text = f"round {job.n} is over: {job.cause}"
        logged = self._journal.last.startswith(text)  # as the reason why the workers were stopped
        if job.by == Move.INTERRUPT and not logged:
            log.warning("%s", text)
        if (cause := self.root_cause) and cause.node == self._rdzv.node.id:
            log_traceback(cause)


def _ring(config: AgentConfig, on_dead: Callable[[Node, bool], None]) -> Ring:
    """Open this node's listener of the liveness ring.

    Raises:
        AgentFailed: It cannot listen.
    """
    try:
        return Ring(config.address, on_dead, config.ports)
    except OSError as error:
        text = f"this node cannot listen on {config.address}: {error.strerror}"
        raise AgentFailed(AgentExit.UNHEALTHY, text) from error


_ACTIONS: Mapping[Action, Callable[[Agent, str], None]] = {
    Action.HOST_STORE: lambda agent, reason: agent._node_workers.host_store(agent._rdzv.snapshot.n),
    Action.START: lambda agent, reason: agent._node_workers.start(
        agent._rdzv.snapshot, agent._rdzv.node, agent._rdzv.secret
    ),
    Action.ASK_TO_LEAVE: lambda agent, reason: agent._node_workers.ask_to_leave(
        reason, agent._leaving.left_s
    ),
    Action.STOP: lambda agent, reason: agent._node_workers.stop(reason),
    Action.KILL: lambda agent, reason: agent._node_workers.kill(
        reason, show_stacks=any(failure.hang for failure in agent._rdzv.snapshot.failures)
    ),
    Action.REPORT_DONE: lambda agent, reason: agent._rdzv.report_done(agent._rdzv.snapshot.n),
    Action.REPORT_QUIET: lambda agent, reason: agent._rdzv.report_quiet(agent._rdzv.snapshot.n),
    Action.REPORT_FAILURE: Agent._report_failure,
    Action.ABANDON: Agent._abandon,
}
