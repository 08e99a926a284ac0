"""The steps of this node's workers, and which of them takes longer for one than its limit.

Steps come from two sources, which count the same: workers under zero_engine report each step on
their socket (`Progress`), any other script may send heartbeats. The limit is the usual time of a
long step, saves included, times a factor, or that of --hang-timeout. A worker that has sent nothing
never counts as hung, unless its process has stayed from the round before and has its state.

Source of the idea: NVRx's calibrated heartbeat timeouts (x5 of the largest interval seen); the
quantile is ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from msgspec import structs

from zero_agent.node.heartbeat import Heartbeats
from zero_agent.workers.hang import ANSWER_S, Elsewhere, Inquiry, Judgement, Late, judge
from zero_agent.workers.step_times import SpeedMeter, Spent, StepTimes
from zero_contract.clock import Clock
from zero_contract.values import parse_seconds
from zero_contract.worker import (
    BEFORE_FIRST_STEP,
    Preparing,
    Progress,
    Restored,
    Saved,
    SaveWaits,
    WaitReply,
)
from zero_orchestrator.observe.pace import Pace, Speed, add_up, quantiles, stall_s

FACTOR = 10.0
FLOOR_S = 300.0
"""The shortest limit that is learnt from the steps: an evaluation between two steps is no hang."""
OnReport = Callable[[int, Progress, float | None], None]
"""Called with a worker's rank, the step that it reports, and the result of `StepTimes.add`."""
Way = Sequence[tuple[str, float]]
"""What a worker has done before its first step, in order, and the seconds that each of it took."""
STARTING = "starting"
"""What a worker does until it says what it does."""
STOOD_STILL_S = 10.0
"""The agent looks ten times a second. After a longer pause it has stood still, and its workers with
it (`docker pause`, `scontrol suspend`), or it has not read what they reported meanwhile."""
SECOND_STEP_S = 8.0
"""The time that the second step is taken to need."""
LATE_S = 1.0
"""A step that takes longer, and longer than a usual long one, has the links looked at: a round
whose ranks cannot meet is over as well."""
MEETING_S = 10.0
"""If no rank has ended a step after this time, the agents are asked why."""
RECENT_STEPS = 1000
"""The last steps, from whose times the usual time of a long step is taken."""
LONG_PART = 0.99
"""The quantile of them that is this time; the longest step of all is always left out."""


@dataclass(frozen=True, kw_only=True)
class HangPolicy:
    """How the limit of a step is set: --hang-timeout."""

    limit_s: float | None = None
    """A fixed limit; None: learnt from the steps."""
    enabled: bool = True


class StepClock:
    """The steps of one worker in one round."""

    def __init__(self, policy: HangPolicy, first_limit_s: float | None = None) -> None:
        """`first_limit_s` is the limit of the first step of a process that has stayed; seconds."""
        self._policy = policy
        self.first_limit_s = first_limit_s
        self.last_s: float | None = None
        """When the last step has ended."""
        self._took_s: deque[float] = deque(maxlen=RECENT_STEPS)
        """The times between two steps."""
        self._long_s: float | None = None
        """What `long_s` returns, as long as it is known."""

    def beat(self, now_s: float) -> None:
        """A step has ended."""
        if self.last_s is not None:
            self._took_s.append(now_s - self.last_s)
            self._long_s = None
        self.last_s = now_s

    @property
    def long_s(self) -> float | None:
        """The usual time of a long step; None before the second step."""
        if self._long_s is None and self._took_s:
            ordered = sorted(self._took_s)
            # At most the last but one: one very long step must not raise the limit of all others.
            place = min(int(LONG_PART * len(ordered)), len(ordered) - 2)
            self._long_s = ordered[max(place, 0)]
        return self._long_s

    def leave_out(self, pause_s: float) -> None:
        """Do not count this much of the time since the last step."""
        if self.last_s is not None:
            self.last_s += pause_s

    def go_on(self, now_s: float) -> None:
        """A sign of life in the middle of a step: its time begins anew."""
        self.last_s = now_s

    @property
    def limit_s(self) -> float | None:
        """Seconds that the next step may take; None while there is no limit."""
        if not self._policy.enabled or self.last_s is None:
            return None
        if self.first_limit_s is not None:
            return self.first_limit_s
        if self._policy.limit_s is not None:
            return self._policy.limit_s
        # Killing a healthy run is worse than noticing a hang late: minutes at least, and no limit
        # before the second step, since the first compiles, loads and warms up.
        return None if self.long_s is None else max(FLOOR_S, FACTOR * self.long_s)

    @property
    def late_s(self) -> float:
        """When the next step is late; infinity while there is no limit."""
        limit_s = self.limit_s
        return inf if limit_s is None or self.last_s is None else self.last_s + limit_s

    def verdict(self, now_s: float) -> str | None:
        """In what this worker is late, or None if it is not."""
        limit_s = self.limit_s
        if limit_s is None or self.last_s is None or now_s <= self.late_s:
            return None
        how = "--hang-timeout" if self._policy.limit_s is not None else f"{FACTOR:g}x a long step"
        how = how if self.first_limit_s is None else "the first step of a round"
        return f"no step for {now_s - self.last_s:.1f} s (limit {limit_s:.1f} s, {how})"


