"""Who waits for whom: only a circle through the judge is hopeless."""

from __future__ import annotations

import inspect
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from zero_comm.exchange.deadlock import DeadlockDetector, Standing, circle, describe, here


def standing(awaits: str, turn: int = 0, **begun: int) -> Standing:
    return Standing(awaits=awaits, turn=turn, begun={awaits: turn + 1, **begun})


@pytest.mark.parametrize(
    ("standings", "ranks"),
    [
        ({0: standing("a"), 1: standing("b")}, [0, 1]),
        ({0: standing("a"), 1: standing("b", a=1)}, []),  # 1 has begun it: the network is slow
        ({0: standing("a")}, []),  # rank 1 is computing, and may yet begin it
        ({0: standing("a", 1), 1: standing("b", a=1)}, [0, 1]),  # the first a, not the second
        ({0: standing("a"), 1: standing("a")}, []),
        (
            {0: standing("a", c=1), 1: standing("b", a=1), 2: standing("c", b=1)},
            [0, 2, 1],
        ),
        ({0: standing("a", b=1, c=1), 1: standing("b"), 2: standing("c", a=1)}, []),
    ],
)
def test_only_ranks_that_wait_for_each_other_in_a_circle_are_an_error(
    standings: dict[int, Standing], ranks: list[int]
) -> None:
    assert circle(standings, 0) == ranks


def test_a_circle_without_the_judge_is_left_to_its_members() -> None:
    standings = {0: standing("c"), 1: standing("a", c=1), 2: standing("b", c=1)}
    assert circle(standings, 0) == []
    assert circle(standings, 1) == [1, 2]


def test_the_error_names_every_rank_its_node_and_line_and_what_it_waits_for() -> None:
    first = replace(standing("weights of blocks.0"), at="node a, train.py:31")
    standings = {0: first, 1: standing("gradient norms")}
    assert describe(standings, [0, 1]).startswith(
        "the ranks do not do the same, and wait for each other: rank 0 waits for weights of "
        "blocks.0, which rank 1 has not begun (node a, train.py:31); rank 1 waits for gradient "
        "norms, which rank 0 has not begun."
    )


def test_a_place_is_the_node_and_the_line_of_the_script(monkeypatch) -> None:
    monkeypatch.setenv("ZERO_NODE", "a")
    line = inspect.currentframe().f_lineno + 1
    assert here() == f"node a, test_deadlock.py:{line}"


def test_two_ranks_find_their_circle_over_a_store_and_one_that_goes_on_is_no_part_of_it() -> None:
    store = dist.HashStore()
    first, second = DeadlockDetector(store, 0, 2), DeadlockDetector(store, 1, 2)
    turns = first.begin("a"), second.begin("b")
    assert first.look("a", turns[0]) == ""  # nobody knows of the other yet
    found = second.look("b", turns[1])
    assert "rank 1 waits for b, which rank 0 has not begun (test_deadlock.py:" in found
    assert "rank 0 waits for a, which rank 1 has not begun" in first.look("a", turns[0])
    second.end_wait()
    assert first.look("a", turns[0]) == ""


class GoesOnMeanwhile:
    """A store in which the other rank goes on just after one has looked whether it waits."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.other: DeadlockDetector | None = None

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        there = self._store.check(keys)
        assert self.other is not None
        self.other.end_wait()
        return there


def test_a_rank_that_goes_on_while_another_looks_holds_nobody_up() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    board = GoesOnMeanwhile(store)
    first, second = DeadlockDetector(board, 0, 2), DeadlockDetector(store, 1, 2)
    first.begin("a")
    second.begin("b")
    board.other = DeadlockDetector(store, 1, 2)  # has told nothing, so takes nothing back
    first.look("a", 0)
    assert "rank 1 waits for b, which rank 0 has not begun" in second.look("b", 0)
    board.other = second
    assert first.look("a", 0) == ""


class Counting:
    """A store that counts the calls."""

    def __init__(self) -> None:
        self._store, self.calls = dist.HashStore(), 0

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.calls += 1
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return self._store.check(keys)


@pytest.mark.parametrize("world", [2, 64, 127, 128, 1024])
def test_a_look_takes_few_calls_of_the_store_at_every_world_size_and_finds_a_circle(
    world: int,
) -> None:
    board = Counting()
    ranks = [DeadlockDetector(board, rank, world) for rank in range(world)]
    for rank, each in enumerate(ranks):
        each.begin("b" if rank == 1 else "a")
        each._post("b" if rank == 1 else "a", 0)
    board.calls, looks = 0, 2 * max(1, world // 64)
    found = [
        ranks[rank].look("b" if rank == 1 else "a", 0) for _ in range(looks) for rank in (0, 1)
    ]
    assert board.calls <= 2 * looks * 256
    for rank, other in ((0, 1), (1, 0)):
        assert any(f"which rank {other} has not begun" in each for each in found[rank::2])
    if world < 128:  # at once
        assert all(found)
