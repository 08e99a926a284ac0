"""The goodput ledger: what the time of each node of a job was used for.

An agent marks what its node does, and each step that its workers finish. `Ledger` turns the marks
of one agent into nanoseconds for each `Use`; it is a value, and `Ledger.add` a pure function. The
ledger of a job is the sum of those of its agents, so the clocks of two nodes are never compared.
The use of the time of a running worker is known only at the end of a step. Until then the time is
`pending`. Every nanosecond belongs to one use or is pending: the ledger counts in integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from zero_orchestrator.observe.pace import stalls


class Use(StrEnum):
    """What the time of a node was used for."""

    USEFUL = "useful steps"
    REPEATED = "repeated steps"
    SAVING = "save stalls"
    STUCK = "stuck"
    REFORMING = "re-forming"
    WAITING = "waiting for nodes"
    STARTING = "starting and ending"
    IDLE = "idle"
    UNREPORTED = "unreported"


USES: Mapping[Use, str] = MappingProxyType(
    {
        Use.USEFUL: "steps that no worker of the job had finished before",
        Use.REPEATED: "steps that were finished before, and lost by a failure",
        Use.SAVING: "training waits for a checkpoint",
        Use.STUCK: "a step takes unusually long: what is above the usual time of a long one",
        Use.REFORMING: "from the last step of a round to the first step of the next one",
        Use.WAITING: "too few nodes for a round",
        Use.STARTING: "from the start of an agent to the first step of its workers, and from their "
        "last step to its end",
        Use.IDLE: "the node is not in the round: a spare, excluded, unhealthy or leaving",
        Use.UNREPORTED: "workers run that report no steps",
    }
)
"""Every use, and what it means."""


class Doing(StrEnum):
    """What a node does from a mark on."""

    STARTING = "starting"
    WAITING = "waiting"
    FORMING = "forming"
    RUNNING = "running"
    IDLE = "idle"
    ENDING = "ending"


@dataclass(frozen=True, kw_only=True)
class Begins:
    """From now on the node does this."""

    at_ns: int
    doing: Doing
    """RUNNING: a new round, even if workers ran until now."""
    reached: int = 0
    """The last step that any worker of the job is known to have finished."""
    reports: bool = True
    """Whether the workers that ran until now report their steps."""


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A worker, always the same one in a round, reports its last step: at its end, or later."""

    at_ns: int
    step: int
    saving_ns: int = 0
    """Time for which saves have blocked the worker since its last report."""
    usual_ns: int = 0
    """The usual time of a long step; 0: not known."""


Mark = Begins | Stepped

