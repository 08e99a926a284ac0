"""The agent's loop: observe, decide, act.

One thread owns all state here. Whatever happens elsewhere (a worker ends, the store changes, a
signal arrives) comes as an event through the inbox. After each event the loop polls the rendezvous,
calls `supervise.next_action`, and carries the action out. While the store is out of reach the
workers continue, until `etcd_grace_s`; however the agent ends, none of its workers is left.
"""

from __future__ import annotations

import logging
import queue
import secrets
import signal
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from zero_agent.errors import AgentFailed
from zero_agent.loop.answers import Answers, kinds_of, last_output, prober, reacher
from zero_agent.loop.config import AgentConfig
from zero_agent.loop.leaving import Leaving, failure_of, log_end, root_cause
from zero_agent.loop.limits import STORE_FAILS, Limits, LogLimit, pause_when_full_s
from zero_agent.loop.link_watch import Links, reach_by
from zero_agent.loop.node_workers import SOCKET, Handlers, NodeWorkers
from zero_agent.loop.observed.telemetry import Telemetry
from zero_agent.loop.pumped_store import PumpedStore
from zero_agent.loop.store_writes import StoreWrites
from zero_agent.loop.supervise import Action, Situation, next_action
from zero_agent.loop.suspects import Suspects
from zero_agent.node.health_checks import HealthChecks
from zero_agent.node.health_endpoint import STALLED_S, Status
from zero_agent.node.memory import NodeMemory
from zero_agent.node.ring import Ring
from zero_agent.node.scratch import Scratch
from zero_agent.node.state import BUSY, Workers
from zero_agent.node.strain import Strain, devices
from zero_contract.clock import Clock
from zero_contract.exit_codes import AgentExit
from zero_contract.signing import Purpose, derive
from zero_orchestrator.errors import StoreError, StoreFull, StoreReplaced, StoreUnavailable
from zero_orchestrator.membership.job_state import ENDED, Failure, Node
from zero_orchestrator.membership.moves import Wait
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.observe.goodput import Use
from zero_orchestrator.store.kv import KeyValueStore

log = logging.getLogger("zero")

