"""Which of a node's workers is hung, and which only waits for another rank."""

from __future__ import annotations

import pytest

from tests.support.manual_clock import ManualClock
from zero_agent.workers.hang import ANSWER_S, Elsewhere, Judgement, Late, judge
from zero_agent.workers.progress import HangPolicy, Steps
from zero_contract.worker import BEFORE_FIRST_STEP, Preparing, Progress, WaitReply

LATE = "no step for 2.1 s (limit 2.0 s, --hang-timeout)"
FOUR = Elsewhere(world_size=4, lease_s=4.5, patience_s=6.0)
BUSY, WAITS = WaitReply(request=0), WaitReply(request=0, awaits="sums of 1")
GATHERS = WaitReply(request=0, collectives=({"name": "_all_gather_base", "ended": False},))
GATHERED = WaitReply(request=0, collectives=({"name": "_all_gather_base", "ended": True},))
WAITS_IN = "it waits in sums of 1"
SAYS_NOTHING = "it cannot say what it waits for"
MAYBE = "another rank may be the cause"


def late(rank: int = 0, **known) -> Late:
    return Late(rank=rank, verdict=LATE, limit_s=2.0, **{"since_s": 2.1} | known)


def silent(rank: int = 0, **known) -> Late:
    """One that only sends heartbeats."""
    return late(rank, can_say=False, **known)


@pytest.mark.parametrize(
    ("workers", "elsewhere", "hung", "why"),
    [
        # It says what it does, or nothing at all.
        ([late(reply=BUSY)], FOUR, 0, ", and it waits for no other rank"),
        ([late(reply=GATHERED)], FOUR, 0, ", and it waits for no other rank"),
        ([late(owes_s=ANSWER_S)], FOUR, 0, ", and it does not answer"),
        # It waits: as long as another worker, a node or a link may be the cause, it is not hung.
        ([late(reply=WAITS)], FOUR, None, f"; {WAITS_IN}: {MAYBE}"),
        ([late(reply=WAITS, since_s=7.9)], FOUR, None, f"; {WAITS_IN}: {MAYBE}"),
        ([late(reply=WAITS, since_s=8.0)], FOUR, 0, f"; {WAITS_IN}"),
        ([late(reply=GATHERS)], FOUR, None, f"; it waits in _all_gather_base: {MAYBE}"),
        # Two workers of a node: the one for which the other waits, whichever is looked at first.
        ([late(0, reply=WAITS), late(1, reply=BUSY)], FOUR, 1, ", and it waits for no other rank"),
        ([late(0, reply=WAITS), late(1, owes_s=1.0)], FOUR, 1, ", and it does not answer"),
        # All ranks wait: no other one can be the cause.
        ([late(reply=WAITS)], Elsewhere(), 0, f"; {WAITS_IN}"),
        ([late(0, reply=WAITS), late(1, reply=WAITS)], Elsewhere(world_size=2), 0, f"; {WAITS_IN}"),
        # Nothing tells: it is given the time in which the lease of a silent node ends.
        ([silent()], FOUR, None, f"; {SAYS_NOTHING}: {MAYBE}"),
        ([silent(since_s=4.5)], FOUR, 0, f"; {SAYS_NOTHING}"),
        ([silent()], Elsewhere(), 0, ""),
        ([silent(stopped=True)], FOUR, 0, ", and its process is stopped"),
        ([late(0, reply=WAITS), silent(1, since_s=4.5)], FOUR, 1, f"; {SAYS_NOTHING}"),
    ],
)
def test_the_worker_for_which_the_others_wait_is_hung_and_no_other(workers, elsewhere, hung, why):
    assert judge(workers, elsewhere) == Judgement(rank=hung, reason=f"{LATE}{why}")


@pytest.mark.parametrize(
    "workers", [[], [late()], [late(owes_s=0.5)], [late(0, reply=WAITS), late(1)]]
)
def test_nobody_is_judged_who_is_not_late_or_has_not_had_the_time_to_answer(workers):
    assert judge(workers, FOUR) is None


