"""Exchanges that nobody has waited for when the process ends."""

from __future__ import annotations

from typing import Any, cast

from zero_comm.exchange import left_under_way
from zero_comm.exchange.collectives import Pending
from zero_contract.errors import PeerLost


class Group:
    """A group whose exchanges end, or are lost."""

    def __init__(self, *, is_lost: bool) -> None:
        self.is_lost, self.finished = is_lost, 0

    def finish(self, _pending: Pending) -> None:
        self.finished += 1
        if self.is_lost:
            raise PeerLost("a peer is gone")


def test_the_end_of_a_process_waits_for_exchanges_behind_one_that_is_lost() -> None:
    groups = Group(is_lost=True), Group(is_lost=False)
    for each in groups:
        left_under_way.leave(Pending("weights", group=cast(Any, each)))
    left_under_way._end()
    left_under_way.forget()
    assert [each.finished for each in groups] == [1, 1]