_WITHOUT_WORKERS: Mapping[Doing, Use] = MappingProxyType(
    {
        Doing.STARTING: Use.STARTING,
        Doing.WAITING: Use.WAITING,
        Doing.IDLE: Use.IDLE,
        Doing.ENDING: Use.STARTING,
    }
)


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The time of one agent, up to its last mark."""

    at_ns: int
    """Time of the last mark, by the clock of the agent."""
    doing: Doing = Doing.STARTING
    used_ns: Mapping[Use, int] = field(default_factory=dict)
    pending_ns: int = 0
    """Time of the step that has not ended."""
    reached: int = 0
    """The last step that any worker of the job is known to have finished."""
    step: int | None = None
    """The last step of this round; None before the first."""
    began: bool = False
    """Whether a step has ended in any round of this node."""

    @property
    def total_ns(self) -> int:
        """All time since the first mark."""
        return total_ns(self.used_ns) + self.pending_ns

    def add(self, mark: Mark) -> Ledger:
        """The ledger after one more mark; a mark that is older than the last one takes no time."""
        now = self._until(mark.at_ns)
        return now._begin(mark) if isinstance(mark, Begins) else now._report(mark)

    def shown(self, at_ns: int, *, reports: bool = True, usual_ns: int = 0) -> Mapping[Use, int]:
        """The use of the time up to now; pending time counts as if its step were about to end."""
        now = self._until(at_ns)
        use = now._use_of_step((now.step or 0) + 1, reports=reports)
        return now._settle_step(use, usual_ns).used_ns

    def _until(self, at_ns: int) -> Ledger:
        # The report of a step may come after a later mark of the agent: time does not go back.
        at_ns = max(at_ns, self.at_ns)
        passed_ns, now = at_ns - self.at_ns, replace(self, at_ns=at_ns)
        if self.doing is Doing.RUNNING:
            return replace(now, pending_ns=self.pending_ns + passed_ns)
        if self.doing is Doing.FORMING:
            return now._spend(Use.REFORMING if self.began else Use.STARTING, passed_ns)
        return now._spend(_WITHOUT_WORKERS[self.doing], passed_ns)

    def _begin(self, mark: Begins) -> Ledger:
        if self.step is None:
            use = self._use_of_step(1, reports=mark.reports)
        else:  # the last step was cut off, or was the last of all
            use = Use.STARTING if mark.doing is Doing.ENDING else Use.REFORMING
        reached = max(self.reached, mark.reached)
        return replace(self._settle(use), doing=mark.doing, reached=reached, step=None)

    def _report(self, mark: Stepped) -> Ledger:
        reached = max(self.reached, mark.step)
        # A report that was under way when the round ended: its time is accounted for.
        if self.doing is not Doing.RUNNING:
            return replace(self, reached=reached)
        # At most what is pending, or some time would have two uses.
        saving_ns = min(mark.saving_ns, self.pending_ns)
        now = replace(self, pending_ns=self.pending_ns - saving_ns)._spend(Use.SAVING, saving_ns)
        if mark.step == self.step:  # reported again: only its saves are new
            return now
        settled = now._settle_step(self._use_of_step(mark.step, reports=True), mark.usual_ns)
        return replace(settled, reached=reached, step=mark.step, began=True)

    def _use_of_step(self, step: int, *, reports: bool) -> Use:
        """The use of the pending time if this step ends now."""
        if not reports:
            return Use.UNREPORTED
        # From the start of the workers to the end of their first step: it contains imports, the
        # load of a checkpoint and compilation.
        if self.step is None:
            return Use.REFORMING if self.began else Use.STARTING
        return Use.USEFUL if step > self.reached else Use.REPEATED

    def _settle_step(self, use: Use, usual_ns: int) -> Ledger:
        """The ledger if the step ends now; a part of the pending time may be no step at all."""
        # Useful for as long as a long step usually takes; the rest of the time the job was stuck.
        is_step = use in {Use.USEFUL, Use.REPEATED}
        if not (is_step and usual_ns and stalls(self.pending_ns / 1e9, usual_ns / 1e9)):
            return self._settle(use)
        stuck_ns = self.pending_ns - min(usual_ns, self.pending_ns)
        step = replace(self, pending_ns=self.pending_ns - stuck_ns)
        return step._spend(Use.STUCK, stuck_ns)._settle(use)

    def _settle(self, use: Use) -> Ledger:
        return replace(self, pending_ns=0)._spend(use, self.pending_ns)

    def _spend(self, use: Use, time_ns: int) -> Ledger:
        if not time_ns:
            return self
        return replace(self, used_ns=add_up([self.used_ns, {use: time_ns}]))


# ---- the ledger of a job ----


def add_up(ledgers: Iterable[Mapping[Use, int]]) -> dict[Use, int]:
    """The sum of several nodes' time, in nanoseconds, for each use that took any."""
    used_ns: dict[Use, int] = {}
    for ledger in ledgers:
        for use, time_ns in ledger.items():
            used_ns[use] = used_ns.get(use, 0) + time_ns
    return used_ns


def total_ns(used_ns: Mapping[Use, int]) -> int:
    """All time of a ledger."""
    return sum(used_ns.values())


def goodput(used_ns: Mapping[Use, int]) -> float | None:
    """The part of the time that useful steps took, 0 to 1; None without any time."""
    all_ns = total_ns(used_ns)
    return used_ns.get(Use.USEFUL, 0) / all_ns if all_ns else None


def in_parts(used_ns: Mapping[Use, int]) -> str:
    """A ledger for people: `91.3 % useful steps, 6.1 % re-forming, ...`; the largest part first.

    Useful steps come first, and not at all where no step was reported.
    """
    all_ns = total_ns(used_ns)
    if not all_ns:
        return "no time yet"
    rest = sorted((use for use in used_ns if use is not Use.USEFUL), key=lambda u: -used_ns[u])
    silent = not used_ns.get(Use.USEFUL) and used_ns.get(Use.UNREPORTED)
    uses = rest if silent else [Use.USEFUL, *rest]
    return ", ".join(f"{100 * used_ns.get(use, 0) / all_ns:.1f} % {use}" for use in uses)


def to_record(used_ns: Mapping[Use, int]) -> dict[str, int]:
    """The ledger as JSON: nanoseconds by the use's name, such as `save_stalls`."""
    return {_name(use): time_ns for use, time_ns in used_ns.items()}


def from_record(record: Mapping[str, Any]) -> dict[Use, int]:
    """The ledger in a record; time of a use that this version does not know is UNREPORTED.

    Raises:
        ValueError: The record has a value that is no number of nanoseconds.
    """
    known = {_name(use): use for use in Use}
    found = [{known.get(name, Use.UNREPORTED): int(time_ns)} for name, time_ns in record.items()]
    return add_up(found)


def _name(use: Use) -> str:
    return use.replace(" ", "_").replace("-", "_")
