"""The verdicts about the ranks of a job: made by the agent of rank 0, from what the ranks measure.

Detectors (`zero_orchestrator.observe.detectors`) judge the reports. What they find is a verdict: an
event when it is made, and another one when it is withdrawn; `zero-ctl status` shows what holds. A
verdict changes nothing in the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from zero_agent.loop.node_workers import Post
from zero_agent.node.beside import beside
from zero_contract.clock import Clock
from zero_contract.journal import Journal
from zero_contract.worker import RankTimes
from zero_orchestrator.errors import StoreError
from zero_orchestrator.membership.job_state import NOBODY, Members, Snapshot
from zero_orchestrator.observe import links
from zero_orchestrator.observe.detectors.detector import (
    Detector,
    Evidence,
    Finding,
    Idle,
    Probed,
    Question,
    Report,
    Strains,
)
from zero_orchestrator.observe.detectors.hang import StuckRanks
from zero_orchestrator.observe.detectors.slow_link import SlowLinks
from zero_orchestrator.observe.detectors.slow_storage import SlowStorage
from zero_orchestrator.observe.detectors.straggler import SlowRanks
from zero_orchestrator.observe.events import Publisher, by_node, progress_prefix
from zero_orchestrator.observe.queries import ask_each
from zero_orchestrator.observe.verdicts import STOPS, Kind, Verdict
from zero_orchestrator.store.kv import KeyValueStore

log = logging.getLogger("zero")

Ask = Callable[[Question, Sequence[str]], Report]
"""Asks a question about some nodes."""
ASK_S = 8.0
"""How long the answers of the agents are waited for."""
LISTEN_S = 5.0
"""Interval at which other agents read the verdicts of rank 0's agent while no step is taken."""
DETECTORS: Sequence[Callable[[Members], Detector]] = (
    SlowRanks, SlowStorage, SlowLinks, StuckRanks,
)  # fmt: skip


