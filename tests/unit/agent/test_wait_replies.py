"""What workers wait for is known by their replies to this question, and to no earlier one."""

from __future__ import annotations

import json

from zero_contract.channel import WaitReplies
from zero_contract.worker import WaitReply


def test_the_replies_to_a_question_are_those_that_came_in_time_and_not_those_to_an_earlier_one():
    replies = WaitReplies()

    def first(number: int) -> None:
        replies.add(0, WaitReply(request=number, awaits="the first"))

    (found,) = replies.collect([0], first, 10).values()
    assert json.loads(json.dumps(found)) == {
        **{"request": 1, "awaits": "the first", "turn": 0, "waited_s": 0.0},
        **{"begun": 0, "last": "", "collectives": []},
    }

    def second(number: int) -> None:
        replies.add(0, WaitReply(request=number - 1, awaits="the first"))
        replies.add(1, WaitReply(request=number, awaits="the second"))

    in_time = replies.collect([0, 1], second, 0.01)
    assert {rank: one["awaits"] for rank, one in in_time.items()} == {1: "the second"}
