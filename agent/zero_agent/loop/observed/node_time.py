"""What the time of this node is used for, and, at the end of a job, that of all its nodes.

`doing` is a pure function of what the agent sees; `NodeTime` marks each change of it, and each step
of the workers, with the agent's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from zero_agent.loop.supervise import Situation
from zero_agent.node.state import Workers
from zero_contract.clock import Clock
from zero_contract.values import in_words
from zero_contract.worker import Progress
from zero_orchestrator.errors import StoreError
from zero_orchestrator.membership.job_state import ENDED, State
from zero_orchestrator.observe.events import by_node, goodput_prefix, read_goodput
from zero_orchestrator.observe.goodput import (
    Begins,
    Doing,
    Ledger,
    Mark,
    Stepped,
    Use,
    add_up,
    in_parts,
    total_ns,
)
from zero_orchestrator.observe.timeline import Phase, Timeline
from zero_orchestrator.store.kv import KeyValueStore

_NS = 1e9


def doing(now: Situation, *, prepared: bool) -> Doing:
    """What this node does."""
    found = next(doing for doing, applies in _RULES if applies(now))
    return Doing.STARTING if found is Doing.WAITING and not prepared else found


# The workers before the job: they may still run, or stop, when that has gone on.
_RULES: Sequence[tuple[Doing, Callable[[Situation], bool]]] = (
    (Doing.ENDING, lambda now: now.job.state in ENDED),
    (Doing.RUNNING, lambda now: now.workers is Workers.RUNNING),
    (Doing.FORMING, lambda now: now.workers is Workers.STOPPING),
    # The next round would not have this node.
    (
        Doing.IDLE,
        lambda now: (
            now.node.draining or bool(now.node.unhealthy) or now.job.barred(now.node) is not None
        ),
    ),
    (
        Doing.WAITING,
        lambda now: now.job.state is not State.ACTIVE and (now.job.lacks_nodes or not now.job.n),
    ),
    (Doing.FORMING, lambda now: now.job.state is not State.ACTIVE),
    (Doing.IDLE, lambda now: not now.job.has_member(now.node)),
    (Doing.ENDING, lambda now: now.workers is Workers.SUCCEEDED),
    (Doing.FORMING, lambda now: True),
)
"""A node does the first of these whose condition holds."""


class NodeTime:
    """The ledger and the timeline of this agent, up to now; used on the agent's thread alone."""

    def __init__(self, clock: Clock, before_ns: Mapping[Use, int] = MappingProxyType({})) -> None:
        """The time of a node begins."""
        self._clock = clock
        self._ledger = Ledger(at_ns=self._now_ns(), used_ns=before_ns)
        self._timeline = Timeline(until_s=time.time()).begin(Phase.STARTING, time.time())
        self._seen = (Doing.STARTING, 0)
        self._reports = False
        self._usual_ns = 0
        """The usual time of a long step of this round; 0: not known."""
        self._rank: int | None = None

    def look(self, now: Situation, *, prepared: bool, reports: bool) -> None:
        """Mark what the node does, if that has changed."""
        self._reports = reports
        seen = doing(now, prepared=prepared), now.round
        if seen == self._seen:  # the agent looks in every turn of its loop
            return
        # The workers of another round report anew, and the first of them counts.
        self._seen, self._rank, self._usual_ns = seen, None, 0
        reached = now.job.reached or 0
        self._mark(Begins(at_ns=self._now_ns(), doing=seen[0], reached=reached, reports=reports))

    def report(self, rank: int, progress: Progress, usual_s: float | None) -> None:
        """A worker has reported its step."""
        self._usual_ns = round((usual_s or 0.0) * _NS)
        # All workers end the same steps: those of the first that reports count.
        if self._rank is None:
            self._rank = rank
        if rank == self._rank:
            saving_ns = round(progress.saving_s * _NS)
            self._mark(
                Stepped(
                    at_ns=self._now_ns(),
                    step=progress.step,
                    saving_ns=saving_ns,
                    usual_ns=self._usual_ns,
                )
            )

    def settled_ns(self) -> Mapping[Use, int]:
        """The use of the time without a step in progress; for any thread."""
        # A counter of Prometheus only grows: what a step in progress is used for is not known yet.
        return self._ledger.used_ns

    def used_ns(self) -> Mapping[Use, int]:
        """The use of the time up to now."""
        return self._ledger.shown(self._now_ns(), reports=self._reports, usual_ns=self._usual_ns)

    def timeline(self) -> Timeline:
        """What the node did up to now, and when."""
        return self._timeline.shown(time.time(), reports=self._reports)

    def _mark(self, mark: Mark) -> None:
        # The ledger adds up durations, by the agent's clock; the timeline has times for people.
        self._ledger = self._ledger.add(mark)
        self._timeline = self._timeline.add(mark, time.time())

    def _now_ns(self) -> int:
        return round(self._clock.now() * _NS)


WAIT_S = 3.0
"""How long the ledgers of the other nodes are waited for, at the end of the job."""
_POLL_S = 0.1


def await_ledgers(
    store: KeyValueStore, job: str, nodes: Collection[str]
) -> tuple[Mapping[Use, int], int]:
    """The time of all nodes that a job has had, by use: each writes its ledger last.

    And the number of nodes whose last seconds are not in it. Without etcd, nothing of any node.
    """
    prefix, until_s = goodput_prefix(job), time.monotonic() + WAIT_S
    while True:
        try:
            items = store.range(prefix).items
        except StoreError:  # a log line is not worth a wait at the end of a job
            return {}, len(nodes)
        ended = {node for node, record in by_node(prefix, items).items() if record.get("last")}
        missing = len(set(nodes) - ended)
        if not missing or time.monotonic() > until_s:
            return add_up(read_goodput(item) for item in items), missing
        time.sleep(_POLL_S)


def in_a_sentence(used_ns: Mapping[Use, int], missing: int) -> str:
    """The time of a job, for its log."""
    text = f"the time of all nodes, {in_words(total_ns(used_ns) / 1e9)}: {in_parts(used_ns)}"
    return f"{text}; the last seconds of {missing} nodes are missing" if missing else text
