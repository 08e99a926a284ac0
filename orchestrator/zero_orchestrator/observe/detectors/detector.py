"""The contract of all detectors: reports about the ranks of a round in, findings out.

A detector has state, and does nothing else: no I/O, no thread, no clock. Where reports alone do not
tell the cause, it says which `Question` is to be asked; the answer is one more report. The agent of
rank 0 runs all of them in one loop (`zero_agent.loop.observed.judging`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from zero_contract.worker import RankTimes
from zero_orchestrator.membership.dead_links import Pair
from zero_orchestrator.observe.links import Link
from zero_orchestrator.observe.verdicts import Kind, Verdict


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Whether steps are taken."""

    step: int
    """The last step."""
    idle_s: float | None
    """Seconds since it, if that is unusually long; None: steps are taken."""
    warming_up: bool = False
    """The first steps of the round may take long."""


@dataclass(frozen=True, kw_only=True)
class Strains:
    """The strains of the nodes, as they publish them."""

    by_node: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Probed:
    """The result of a probe of the network between the nodes."""

    links: Sequence[Link]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The answers of the agents of all nodes when no rank takes a step."""

    dead: Mapping[Pair, str] = field(default_factory=dict)
    """The dead links between them, and what was found."""
    stacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The stacks and waits of their workers, by node; empty if a link is dead."""


Report = RankTimes | Idle | Strains | Probed | Evidence


class Question(StrEnum):
    """A question of a detector; the answer is a report."""

    STRAIN = "strain"
    """What slows the nodes down? `Strains`."""
    NETWORK = "network"
    """How fast are the links? `Probed`."""
    WHERE = "where"
    """Who reaches whom, and where are the workers? `Evidence`."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A verdict that holds about the ranks of a round."""

    verdict: Verdict
    over: str
    """The begin of the text of the event that tells its end; the last step follows."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the events of its beginning and of its end."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the event of its beginning."""

    @property
    def key(self) -> tuple[Kind, int | None]:
        """What it is about: there is one of each kind, and one of each straggler."""
        kind = self.verdict.kind
        return kind, self.verdict.rank if kind is Kind.STRAGGLER else None


class Detector(Protocol):
    """Judges the reports of one round."""

    @property
    def asks(self) -> Question | None:
        """The question to ask now; None: none."""

    def add(self, report: Report, now_s: float) -> Sequence[Finding]:
        """The findings after one more report; a report that it does not know changes nothing."""
