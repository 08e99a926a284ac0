"""What this agent tells: events, progress, ledger, history, verdicts and traces, for `zero-ctl`.

What is told waits for nothing, except at the end of a job. Used on the agent's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from zero_agent.loop.config import AgentConfig
from zero_agent.loop.leaving import root_cause
from zero_agent.loop.node_workers import NodeWorkers, Post
from zero_agent.loop.observed.judging import Verdicts, ask_through
from zero_agent.loop.observed.node_time import NodeTime, await_ledgers, in_a_sentence
from zero_agent.loop.observed.traces import Traces
from zero_agent.loop.observed.trainjob import TrainJobStatus
from zero_agent.loop.supervise import Situation
from zero_agent.node.state import Workers
from zero_contract import worker
from zero_contract.clock import Clock
from zero_contract.journal import Journal
from zero_contract.values import in_words
from zero_contract.worker import CommitRequest, Progress, SaveWaits
from zero_orchestrator.membership.job_state import ENDED, Node, Snapshot, State
from zero_orchestrator.membership.moves import Move
from zero_orchestrator.observe.detectors.detector import Idle
from zero_orchestrator.observe.events import MemoryUse, Publisher
from zero_orchestrator.observe.goodput import Use, in_parts, to_record, total_ns
from zero_orchestrator.observe.history import Failing, History, Saved
from zero_orchestrator.store.kv import KeyValueStore


class JobHistory:
    """The steps that this node has seen, and the checkpoints since rank 0 has been on it."""

    def __init__(self) -> None:
        self.history = History()
        self.reign = 0
        """How often this node has come to have rank 0."""
        self.leads = False
        """Whether rank 0 of the round is on this node."""
        self.published: Mapping[bool, int] = {}
        """In memory or not -> the checkpoints of workers here; replaced, so read on any thread."""
        self._workers = 0
        self._round = 0
        self._rank: int | None = None
        self._in_memory: Saved | None = None
        """The in-memory checkpoint that was published last, whose save has not ended."""
        self._told: Failing | None = None
        """What `news` has told of saves that fail."""

    def look(self, job: Snapshot, node: Node) -> None:
        """Note the round, and whether this node has rank 0."""
        members = job.members
        leads = bool(members.nodes) and members.nodes[0].id == node.id
        if leads and not self.leads:
            self.reign += 1
            # All the rest is in the record, which this agent continues: it would count twice.
            self.history = History(points=self.history.points, stride=self.history.stride)
        self.leads, self._workers = leads, members.world_size
        if job.n != self._round:
            self._round, self._rank = job.n, None

    def report(self, rank: int, progress: Progress, took_s: float | None = None) -> None:
        """A worker has reported its step."""
        # All workers end the same steps: those of the first that reports count.
        if self._rank is None:
            self._rank = rank
        if rank == self._rank:
            self.history = self.history.stepped(
                progress.step,
                time_s=time.time(),
                samples=progress.samples,
                workers=self._workers,
                loss=progress.loss,
                tokens=progress.tokens,
            )
            if took_s is not None and self.leads:
                self.history = self.history.with_duration(took_s)

    def saved(self, request: CommitRequest) -> None:
        """A checkpoint is published."""
        self.published = {
            **self.published,
            request.in_memory: self.published.get(request.in_memory, 0) + 1,
        }
        if not self.leads:
            return
        made = Saved(
            step=request.step,
            tag=request.tag,
            time_s=time.time(),
            samples=request.samples,
            digest=request.digest,
        )
        # Each step may have one in memory: they are counted, and only the last is kept.
        if request.in_memory:
            self._in_memory = made
            self.history = replace(self.history, kept=self.history.kept + 1)
        else:
            self.history = self.history.with_checkpoint(made)

    def waits(self, waits: SaveWaits) -> None:
        """Training waits to repeat the save that has failed."""
        left_s, now_s = waits.left_s, time.time()
        self.history = self.history.with_wait(waits.step, waits.what, left_s, now_s)

    def news(self) -> str:
        """What is new about saves that fail, as a sentence; "" if it has been told."""
        before, after = self._told, self.history.failing
        self._told = after
        if after is None:
            again = "checkpoints are saved again, after"
            return f"{again} {before.saves} that failed" if before else ""
        # Each save fails while the disk is full: only what it waits for can be new.
        if before is None or after.waits_for != before.waits_for:
            return f"saves: {after.in_words()}"
        return ""

    def written(self, saved: worker.Saved) -> None:
        """The save of the checkpoint that was published last has ended, as rank 0 reports."""
        if not saved.committed:
            if saved.problem and not saved.in_memory:
                self.history = self.history.with_failure(saved.step, saved.problem, time.time())
            return
        times: dict[str, float] = {
            "size_bytes": saved.whole_bytes,
            "stall_s": saved.stall_s,
            "write_s": saved.write_s,
            "publish_s": saved.publish_s,
        }
        if not saved.in_memory:
            self.history = self.history.with_times(saved.step, **times)
        elif self._in_memory is not None and self._in_memory.step == saved.step:
            ended = replace(self._in_memory, **times)  # type: ignore[arg-type]
            self.history = replace(self.history, in_memory=ended)


log = logging.getLogger("zero")

SAID_BY_ALL = frozenset({Move.INTERRUPT, Move.FAIL, Move.GIVE_UP})
"""Transitions whose cause every agent logs, and not only the agent that decided them."""
UNLOGGED = SAID_BY_ALL | {"first step"}


class Telemetry:
    """Everything that an agent tells, from its start to its end."""

    def __init__(
        self,
        config: AgentConfig,
        job: str,
        incarnation: str,
        store: KeyValueStore,
        clock: Clock,
        post: Post,
        *,
        environ: Mapping[str, str],
        before_ns: Mapping[Use, int],
    ) -> None:
        """Nothing is told yet; the store is another connection than that of the rendezvous."""
        self._job = job
        events = config.log_dir and config.log_dir / job / f"events-{config.node_id}.jsonl"
        self.publisher = Publisher(store, job, config.node_id, incarnation, clock)
        self.journal = Journal(
            config.node_id, events, publish=self.publisher.event, unlogged=UNLOGGED
        )
        ask = partial(ask_through, store, job)
        self.verdicts = Verdicts(self.publisher, self.journal, clock, post, ask)
        self.time = NodeTime(clock, before_ns)
        self.history = JobHistory()
        self.traces = Traces(job, config.node_id, store, environ)
        self._trainjob = TrainJobStatus(environ, clock)
        self._over = 0
        """The last round whose end was logged."""
        self._stepped = 0
        """The last round of which each worker here has ended a step."""

    def look(
        self,
        now: Situation,
        workers: NodeWorkers,
        lease: int,
        *,
        preparing: str,
        devices: str,
        ram: Callable[[], MemoryUse | None],
        strain: Callable[[], Mapping[str, float]],
    ) -> None:
        """Publish what is due of the state and the progress of this node's workers."""
        job, steps = now.job, workers.steps
        nodes = len(job.members.nodes)
        reports = steps.finished is not None
        self.time.look(now, prepared=workers.prepared, reports=reports)
        led = self.history.leads
        self.history.look(job, now.node)
        if led and not self.history.leads:  # rank 0 goes to another node, which continues it
            self._publish_history(last=True)
        self.publish_time(nodes=nodes, last=False)
        self.journal.round, self.journal.nodes = job.n, nodes
        self.publisher.alive(nodes=nodes)
        self.publisher.progress(
            steps.last,
            lease=lease,
            nodes=nodes,
            preparing=preparing,
            pids={each.rank: each.pid for each in workers.group.processes},
            devices=devices,
            ram=ram,
            strain=strain,
            pace=lambda: steps.pace,
        )
        self.verdicts.follow(job, lease)
        runs = now.workers is Workers.RUNNING
        idle_s = steps.idle_s() if runs and steps.is_missing() else None
        if job.members.index(now.node) == 0:
            self._trainjob.look(steps.last, steps.speed)
            # In each turn, also while steps are taken: that ends what was found before.
            step, warming_up = steps.finished or 0, steps.may_be_warming_up
            self.verdicts.add(Idle(step=step, idle_s=idle_s, warming_up=warming_up))
        else:
            self.verdicts.listen(idle_s)

    def stepped(
        self, workers: NodeWorkers, rank: int, progress: Progress, took_s: float | None
    ) -> None:
        """A worker has ended a step."""
        self.time.report(rank, progress, workers.steps.long_s)
        self.history.report(rank, progress, took_s)
        n, ways = workers.group.round, workers.steps.ways
        if rank == 0:
            self.traces.stepped(n, time.time())
        if n != self._stepped and ways.keys() >= set(workers.group.ranks):
            self._stepped = n
            text = f"the workers of this node have ended their first step of round {n}"
            self.journal.tell("first step", text, round=n, ranks=ways)

    def saved(self, rank: int, saved: worker.Saved | SaveWaits) -> None:
        """A save of a worker has ended, or waits: of rank 0's, note it, and tell what is new."""
        if rank != 0:
            return
        if isinstance(saved, SaveWaits):
            self.history.waits(saved)
        else:
            self.history.written(saved)
            if not saved.in_memory:  # there may be one in each step
                self.traces.saved(saved)
        if text := self.history.news():
            failing = self.history.history.failing
            level = logging.INFO if failing is None else logging.WARNING
            saves, failed = (0, False) if failing is None else (failing.saves, True)
            self.journal.tell(
                "save", text, level=level, step=saved.step, failed=failed, saves=saves
            )

    def publish_time(self, *, nodes: int, last: bool) -> None:
        """Publish the ledger of this node, and the history if rank 0 is here."""
        used_ns, timeline = self.time.used_ns, self.time.timeline
        self.publisher.goodput(used_ns, nodes=nodes, last=last, timeline=timeline)
        if self.history.leads:
            self._publish_history(last=last)

    def _publish_history(self, *, last: bool) -> None:
        history = self.history
        self.publisher.history(history.history, reign=history.reign, last=last)

    def show_done(self, workers: NodeWorkers, job: Snapshot, me: Node) -> None:
        """Show in the TrainJob, if there is one, that the job is done."""
        if job.state is State.DONE and job.members.index(me) == 0:
            self._trainjob.look(workers.steps.last, workers.steps.speed, done=True)

    def log_time(self, store: KeyValueStore, job: Snapshot, me: Node) -> None:
        """Log the time of this node; on the node of rank 0, that of a job that has ended, too."""
        used_ns = self.time.used_ns()
        total = in_words(total_ns(used_ns) / 1e9)
        text = f"this node's time, {total}: {in_parts(used_ns)}"
        self.journal.tell("time", text, ns=to_record(used_ns))
        members = job.members
        if job.state not in ENDED or members.index(me) != 0 or len(members.nodes) < 2:
            return
        self.publish_time(nodes=0, last=True)  # its own ledger is one of those that are awaited
        ending = [node.id for node in job.nodes]  # spares as well
        of_all_ns, missing = await_ledgers(store, self._job, ending)
        if of_all_ns:
            sentence = in_a_sentence(of_all_ns, missing)
            self.journal.tell("job time", sentence, ns=to_record(of_all_ns), missing=missing)

    def log_end_of_round(self, job: Snapshot, me: Node) -> None:
        """Log, once and on every node, the failure that has ended the round, and its cost."""
        # Not of a job that has failed: its last failure is logged at its end.
        if job.state is not State.FORMING or job.n == self._over:
            return
        self._over = job.n
        text = f"round {job.n} is over: {job.cause}"
        logged = self.journal.last.startswith(text)  # as the reason why the workers were stopped
        if job.by == Move.INTERRUPT and not logged:
            log.warning("%s", text)
        if (cause := root_cause(job)) and cause.node == me.id and cause.traceback:
            log.error("rank %d on node %s:\n%s", cause.rank, cause.node, cause.traceback.rstrip())
