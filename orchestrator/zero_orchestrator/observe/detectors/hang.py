"""The verdict about a job that takes no step: which rank the others wait for, and where it is.

Pure. Each rank says which exchange it waits for and how many it has begun (`zero_comm` counts
them), and where its program is (`stacks`). A rank that answers nothing is described by its kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from zero_contract.user_files import is_own
from zero_orchestrator.membership.job_state import Members, link_in_words
from zero_orchestrator.observe.detectors import flight
from zero_orchestrator.observe.detectors.detector import Evidence, Finding, Idle, Question, Report
from zero_orchestrator.observe.detectors.flight import Collective
from zero_orchestrator.observe.stacks import Frame, from_answer
from zero_orchestrator.observe.verdicts import Kind, Verdict

AGAIN_S = 15.0
"""After this time the agents are asked again if their answers name no rank, and later whenever the
time since the last step has doubled: a question interrupts all workers, and etcd keeps its answers
for an hour."""
SHOWN = 4
"""The number of ranks that a verdict names one by one."""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The state of one rank."""

    rank: int
    node: str
    awaits: str = ""
    """The exchange that it waits for; empty if it waits for none."""
    turn: int = 0
    """The number of earlier exchanges of that name."""
    begun: int | None = None
    """The number of exchanges that it has begun; None: not known."""
    last: str = ""
    """The exchange that it has begun last."""
    frames: tuple[Frame, ...] = ()
    """The stack of its main thread, the most recent call first."""
    collectives: tuple[Collective, ...] = ()
    """The last collectives that torch has recorded."""
    problem: str = ""
    """Why it does not say where it is."""

    @property
    def place(self) -> str:
        """The place of its program: the innermost function that is the user's own."""
        if not self.frames:
            return self.problem or "unknown"
        frame = next((f for f in self.frames if is_own(f.file)), self.frames[0])
        return f"{frame.function} ({PurePath(frame.file).name}:{frame.line})"


def states(answers: Mapping[str, Mapping[str, Any]]) -> list[RankState]:
    """The state of each rank, from the answers of the nodes to the question `stack`."""
    found = []
    for node, record in answers.items():
        waits = {one.get("rank"): one.get("wait") or {} for one in record.get("ranks", ())}
        for stack in from_answer(node, record):
            if stack.rank is None:
                continue
            wait = waits.get(stack.rank, {})
            found.append(
                RankState(
                    rank=stack.rank,
                    node=node,
                    awaits=wait.get("awaits", ""),
                    turn=wait.get("turn", 0),
                    begun=wait.get("begun"),
                    last=wait.get("last", ""),
                    collectives=flight.from_answer(wait.get("collectives", ())),
                    frames=stack.threads[0].frames if stack.threads else (),
                    problem=stack.problem,
                )
            )
    return sorted(found, key=lambda state: state.rank)


@dataclass(frozen=True, kw_only=True)
class Hang:
    """The ranks that others wait for."""

    ranks: tuple[int, ...]
    """The ranks that the others wait for; all, if none can be told from the others."""
    text: str


def judge(ranks: Sequence[RankState]) -> Hang | None:
    """Which ranks the others wait for; None if nothing shows that a rank waits for another."""
    return next((found for rule in _RULES if (found := rule(ranks)) is not None), None)


def _does_not_wait(ranks: Sequence[RankState]) -> Hang | None:
    """Some ranks wait for an exchange, and others do something else."""
    waiting = [one for one in ranks if one.awaits]
    busy = [one for one in ranks if not one.awaits]
    if not waiting or not busy:
        return None
    what = Counter(one.awaits for one in waiting).most_common(1)[0][0]
    # One that does not count its exchanges may be waiting as well.
    own = [one for one in busy if one.begun is not None or one.problem]
    text = f"{_each(own or busy)}; {_others(waiting)} for it in {what}, from {waiting[0].place}"
    return Hang(ranks=tuple(one.rank for one in own or busy), text=text)


def _waits_for_another(ranks: Sequence[RankState]) -> Hang | None:
    """All ranks wait, but not for the same exchange."""
    if not ranks or not all(one.awaits for one in ranks):
        return None
    odd, others = _odd(ranks, lambda one: (one.awaits, one.turn))
    if not odd:
        text = f"all ranks wait in {ranks[0].awaits}, from {ranks[0].place}: the network between"
        return Hang(ranks=tuple(one.rank for one in ranks), text=f"{text} them may be interrupted")
    text = "; ".join(f"{_who(one)} waits in {_exchange(one)}" for one in odd[:SHOWN])
    text += f"; {_others(others)} in {_exchange(others[0])}"
    return Hang(ranks=tuple(one.rank for one in odd), text=f"the collectives differ: {text}")


def _collectives_differ(ranks: Sequence[RankState]) -> Hang | None:
    """The collectives that torch has recorded are not the same on all ranks."""
    found = flight.compare({one.rank: one.collectives for one in ranks if one.collectives})
    if found is None:
        return None
    named = f"{found.usual.text} (number {found.usual.number} of group {found.usual.group})"
    others = f"{found.others} rank{'s have' if found.others > 1 else ' has'} issued {named}"
    states = {one.rank: one for one in ranks}
    words = [
        f"{_who(states[rank])} has "
        + (f"issued {issued.text}" if issued else f"not issued it, and is in {states[rank].place}")
        for rank, issued in [*found.odd.items()][:SHOWN]
    ]
    text = f"the collectives differ: {'; '.join(words)}; {others}"
    return Hang(ranks=tuple(found.odd), text=text)