_WARM_UP = {
    Workers.STARTING: "warming up, before it joins",
    Workers.READY: "warmed up, to join without delay",
}
"""What workers without a round do, by their state."""
TICK_S = 0.1
"""The longest time the loop sleeps: the resolution of its timers."""
LAST_OUTPUT_BYTES = 16 << 10
"""Output of a node's workers that stays in etcd after its agent, compressed."""
LAST_OUTPUT_OF_ALL_BYTES = 1 << 20
"""The same for all nodes of a job together."""


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
        """Nothing is written before `run`; `telemetry` is another connection to the same store."""
        self._config = config
        self._job = job
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._turned_s = clock.now()
        self._scratch = Scratch("zero-agent-", socket=SOCKET)
        incarnation = secrets.token_hex(4)
        # Events and progress are many, and must not delay the calls of the rendezvous.
        self._told = Telemetry(
            config,
            job,
            incarnation,
            telemetry,
            clock,
            self._post,
            environ=environ,
            before_ns=before_ns,
        )
        self._journal = self._told.journal
        self._limits = Limits(config, clock, self._journal)
        self._suspects = Suspects(self._journal, clock)
        self._store_writes = StoreWrites(self._journal, clock, self._limits.store_fails)
        # The two know each other: the limits say what waits to be written, the writer what fails.
        self._limits.remark = lambda: self._store_writes.remark
        # Early: the imports of the forkserver take seconds, and overlap with all that follows.
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
        self._store_writes.on_published = self._told.history.saved
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
        self.holds: Callable[[], str] = lambda: ""
        """Says why this node, when it may leave, has to stay a moment; empty: it can go."""
        self.replaced: Callable[[], str] = lambda: ""
        """Says why this etcd is no longer the job's; empty: it is."""
        self.took_part = False
        """Whether this agent saw the job before its end."""

    def _make_workers(self, environ: Mapping[str, str]) -> NodeWorkers:
        """Start the forkserver, and connect its events with the parts that handle them."""
        handlers = Handlers(
            on_port=lambda fence, port: self._store_writes.master(
                fence, self._config.where_store_is(port)
            ),
            on_commit=self._store_writes.commit,
            on_peer_memory=lambda request: self._ram.open(request, self._rdzv.secret),
            on_times=self._told.verdicts.add,
            why_stuck=lambda: self._told.verdicts.why_stuck,
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
        made.steps.on_report = partial(self._told.stepped, made)
        made.steps.on_saved = self._told.saved
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
            # An agent whose loop hangs gives its lease up: the job goes on without this node.
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
        if workers.group.state is not Workers.RUNNING or workers.steps.begun:
            return _WARM_UP.get(workers.group.state, "")
        rank = min(workers.group.ranks, default=0)
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
            workers=self._node_workers.group.state,
            workers_round=self._node_workers.group.round,
            preparing=self.preparing,
            turned_s=self._clock.now() - self._turned_s,
            store_silent_s=self._limits.store_silent_s,
        )

    def metrics(self) -> bytes:
        """The metrics of this node for Prometheus; may be called on any thread."""
        from zero_agent.loop.observed.metrics import Readings, of_node  # 0.1 s
        from zero_orchestrator.observe.metrics import exposition

        steps = self._node_workers.steps
        readings = Readings(
            status=self.status,
            used_ns=self._told.time.settled_ns(),
            progress=steps.last,
            step_times=steps.times.by_rank,
            spent=steps.spent,
            etcd=self._store.durations,
            memory=self._ram.use(),
            speed=steps.speed,
            published=self._told.history.published,
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
            # Only now: its key follows from the job's secret.
            key = derive(self._rdzv.secret, Purpose.RING)
            self._ring.start(self._rdzv.node, key)
            self._node_workers.leave_word(self._ring.listener, key)
            while (code := self._turn()) is None:
                pass
            return code
        finally:
            self.close()

    def close(self) -> None:
        """Stop everything that belongs to this agent and leave the job."""
        # From now on a call to etcd handles no events: their parts are being closed.
        self._store.leave_alone()
        # The workers end first: then their output is complete, their memory is in use no more, and
        # another node may register in the place of this one.
        closes: list[Callable[[], object]] = [
            self._answers.close,
            self._node_workers.close,
            self._publish_last_output,
            self._ram.close,
            # A neighbour suspects nobody who has left the job before his ring ends.
            self._rdzv.close,
            self._ring.close,
            partial(self._told.publish_time, nodes=0, last=True),
            self._told.traces.close,
            self._told.publisher.close,
            self._journal.close,
            self._scratch.close,
        ]
        for close in closes:
            try:
                close()
            except Exception:  # the other parts are stopped, and the agent's own error is raised
                log.exception("zero-agent: internal error in %s", close)

    def on_signal(self, number: int) -> None:
        """Leave at the next step boundary, or at once if this signal has come before.

        May be called from a signal handler.
        """

        def leave() -> None:
            self._leaving.signalled(number)
            self._node_workers.pass_on(signal.Signals(number))

        self._inbox.put(leave)  # of a SimpleQueue: the handler may have interrupted another `put`

    def tell_of_member(self, text: str) -> None:
        """Record what became of the job's own store, and why. On any thread."""
        self._journal.tell("member", text)

    def on_notice(self, text: str) -> None:
        """Leave at the next step boundary: this machine is about to go. On any thread."""
        self._inbox.put(lambda: self._leaving.noticed(text))

    def _joined(self) -> bool:
        """Register this node with the job; False if etcd is out of reach, or full."""
        self._turned_s = self._clock.now()
        self._check_replaced()
        try:
            # In the first round all nodes import at the same time, and a node that has registered
            # is waited for. No later round stops, or waits, for a node that could not start its
            # workers at once.
            starting = False
            if self._rdzv.has_begun():
                # Nor for the start-up of their script, where the others would stand still for it.
                starting = self._rdzv.others_stay()
                while not (self._node_workers.prepared or self._leaving.begun):
                    self._turned_s = self._clock.now()
                    self._limits.check_waiting(
                        self._rdzv.snapshot, "the workers' imports are not done", Wait.IMPORTS
                    )
                    self._handle_events()
            # A node that is to leave says so as it registers: no round waits for it.
            self._leaving.obey(None)
            self._rdzv.register(starting=starting)
        except (StoreUnavailable, StoreFull) as error:
            self._store_fails(error)
            self._leaving.check_limit()
            return False
        self._limits.store_answers(self._rdzv.snapshot.fence)
        return True

    def _check_replaced(self) -> None:
        """Raises StoreReplaced: the job goes on elsewhere, and what runs here publishes nothing."""
        if why := self.replaced():
            raise StoreReplaced(f"{why}: this node goes there, and its workers start again")

    def _store_fails(self, error: StoreError) -> None:
        """Go on without etcd, within the limits."""
        self._limits.store_fails(error)  # returns for ever if etcd is full: it can be given room
        # A turn without a pause would send etcd ten writes a second, each of which it refuses.
        if isinstance(error, StoreFull):
            until_s = self._clock.now() + pause_when_full_s(len(self._rdzv.snapshot.nodes))
            while self._clock.now() < until_s:
                self._meanwhile()

    def _turn(self) -> int | None:
        """One turn of the loop; the exit code when it was the last."""
        self._turned_s = self._clock.now()
        self._check_replaced()
        try:
            group = self._node_workers.group
            # Before the poll: workers wait for the replies, and the fence decides.
            self._store_writes.run(self._rdzv, group.fence if group.state in BUSY else 0)
            self._suspects.run(self._rdzv)  # what it evicts, this very poll sees
            self._rdzv.poll()
            self._links.run(self._rdzv, self._node_workers)
            self._ring.follow(self._rdzv.node, self._rdzv.snapshot.nodes)
            self._look()
            # The other nodes learn whether this node is healthy before it reports that its workers
            # have stopped.
            if not self._health_checks.checking:
                self._rdzv.describe(unhealthy=self._health_checks.complaint)
            self._rdzv.describe(stays=self._node_workers.stays)
            action, reason = self._next_action()
            if action is Action.EXIT:
                self._told.show_done(self._node_workers, self._rdzv.snapshot, self._rdzv.node)
                self._told.log_time(self._store, self._rdzv.snapshot, self._rdzv.node)
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
            self._told.log_end_of_round(self._rdzv.snapshot, self._rdzv.node)
            if action is not Action.WAIT:
                return None  # without a wait for events: another action may be due
        except STORE_FAILS as error:
            self._store_fails(error)
        # The end of the job is logged once the workers have ended; an event, when it was told.
        reason, waits_for = self._rdzv.reason, self._rdzv.waits_for
        if (
            not self.ended
            and self._log_limit.is_news(reason, waits_for)
            and reason != self._journal.last
        ):
            log.info("%s", reason)
        self._node_workers.check_limits(etcd_answers=self._limits.store_silent_s is None)
        self._leaving.check_limit()
        # Others may wait for this node, or for the snapshots in its memory.
        alone = len(self._rdzv.snapshot.nodes) <= 1 and not self._ram.is_open
        self._health_checks.check_limit(needed=not alone)
        self._limits.check_waiting(self._rdzv.snapshot, reason, waits_for, self._rdzv.confirm)
        self._handle_events()
        return None

    def _next_action(self) -> tuple[Action, str]:
        """The next action, once the job knows that this node is to leave."""
        action, reason = next_action(self._situation())
        if action is Action.REPORT_DONE:  # before that: then no other node stops for it
            return action, reason
        stopping = self._node_workers.group.state is Workers.STOPPING
        self._leaving.obey(self._rdzv.snapshot.drain_order(self._rdzv.node), stopping=stopping)
        return next_action(self._situation())

    def _meanwhile(self) -> None:
        """Check the limits and handle events once, while a call to etcd is under way."""
        # A loop that waits for etcd turns: its lease is refreshed. The handlers only record, or
        # act on this node; what they write to etcd is queued (`StoreWrites`).
        self._turned_s = self._clock.now()
        self._node_workers.check_limits(etcd_answers=self._limits.store_silent_s is None)
        self._leaving.check_limit()
        self._handle_events()

    def _handle_events(self) -> None:
        """Wait for an event, then handle all that have come."""
        try:
            self._inbox.get(timeout=TICK_S)()
            # A burst, such as the ends of all workers, leads to one decision. A flood, such as the
            # reports of very short steps, must not keep the loop from its limits and its lease.
            until_s = self._clock.now() + TICK_S
            while self._clock.now() < until_s:
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
            workers=node_workers.group.state,
            round=node_workers.group.round,
            asked_to_leave=node_workers.asked_to_leave,
            can_leave=node_workers.can_leave,
            overdue=node_workers.overdue,
            can_stay=node_workers.can_stay,
            released=node_workers.released,
            cold=node_workers.cold,
            unkillable=node_workers.group.unkillable,
            checking=self._health_checks.checking,
            hosting=node_workers.hosts_store_of(job.fence),
            # Asked only while it leaves; at the end of its time nothing holds it.
            holds=self.holds() if self._leaving.left_s > TICK_S and self._leaving.begun else "",
        )

    # ---- actions ----

    def _abandon(self, reason: str) -> None:
        self._journal.tell("unkillable", f"{reason}; this node leaves", level=logging.ERROR)
        # Before all else: other nodes continue at once, and the fence stops what is left here.
        self._rdzv.close()
        raise AgentFailed(
            AgentExit.UNHEALTHY,
            f"this node has left the job, which continues without it: {reason}. What holds such a "
            "process (a device, a file server, a frozen cgroup, a tracer) must end, or the machine "
            "be restarted, before an agent starts here again",
        )

    def _report_failure(self, reason: str) -> None:
        failure = failure_of(self._node_workers, self._rdzv.node.id)
        self._rdzv.report_failure(self._node_workers.group.round, failure)
        if not failure.symptom:
            self._health_checks.examine()  # ends before this node reports its workers as stopped

    # ---- what is published ----

    def _look(self) -> None:
        """Publish what is due, for `zero-ctl`."""
        job, workers = self._rdzv.snapshot, self._node_workers
        self.took_part |= job.state not in ENDED
        if workers.steps.begun:
            self._rdzv.stepped(workers.group.round, workers.steps.idle_s())
        preparing = self.preparing
        if self._config.imports and not workers.prepared:
            preparing = f"importing {self._config.imports}"
        self._told.look(
            self._situation(),
            workers,
            self._rdzv.lease,
            preparing=preparing,
            devices=self._devices,
            ram=self._ram.use,
            strain=self._strain.look,
        )

    def _publish_last_output(self) -> None:
        """Leave the workers' last output in etcd, for `zero-ctl logs` after the end."""
        nodes = max(1, len(self._rdzv.snapshot.members.nodes))
        limit_bytes = min(LAST_OUTPUT_BYTES, LAST_OUTPUT_OF_ALL_BYTES // nodes)
        recent, incarnation = self._node_workers.recent, self._rdzv.node.incarnation
        value = last_output(recent, self._config.node_id, incarnation, limit_bytes)
        self._told.publisher.last_output(value)


def _ring(config: AgentConfig, on_dead: Callable[[Node, bool], None]) -> Ring:
    """Open this node's listener of the liveness ring. Raises AgentFailed: it cannot listen."""
    try:
        return Ring(config.address, on_dead, config.ports)
    except OSError as error:
        text = f"this node cannot listen on {config.address}: {error.strerror}"
        raise AgentFailed(AgentExit.UNHEALTHY, text) from error


_ACTIONS: Mapping[Action, Callable[[Agent, str], None]] = {
    Action.HOST_STORE: lambda agent, reason: agent._node_workers.host_store(
        agent._rdzv.snapshot.fence
    ),
    Action.START: lambda agent, reason: agent._node_workers.start(
        agent._rdzv.snapshot, agent._rdzv.node, agent._rdzv.secret
    ),
    Action.STAND_BACK: lambda agent, reason: agent._rdzv.describe(starting=True),
    Action.WARM_UP: lambda agent, reason: agent._node_workers.warm_up(
        agent._rdzv.snapshot, agent._rdzv.node, agent._rdzv.secret
    ),
    Action.STAND_BY: lambda agent, reason: agent._rdzv.describe(starting=False),
    Action.ASK_TO_LEAVE: lambda agent, reason: agent._node_workers.ask_to_leave(
        reason, agent._leaving.left_s
    ),
    Action.RELEASE: lambda agent, reason: agent._node_workers.release(reason),
    Action.STOP: lambda agent, reason: agent._node_workers.stop(reason),
    Action.KILL: lambda agent, reason: agent._node_workers.kill(
        reason, show_stacks=any(failure.hang for failure in agent._rdzv.snapshot.failures)
    ),
    Action.REPORT_DONE: lambda agent, reason: agent._rdzv.report_done(agent._rdzv.snapshot.n),
    Action.REPORT_QUIET: lambda agent, reason: agent._rdzv.report_quiet(agent._rdzv.snapshot.n),
    Action.REPORT_FAILURE: Agent._report_failure,
    Action.ABANDON: Agent._abandon,
}