class Node:
    """The steps of one worker, which answers as a test says, and a look at them every tenth."""

    def __init__(self, replies: WaitReply | None = None, elsewhere: Elsewhere = FOUR) -> None:
        self.clock, self.replies, self.asked_s = ManualClock(), replies, []
        self.steps = Steps(HangPolicy(limit_s=2.0), self.clock)
        self.steps.begin({}, elsewhere)
        self.steps.ask = self.ask
        self.steps.beat(0, Progress(step=1))

    def ask(self, rank: int) -> None:
        self.asked_s.append(round(self.clock.now(), 1))
        if self.replies is not None:
            self.steps.answered(rank, self.replies)

    def hung_after_s(self, within_s: float, *, etcd_answers: bool = True) -> float | None:
        for _ in range(round(within_s * 10)):
            self.clock.advance(0.1)
            found = self.steps.too_slow(etcd_answers=etcd_answers)
            if found is not None and found.rank is not None:
                return round(self.clock.now(), 1)
        return None


def test_a_worker_that_does_not_run_is_hung_at_its_limit_and_no_later():
    node = Node()
    assert node.hung_after_s(60) == 2.1
    assert node.asked_s == [1.1]


def test_what_a_worker_did_before_its_limit_does_not_count():
    """It may have been at the end of a long step."""
    node = Node(BUSY)
    node.hung_after_s(1.5)
    node.replies = WAITS
    assert node.hung_after_s(6) is None
    assert node.asked_s[:3] == [1.1, 2.0, 3.0]


def test_one_that_waits_is_given_the_time_in_which_the_cause_is_known():
    assert Node(WAITS).hung_after_s(60) == 8.1


def test_without_etcd_one_that_waits_is_given_more_time_since_nobody_can_tell_it_the_cause():
    node = Node(WAITS)
    assert node.hung_after_s(60, etcd_answers=False) is None
    assert node.hung_after_s(60) == 68.1


def test_a_worker_that_answers_late_because_the_agent_stood_still_is_not_hung():
    """The reply has come, and waits to be read."""
    node = Node()
    node.hung_after_s(1.1)
    node.clock.advance(5.0)
    assert node.hung_after_s(0.1) is None
    node.steps.answered(0, WAITS)
    assert node.hung_after_s(0.5) is None


def test_a_step_in_time_takes_back_the_question():
    node = Node()
    node.hung_after_s(1.5)
    node.steps.beat(0, Progress(step=2))
    assert node.hung_after_s(1.9) is None
    node.steps.beat(0, Progress(step=3))
    assert node.hung_after_s(0.9) is None


class Stayed(Node):
    """A worker that stays in its process in the next round, and is about to take its first step."""

    def __init__(self, replies: WaitReply | None = None) -> None:
        super().__init__(replies)
        self.steps.begin({}, FOUR, stayed=[0])
        self.begun_s = self.clock.now()

    def says(self, what: str) -> None:
        self.steps.prepares(0, Preparing(what=what))


@pytest.mark.parametrize("replies", [BUSY, None], ids=["says so", "does not answer"])
def test_a_process_that_stays_and_hangs_in_its_first_step_is_found_after_five_minutes(replies):
    node = Stayed(replies)
    assert node.hung_after_s(400) is None, "the others are being started"
    node.says(BEFORE_FIRST_STEP)
    node.hung_after_s(200)
    node.says("loading step-000000040.g1.3fa9")
    assert node.hung_after_s(400) is None, "it loads"
    node.says(BEFORE_FIRST_STEP)
    assert node.hung_after_s(400) == pytest.approx(1300, abs=0.3)


def test_a_process_that_stays_waits_in_its_first_step_for_others_that_start():
    node = Stayed(WAITS)
    node.says(BEFORE_FIRST_STEP)
    assert node.hung_after_s(2000) is None


def test_behind_its_first_step_a_process_that_stays_has_the_limit_of_any():
    node = Stayed(BUSY)
    node.says(BEFORE_FIRST_STEP)
    node.hung_after_s(60)
    node.steps.beat(0, Progress(step=2))
    assert node.hung_after_s(60) == pytest.approx(62, abs=0.3)


def test_a_new_process_may_take_any_time_for_its_first_step():
    node = Node(BUSY)
    node.steps.begin({}, FOUR)
    node.steps.prepares(0, Preparing(what=BEFORE_FIRST_STEP))
    assert node.hung_after_s(2000) is None