def _has_begun_fewer(ranks: Sequence[RankState]) -> Hang | None:
    """The exchanges are a GPU's, which no thread waits for: who has begun fewer of them."""
    # A rank that has begun none hangs before its first one; None says that it does not count them.
    known = [one for one in ranks if one.begun is not None]
    most = max((one.begun or 0 for one in known), default=0)
    late = [one for one in known if (one.begun or 0) < most]
    if not late:
        return None
    last = next(one.last for one in known if one.begun == most)
    text = f"{_each(late)}, and has not begun {last}, as the others have"
    return Hang(ranks=tuple(one.rank for one in late), text=text)


def _is_elsewhere(ranks: Sequence[RankState]) -> Hang | None:
    """Nothing is known of exchanges: who is at another place of the program."""
    odd, others = _odd(ranks, lambda one: one.place)
    if not odd:
        return None
    text = f"{_each(odd)}; {_others(others, verb='are')} in {others[0].place}"
    return Hang(ranks=tuple(one.rank for one in odd), text=text)


# What ranks say of themselves goes before what their places in the program suggest.
_RULES: Sequence[Callable[[Sequence[RankState]], Hang | None]] = (
    _does_not_wait,
    _waits_for_another,
    _collectives_differ,
    _has_begun_fewer,
    _is_elsewhere,
)
"""The first rule that finds a hang counts."""


def _odd(
    ranks: Sequence[RankState], key: Callable[[RankState], Hashable]
) -> tuple[list[RankState], list[RankState]]:
    """The ranks that differ from the most frequent key, and those that have it."""
    if not ranks:
        return [], []
    # Of two keys that are equally frequent, the one of the lowest rank: it comes first.
    usual = Counter(map(key, ranks)).most_common(1)[0][0]
    return [o for o in ranks if key(o) != usual], [o for o in ranks if key(o) == usual]


def _who(one: RankState) -> str:
    return f"rank {one.rank} on {one.node}"


def _exchange(one: RankState) -> str:
    number = f" (number {one.turn + 1} of this name)" if one.turn else ""
    return f"{one.awaits}{number}, from {one.place}"


def _each(ranks: Sequence[RankState]) -> str:
    words = [f"{_who(one)}{' is in' if one.frames else ':'} {one.place}" for one in ranks[:SHOWN]]
    words += [f"{len(ranks) - SHOWN} more ranks as well"] if len(ranks) > SHOWN else []
    return "; ".join(words)


def _others(ranks: Sequence[RankState], verb: str = "wait") -> str:
    if len(ranks) == 1:
        return f"{_who(ranks[0])} {'is' if verb == 'are' else 'waits'}"
    return f"{len(ranks)} ranks {verb}"


class StuckRanks:
    """The detector: when no rank takes a step, the agents of all nodes are asked why."""

    asks: Question | None = None

    def __init__(self, members: Members) -> None:
        self._members = members
        self._since: Idle | None = None
        """What was known when the agents were asked; None: steps are taken."""
        self._asks_again_s = 0.0
        """The time without a step after which they are asked again."""
        self._found: Finding | None = None

    def add(self, report: Report, now_s: float) -> list[Finding]:
        """The ranks that are waited for, if they are known."""
        if isinstance(report, Idle):
            if report.idle_s is None:
                self._since, self._found, self._asks_again_s = None, None, 0.0
            elif self._found is None and report.idle_s > self._asks_again_s:
                self._since = report
                self._asks_again_s = report.idle_s + max(AGAIN_S, report.idle_s)
                self.asks = Question.WHERE
        elif isinstance(report, Evidence):
            self.asks = None
            # Else steps have been taken while the agents answered, who then tell of no hang.
            if self._since is not None:
                self._found = self._judge(self._since, report)
        return [] if self._found is None else [self._found]

    def _judge(self, since: Idle, found: Evidence) -> Finding | None:
        told = f"no step for {since.idle_s:.0f} s, since step {since.step:,}"
        over = "steps are taken again, after"
        # What ranks wait for follows from a dead link.
        if found.dead:
            links = (link_in_words(self._members, pair, why) for pair, why in found.dead.items())
            text = f"{told}: {'; '.join(links)}"
            hosts = sorted({node for pair in found.dead for node in pair})
            verdict = Verdict(kind=Kind.DEAD_LINK, text=text, since_step=since.step)
            return Finding(verdict=verdict, over=over, facts={"hosts": hosts})
        # Ranks that compile and load differ without a fault; a dead link counts all the same.
        hang = None if since.warming_up else judge(self._ranks(found))
        # All ranks do the same, such as an evaluation: that is slow, and no hang.
        if hang is None:
            return None
        hosts = sorted({self._members.node_of(rank).id for rank in hang.ranks})
        verdict = Verdict(
            kind=Kind.STUCK,
            text=f"{told}: {hang.text}",
            # A verdict names one rank or node; those of several are in the text and the facts.
            rank=hang.ranks[0] if len(hang.ranks) == 1 else None,
            node=hosts[0] if len(hosts) == 1 else "",
            since_step=since.step,
        )
        facts = {"ranks": list(hang.ranks), "hosts": hosts}
        return Finding(verdict=verdict, over=over, facts=facts)

    def _ranks(self, found: Evidence) -> list[RankState]:
        """The state of each rank; of a node whose agent does not answer, that."""
        first, ranks = 0, states(found.stacks)
        for node in self._members.nodes:
            if not found.stacks.get(node.id):
                silent = "its agent does not answer"
                ranks += [
                    RankState(rank=rank, node=node.id, problem=silent)
                    for rank in range(first, first + node.slots)
                ]
            first += node.slots
        return ranks