class Verdicts:
    """The verdicts of the round; used on the agent's thread alone."""

    def __init__(
        self, publisher: Publisher, journal: Journal, clock: Clock, post: Post, ask: Ask
    ) -> None:
        """No verdict yet; `ask` is called on a thread of its own."""
        self._publisher = publisher
        self._journal = journal
        self._clock = clock
        self._post = post
        self._ask = ask
        self._lease = 0
        self._begin(0, NOBODY)

    def _begin(self, n: int, members: Members) -> None:
        self._round, self._members = n, members
        self._detectors = [make(members) for make in DETECTORS]
        self._held: dict[tuple[Kind, int | None], Finding] = {}
        self._asking: set[Question] = set()
        self._step = 0
        """The last step that was reported."""
        self._heard: Verdict | None = None
        """Who is waited for, as the agent of rank 0 says, on another node than that of rank 0."""
        self._listens_again_s: float | None = None
        """The time without a step after which it is read again; None: steps are taken."""

    def follow(self, job: Snapshot, lease: int) -> None:
        """Forget the verdicts of a round that is over, and keep the key of the others alive."""
        before, self._lease = self._lease, lease
        holds, over = bool(self._held), job.n != self._round
        if over:
            self._begin(job.n, job.members)
        # Their key ends with the lease of this agent; a new lease needs the key again.
        if holds and (over or lease != before):
            self._write()

    def add(self, report: Report) -> None:
        """Judge a report: tell what is found and not held, withdraw what is held and not found."""
        if isinstance(report, RankTimes):
            # Of another round, with as many ranks as that had.
            if len(report.compute_s) != self._members.world_size:
                return
            self._step = report.step
        elif isinstance(report, Idle):
            self._step = report.step
        now_s = self._clock.now()
        found: dict[tuple[Kind, int | None], Finding] = {}
        for each in [*self._detectors]:
            try:
                found |= {one.key: one for one in each.add(report, now_s)}
            except Exception:  # a defect of it must not end the agent, nor fill its log
                log.exception("the verdicts of %s end with this round", type(each).__name__)
                self._detectors.remove(each)
        for key in self._held.keys() - found.keys():
            self._tell(self._held.pop(key), holds=False)
        for key in found.keys() - self._held.keys():
            self._held[key] = found[key]
            self._tell(found[key], holds=True)
        for question in {each.asks for each in self._detectors} - self._asking:
            if question is not None:
                self._asking.add(question)
                self._look_into(question)

    def _look_into(self, question: Question) -> None:
        # On a thread, since agents take seconds to answer; the answer is one more report.
        nodes = [node.id for node in self._members.nodes]
        answered = partial(self._post(self._answered), self._round, question)
        beside(lambda: self._ask(question, nodes), answered, "question")

    def _answered(self, n: int, question: Question, report: Report | Exception) -> None:
        if n == self._round:  # else the question was that of a round which is over
            self._asking.discard(question)
            if not isinstance(report, Exception):  # else it is asked again
                self.add(report)

    def _tell(self, finding: Finding, *, holds: bool) -> None:
        kind = finding.verdict.kind
        facts = {"step": self._step, **finding.about, kind.flag: holds}
        text, level = f"{finding.over} step {self._step:,}", logging.INFO
        if holds:
            facts |= finding.facts
            text, level = finding.verdict.text, logging.WARNING
        self._journal.tell(str(kind), text, level=level, **facts)
        self._write()

    def listen(self, idle_s: float | None) -> None:
        """Find out, on another node than that of rank 0, what its agent says; call it often."""
        if idle_s is None:
            self._heard = self._listens_again_s = None
        elif self._listens_again_s is None or idle_s > self._listens_again_s:
            self._listens_again_s = idle_s + LISTEN_S
            self._publisher.read_verdicts(partial(self._post(self._hear), self._round))

    def _hear(self, n: int, verdicts: Sequence[Verdict]) -> None:
        # An answer that comes after a step says nothing of the present.
        if n == self._round and self._listens_again_s is not None:
            self._heard = next((one for one in verdicts if one.kind in STOPS), None)

    @property
    def why_stuck(self) -> str:
        """Who is waited for, if no rank takes a step and it is known; else empty."""
        held = [one.verdict for one in self._held.values() if one.verdict.kind in STOPS]
        stuck = held[0] if held else self._heard
        return "" if stuck is None else stuck.text.partition(": ")[2]

    def _write(self) -> None:
        self._publisher.verdicts(
            [finding.verdict for finding in self._held.values()], lease=self._lease
        )


def ask_through(store: KeyValueStore, job: str, question: Question, nodes: Sequence[str]) -> Report:
    """An `Ask` through etcd; the answer is empty if etcd does not answer."""
    asks, nothing = _ASKS[question]
    try:
        return asks(store, job, nodes)
    except StoreError as error:  # an empty answer, too, ends the detector's wait for one
        log.debug("the question %s has no answer: %s", question, error)
    except Exception:
        log.exception("the question %s has no answer", question)
    return nothing


def _strains(store: KeyValueStore, job: str, nodes: Sequence[str]) -> Strains:
    prefix = progress_prefix(job)
    published = by_node(prefix, store.range(prefix).items)
    return Strains(by_node={node: record.get("strain") or {} for node, record in published.items()})


def _evidence(store: KeyValueStore, job: str, nodes: Sequence[str]) -> Evidence:
    """Ask which nodes do not reach each other, and, if all do, where their workers are."""
    reached = ask_each(store, job, "reach", {node: {} for node in nodes}, within_s=ASK_S)
    dead = {
        frozenset((node, link["to"])): link["why"]
        for node, answer in reached.items()
        for link in answer.record.get("dead", ())
    }
    if dead:
        return Evidence(dead=dead)
    asked = {node: {"waits": True} for node in nodes}
    answers = ask_each(store, job, "stack", asked, within_s=ASK_S)
    return Evidence(stacks={node: answer.record for node, answer in answers.items()})


_ASKS: Mapping[Question, tuple[Callable[[KeyValueStore, str, Sequence[str]], Report], Report]] = {
    Question.STRAIN: (_strains, Strains(by_node={})),
    Question.NETWORK: (lambda *asked: Probed(links=links.probe(*asked)), Probed(links=())),
    Question.WHERE: (_evidence, Evidence()),
}
"""How each question is asked, and its answer without etcd."""