def parse_hang_timeout(text: str) -> HangPolicy:
    """`auto`, `off`, or a length of time, such as `600` or `10m`.

    Raises:
        ValueError: The text is none of these.
    """
    if text == "auto":
        return HangPolicy()
    if text == "off":
        return HangPolicy(enabled=False)
    limit_s = parse_seconds(text)
    if limit_s == 0:
        raise ValueError(text)
    return HangPolicy(limit_s=limit_s)


class Steps:
    """The steps of one node's workers, from round to round."""

    def __init__(self, policy: HangPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._clocks: dict[int, StepClock] = {}
        self._stayed: dict[int, StepClock | None] = {}
        """Of the ranks whose processes have stayed and have ended no step of this round, the clock
        of the first step; None: it has not begun."""
        self._first_limit_s = FLOOR_S
        self._began_s = clock.now()
        """When the round has begun."""
        self._looked_s: float | None = None
        """When the clocks of this round were looked at last."""
        self._silent_s = -inf
        """When etcd last did not answer."""
        self._elsewhere = Elsewhere()
        self._inquiries: dict[int, Inquiry] = {}
        """By rank, what was asked of the workers that are late, or nearly so."""
        self.ask: Callable[[int], None] = lambda rank: None
        """Asks a worker what it waits for; `answered` receives the reply."""
        self.is_stopped: Callable[[int], bool] = lambda rank: False
        """Whether the kernel says that a worker is stopped."""
        self._heartbeats = Heartbeats({})
        self._reporting: set[int] = set()
        """The ranks that report the steps of this round by messages."""
        self._ended: set[int] = set()
        """The ranks whose workers have ended in this round."""
        self._promised = False
        self._total_steps = 0
        """Steps of the whole job, as a heartbeat of a script has said; 0: none has."""
        self.last: Progress | None = None
        """The last step that any worker of this node has reported, in any round."""
        self.times = StepTimes()
        self._meter = SpeedMeter()
        self.speed: Speed | None = None
        """Over the last minute of the round; replaced, and so read on any thread."""
        self._preparing: dict[int, Preparing] = {}
        """By rank, what a worker does that has ended no step of this round."""
        self._begun: dict[int, list[tuple[str, float]]] = {}
        """By rank, what a worker does before its first step of this round, and when it began."""
        self.ways: Mapping[int, Way] = {}
        """By rank, how the workers came to their first step of this round."""
        self.spent: Mapping[int, Spent] = {}
        """By rank, what the workers have done, in all rounds; replaced, and so read on any thread.
        """
        self.on_report: OnReport = lambda rank, progress, took_s: None
        self.on_saved: Callable[[int, Saved | SaveWaits], None] = lambda rank, saved: None
        """Called with the rank of a worker and the save that has ended, or waits."""

    @property
    def finished(self) -> int | None:
        """The last finished step, 0 before the first; None if the workers do not report steps."""
        if self.last is not None:
            return self.last.step
        return 0 if self._promised else None

    @property
    def begun(self) -> bool:
        """Whether a worker has finished a step of this round."""
        return bool(self._clocks)

    @property
    def preparing(self) -> str:
        """What the worker does that is furthest from its first step; empty: none says."""
        each = self._preparing.values()
        least = min(each, key=lambda one: 1.0 if one.part is None else one.part, default=None)
        if least is None:
            return ""
        return least.what if least.part is None else f"{least.what}: {least.part:.0%}"

    @property
    def pace(self) -> Pace:
        """How fast the workers train in this round."""
        ranks = {str(rank): quantiles(of) for rank, of in sorted(self.times.counts.items())}
        return Pace(
            speed=self.speed,
            counts=add_up(self.times.counts.values()),
            ranks={rank: found for rank, found in ranks.items() if found is not None},
        )

    @property
    def is_late(self) -> bool:
        """Whether workers that report steps take longer than a usual long step, or a second."""
        return self._reports and self.idle_s() > max(LATE_S, self.long_s or 0.0)

    def is_missing(self, part: float = 1.0) -> bool:
        """Whether workers that report steps take longer than `part` of the time for one."""
        missing_s = stall_s(self.long_s or 0.0) if self.begun else MEETING_S
        return self._reports and self.idle_s() > part * missing_s

    @property
    def _reports(self) -> bool:
        return self.begun or self.finished is not None or bool(self._preparing)

    @property
    def may_be_warming_up(self) -> bool:
        """Whether the delay is still short enough to be compilation, loading or a warm-up."""
        if self.begun and self.long_s is None:
            return self.idle_s() <= stall_s(SECOND_STEP_S)
        return not self.begun

    @property
    def long_s(self) -> float | None:
        """The usual time of a long step of the slowest worker; None before their second steps."""
        known = [one.long_s for one in self._clocks.values() if one.long_s is not None]
        return max(known, default=None)

    def idle_s(self) -> float:
        """Seconds since the last step of any worker, or since the round has begun."""
        last = [one.last_s for one in self._clocks.values() if one.last_s is not None]
        return self._clock.now() - max(last, default=self._began_s)

    def begin(
        self,
        heartbeats: Mapping[int, Path],
        elsewhere: Elsewhere | None = None,
        stayed: Iterable[int] = (),
    ) -> None:
        """A round begins; by default on this node alone, and in new processes."""
        # Of the round before, whose clocks are still there. Sums and blocks for another world are
        # made within this time.
        long_s = max(self._policy.limit_s or 0.0, FACTOR * (self.long_s or 0.0))
        self._first_limit_s = max(FLOOR_S, long_s)
        self._clocks, self._inquiries, self._stayed = {}, {}, dict.fromkeys(stayed)
        self._elsewhere = elsewhere or Elsewhere(world_size=len(heartbeats))
        self._began_s = self._clock.now()
        self._reporting, self._ended = set(), set()
        self._looked_s = None
        self._preparing, self._begun, self.ways = {}, {}, {}
        self.times.begin()
        self._meter.begin()
        self.speed = None
        self._heartbeats = Heartbeats(dict(heartbeats))

    def promise(self) -> None:
        """Record that a worker will report its steps."""
        self._promised = True

    def beat(self, rank: int, progress: Progress | None = None) -> None:
        """Record that a worker has ended a step; `progress` if its message says which."""
        if progress is not None:
            self._reporting.add(rank)
        self._step(rank, progress)

    def _step(self, rank: int, progress: Progress | None) -> None:
        """A worker has ended a step; `progress` if it is known which."""
        self._preparing.pop(rank, None)
        self._stayed.pop(rank, None)
        if rank not in self.ways:
            self.ways = {**self.ways, rank: self._way(rank)}
        took_s = self.times.add(rank, self._clock.now(), progress)
        if progress is not None:
            # The script may have said the total once, by a heartbeat.
            total_steps = progress.total_steps or self._total_steps
            progress = structs.replace(progress, total_steps=total_steps)
            self.last = progress
            self._meter.add(progress, self._clock.now())
            self.speed = self._meter.speed
            known = self.spent.get(rank, Spent())
            self.spent = {**self.spent, rank: known.with_progress(progress)}
            self.on_report(rank, progress, took_s)
        self._clocks.setdefault(rank, StepClock(self._policy)).beat(self._clock.now())

    def ended(self, rank: int) -> None:
        """Record that a worker has ended: it takes no more steps, and does not hang."""
        self._ended.add(rank)

    def saved(self, rank: int, saved: Saved) -> None:
        """Record that a save of a worker has ended."""
        known = self.spent.get(rank, Spent())
        self.spent = {**self.spent, rank: known.with_save(saved)}
        self.on_saved(rank, saved)

    def restored(self, rank: int, restored: Restored) -> None:
        """Record that all workers have loaded a checkpoint, as rank 0 reports."""
        known = self.spent.get(rank, Spent())
        self.spent = {**self.spent, rank: known.with_restore(restored)}

    def prepares(self, rank: int, preparing: Preparing) -> None:
        """Record what a worker does before its first step of this round."""
        self._preparing[rank] = preparing
        if rank in self._stayed:
            first = None
            # What comes before, such as a load, has no usual time, and so no limit.
            if preparing.what == BEFORE_FIRST_STEP:
                first = StepClock(self._policy, self._first_limit_s)
                first.go_on(self._clock.now())
            self._stayed[rank] = first
        begun = self._begun.setdefault(rank, [])
        if not begun or begun[-1][0] != preparing.what:
            begun.append((preparing.what, self._clock.now()))

    def _way(self, rank: int) -> Way:
        """What a worker has done from the beginning of the round until now."""
        begun = [(STARTING, self._began_s), *self._begun.pop(rank, [])]
        ends_s = [*(at_s for _, at_s in begun[1:]), self._clock.now()]
        return [(what, round(b - a, 3)) for (what, a), b in zip(begun, ends_s, strict=True)]

    def answered(self, rank: int, reply: WaitReply) -> None:
        """Record what a worker waits for, as it says."""
        if rank in self._inquiries:
            self._inquiries[rank].answered(self._clock.now(), reply)

    def too_slow(self, *, etcd_answers: bool = True) -> Judgement | None:
        """Which worker counts as hung, after a look at every heartbeat file; None: none is late.

        Call it often: a long time between two calls does not count as the workers'.
        """
        now_s = self._clock.now()
        pause_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        # Without etcd nobody learns that another node is lost, or has a worker that hangs.
        self._silent_s = self._silent_s if etcd_answers else now_s
        if pause_s > STOOD_STILL_S:
            # The workers stood still as well, or their reports wait unread in the sockets.
            for clock in self._running.values():
                clock.leave_out(pause_s)
        for rank, beat in self._heartbeats.beats():
            if beat is not None and beat.total_steps:
                self._total_steps = beat.total_steps
            # A heartbeat is a step, unless the worker reports its steps: then it is a sign of life.
            if rank in self._reporting:
                self._clocks[rank].go_on(self._clock.now())
            else:
                self._step(rank, None if beat is None else Progress(**beat._asdict()))
        return judge(list(self._late(now_s, pause_s)), self._elsewhere)

    @property
    def _running(self) -> dict[int, StepClock]:
        """The clocks that run, by rank."""
        first = {rank: clock for rank, clock in self._stayed.items() if clock is not None}
        return first | self._clocks

    def _late(self, now_s: float, pause_s: float) -> Iterator[Late]:
        """The workers that are late; those that are, or soon will be, are asked why."""
        for rank, clock in self._running.items():
            if rank in self._ended or now_s < clock.late_s - ANSWER_S:
                self._inquiries.pop(rank, None)
                continue
            begins = clock.first_limit_s is not None
            # A process that has stayed, or that reports its steps, has the engine, which answers.
            can_say = begins or rank in self._reporting
            inquiry = self._inquiries.setdefault(rank, Inquiry())
            if can_say and inquiry.is_due(now_s, clock.late_s, pause_s):
                self.ask(rank)
            if (verdict := clock.verdict(now_s)) is not None:
                yield Late(
                    rank=rank,
                    verdict=verdict,
                    # Only from etcd does a node learn that another one is to blame.
                    since_s=now_s - max(clock.last_s or 0.0, self._silent_s),
                    limit_s=clock.limit_s or 0.0,
                    begins=begins,
                    can_say=can_say,
                    stopped=not can_say and self.is_stopped(rank),
                    owes_s=inquiry.owes_s,
                    reply=inquiry.since(clock.late_s),
                )


def load_in_words(loaded: Restored, *, begun: bool) -> str:
    """A load for people: workers resume, or load later, as the Trainer loads the best weights."""
    what = "have loaded" if begun else "resume from"
    where = "in memory" if loaded.in_memory else "on disk"
    return (
        f"the workers {what} step {loaded.step}: checkpoint {loaded.tag} {where}, and what they "
        "read of it has its digests"
    )
