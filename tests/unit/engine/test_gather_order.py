"""In which order units are gathered: what a branch leaves out, what the first step has shown."""

from __future__ import annotations

import pytest

from zero_engine.sharding.param_coordinator import Pass, ahead, complete


def test_a_rank_that_runs_every_module_gathers_each_when_it_needs_it() -> None:
    forward = Pass([0, 1, 2])
    assert [forward.seek(unit) for unit in (0, 1, 2)] == [(), (), ()]
    assert forward.end() == ()


def test_a_rank_whose_branch_leaves_modules_out_gathers_them_on_its_way_and_at_the_end() -> None:
    forward = Pass([0, 1, 2, 3, 4])
    assert forward.seek(2) == (0, 1)
    assert list(forward.coming()) == [3, 4]
    assert forward.end() == (3, 4)
    assert forward.end() == ()


def test_what_is_needed_out_of_order_leaves_the_order_alone() -> None:
    forward = Pass([0, 1, 2])
    forward.seek(1)
    assert forward.seek(0) == ()
    assert forward.seek(2) == ()


def test_a_module_that_runs_twice_is_in_the_order_twice() -> None:
    forward = Pass([0, 1, 0, 2])
    assert [forward.seek(unit) for unit in (0, 1, 0, 2)] == [(), (), (), ()]


@pytest.mark.parametrize(
    ("trace", "order"),
    [
        ([0, 1, 2, 3], (0, 1, 2, 3)),
        ([3, 1, 0, 2], (3, 1, 0, 2)),
        ([0, 2, 3], (0, 1, 2, 3)),  # 1 has not run yet: behind the one that precedes it
        ([2, 3], (0, 1, 2, 3)),
        ([], (0, 1, 2, 3)),
        ([0, 1, 0, 2], (0, 1, 0, 2, 3)),
    ],
)
def test_the_order_after_the_first_step_is_what_ran_and_what_may_still_run(
    trace: list[int], order: tuple[int, ...]
) -> None:
    assert complete(trace, range(4)) == order


@pytest.mark.parametrize(
    ("budget", "found"),
    [
        (None, [1]),  # one unit, whatever its size
        (0, []),
        (10, [1]),
        (59, [1, 2]),
        (60, [1, 2, 3]),
    ],
)
def test_units_are_gathered_ahead_within_the_budget(budget: int | None, found: list[int]) -> None:
    assert ahead(iter([1, 2, 3]), [99, 10, 20, 30], budget) == found
