"""What workers wait for is known by their replies to this question, and to no earlier one."""

from __future__ import annotations

from zero_agent.workers.channel import WaitReplies
from zero_contract.worker import WaitReply


def test_the_replies_to_a_question_are_those_that_came_in_time_and_not_those_to_an_earlier_one():
    replies = WaitReplies()

    def first(number: int) -> None:
        replies.add(0, WaitReply(request=number, awaits="the first"))

    assert replies.collect([0], first, 10) == {0: WaitReply(request=1, awaits="the first")}

    def second(number: int) -> None:
        replies.add(0, WaitReply(request=number - 1, awaits="the first"))
        replies.add(1, WaitReply(request=number, awaits="the second"))

    in_time = {1: WaitReply(request=2, awaits="the second")}
    assert replies.collect([0, 1], second, 0.01) == in_time
