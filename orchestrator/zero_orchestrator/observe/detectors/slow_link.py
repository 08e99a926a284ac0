"""The verdict about a slow link: the network between two nodes is slower than that of the others.

Pure. A probe measures the links of a job (`links`). A link is compared with the others, and with
its own rate in earlier probes. The network is probed some time after the first steps of a round,
when a job becomes slower and no rank explains it (`slowdown`), and again soon after a link was
found to be slow: rarely, whatever the job does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from zero_contract.worker import RankTimes
from zero_orchestrator.membership.job_state import Members
from zero_orchestrator.observe.detectors.detector import Finding, Probed, Question, Report
from zero_orchestrator.observe.detectors.slowdown import Slowdown
from zero_orchestrator.observe.links import Link, in_figures
from zero_orchestrator.observe.verdicts import Kind, Verdict

SLOWER = 3.0
"""A slow link has at most 1 / SLOWER of the usual rate, or SLOWER times the usual latency."""
FAST_BYTES_PER_S = 125e6
"""Such a link is not slow by its rate: one connection of an agent measures no more reliably."""
LATER_S = 0.005
"""The latency of a slow link is longer than usual by so much, at least."""
IN_A_ROW = 3
"""The number of probes in a row that are a verdict."""
FIRST_S = 60.0
"""The first probe of a round comes so long after its first reported steps."""
CONFIRM_S = 10.0
"""The pause after a probe that has found a slow link for the first time."""
RECHECK_S = 120.0
"""The pause between two probes while there is a verdict."""
SOONEST_S = 30.0
"""A slower job is probed so long after the last probe, and twice as long after each probe that has
found nothing, up to `LATEST_S`."""
LATEST_S = 300.0

Way = tuple[str, str]
"""The nodes that send and receive."""


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """A slow link."""

    link: Link
    usual_latency_s: float
    usual_bytes_per_s: float
    """The usual rate of the links that it was compared with."""
    node: str = ""
    """The node whose links are all slow in this direction; empty: it is this link alone."""

    @property
    def factor(self) -> float:
        """How many times slower than usual it is."""
        by_rate = self.usual_bytes_per_s / self.link.bytes_per_s
        return max(by_rate, self.link.latency_s / max(self.usual_latency_s, 1e-6))

    @property
    def where(self) -> frozenset[str]:
        """The node, or the two nodes, between which it is slow."""
        return frozenset([self.node] if self.node else self.link.way)

    @property
    def text(self) -> str:
        """The verdict in words."""
        link, way = self.link, "from" if self.node == self.link.source else "to"
        whole = f"; all links {way} {self.node} are slow: look at its network" if self.node else ""
        return (
            f"the link from {link.source} to {link.target} is slow: {link.figures}; usual: "
            f"{in_figures(self.usual_bytes_per_s, self.usual_latency_s)}{whole}"
        )


def slow_links(links: Iterable[Link], earlier: Mapping[Way, float]) -> list[SlowLink]:
    """The slow links of one probe, the slowest first; `earlier`: their highest rates before."""
    # One that was not measured is told as such, and is no slow link.
    measured = [link for link in links if link.bytes_per_s]
    judged = {link.way: _judge(link, measured, earlier) for link in measured}
    slow = {way: one for way, one in judged.items() if one is not None}
    for place in (0, 1):  # what a node sends, and what it receives
        for node in {way[place] for way in slow}:
            own = [link.way for link in measured if link.way[place] == node]
            if len(own) > 1 and slow.keys() >= set(own):
                slow |= {way: replace(slow[way], node=node) for way in own}
    return sorted(slow.values(), key=lambda one: (-one.factor, one.link.way))


def _judge(link: Link, measured: Sequence[Link], earlier: Mapping[Way, float]) -> SlowLink | None:
    # Without its source, then without its target: in a small job, most links are of a node whose
    # network is slow.
    groups = [
        [other for other in measured if link.source not in other.way],
        [other for other in measured if link.target not in other.way],
        [other for other in measured if other is not link],
    ]
    rates = [median(other.bytes_per_s for other in group) for group in groups if group]
    latencies_s = [median(other.latency_s for other in group) for group in groups if group]
    # Also its own earlier rate: two nodes have no other link.
    usual = max([*rates, earlier.get(link.way, 0.0), link.bytes_per_s])
    usual_s = min([*latencies_s, link.latency_s])
    # Without the time in which either end waited for a CPU: a busy machine is no slow link.
    rate = link.bytes_per_s / max(1 - link.cpu_wait, 0.01)
    latency_s = link.latency_s * (1 - link.cpu_wait)
    slow = rate * SLOWER <= usual and rate < FAST_BYTES_PER_S
    late = latency_s >= max(SLOWER * usual_s, usual_s + LATER_S)
    if not slow and not late:
        return None
    return SlowLink(link=link, usual_latency_s=usual_s, usual_bytes_per_s=usual)


@dataclass(frozen=True, kw_only=True)
class Network:
    """The knowledge about the links of a round."""

    earlier: Mapping[Way, float] = field(default_factory=dict)
    """The highest rate of each link."""
    slow: SlowLink | None = None
    """The slowest link of the last probe, if it was slow."""
    in_a_row: int = 0

    @property
    def verdict(self) -> SlowLink | None:
        """The slow link, if it is a verdict now."""
        return self.slow if self.in_a_row >= IN_A_ROW else None

    def add(self, links: Sequence[Link]) -> Network:
        """The knowledge after one more probe; the same as before if that has measured nothing."""
        if not any(link.bytes_per_s for link in links):
            return self
        rates = {link.way: max(link.bytes_per_s, self.earlier.get(link.way, 0.0)) for link in links}
        earlier = {**self.earlier, **rates}
        found = slow_links(links, self.earlier)
        if not found:
            return Network(earlier=earlier)
        # A slow node shows in any of its links: which of them is the slowest changes by chance.
        again = self.slow is not None and bool(self.slow.where & found[0].where)
        return Network(earlier=earlier, slow=found[0], in_a_row=self.in_a_row + 1 if again else 1)


class SlowLinks:
    """The detector: it says when the network is to be probed as well."""

    asks: Question | None = None

    def __init__(self, members: Members) -> None:
        self._alone = len(members.nodes) < 2  # no link to probe
        self._known, self._slowdown = Network(), Slowdown()
        self._step = 0
        self._due_s: float | None = None
        """When the next probe comes in any case; None: no step is reported yet."""
        self._next_s: float | None = None
        """When it comes at the earliest if the job is slower."""
        self._pause_s = SOONEST_S

    def add(self, report: Report, now_s: float) -> list[Finding]:
        """The slow link, if one is slow."""
        if isinstance(report, RankTimes):
            if self._due_s is None or self._next_s is None:
                self._due_s, self._next_s = now_s + FIRST_S, now_s + self._pause_s
            self._step, self._slowdown = report.step, self._slowdown.add(report)
            due = now_s >= self._due_s or (self._slowdown.is_slower and now_s >= self._next_s)
            if due and not self._alone:
                self.asks = Question.NETWORK
        elif isinstance(report, Probed):
            self._known, self.asks = self._known.add(report.links), None
            # A job that is slower for another reason is probed less and less often.
            self._pause_s = min(2 * self._pause_s, LATEST_S)
            self._next_s = now_s + self._pause_s
            pause_s = CONFIRM_S if self._known.verdict is None else RECHECK_S
            # With nothing to confirm the network is left to the job, until that becomes slower.
            self._due_s = now_s + (float("inf") if self._known.slow is None else pause_s)
        found = self._known.verdict
        return [] if found is None else [self._finding(found)]

    def _finding(self, found: SlowLink) -> Finding:
        link = found.link
        return Finding(
            verdict=Verdict(
                kind=Kind.SLOW_LINK,
                text=found.text,
                node=found.node,
                since_step=self._step,
                factor=round(found.factor, 3),
            ),
            over=f"the link from {link.source} to {link.target} is as fast as usual again, at",
            about={"source": link.source, "target": link.target, "host": found.node},
            facts={
                "bytes_per_s": link.bytes_per_s,
                "usual_bytes_per_s": found.usual_bytes_per_s,
                "latency_s": link.latency_s,
                "usual_latency_s": found.usual_latency_s,
            },
        )
