"""Which saved param group is which: by the names of all of its parameters, then of the trained."""

from __future__ import annotations

from typing import Any

import pytest

from zero_checkpoint.state.torch_state import matched, numbers_of


def record(params: str, frozen: str | None, **more: Any) -> dict[str, Any]:
    held = {} if frozen is None else {"frozen": list(frozen)}
    return {"params": list(params), **held, "state": {}, **more}


@pytest.mark.parametrize(
    ("saved", "now", "found"),
    [
        ([("a", ""), ("", "b"), ("", "c")], [("", "c"), ("", "b"), ("a", "")], [2, 1, 0]),
        ([("ab", ""), ("c", "")], [("a", "b"), ("", "c")], [0, 1]),  # frozen since then
        ([("a", "b")], [("a", "")], [0]),  # the optimizer does not have what is frozen
        ([("a", "")], [("a", "b")], [0]),
        ([("a", None), ("b", None)], [("b", "x"), ("a", "")], [1, 0]),  # imported
        ([("a", ""), ("a", "b")], [("a", "b"), ("a", "")], [1, 0]),
        ([("a", "")], [("b", "")], [None]),
        ([("a", "")], [("", "b")], [None]),
    ],
)
def test_a_group_is_found_by_its_parameters(saved: Any, now: Any, found: list[int | None]) -> None:
    records = [record(*each) for each in saved]
    numbers = [None if each is None else records.index(each) for each in matched(records, now)]
    assert numbers == found


def test_a_parameter_has_the_numbers_of_its_group_or_its_own() -> None:
    group = record("ab", "cd", state={"step": 3}, own={"b": {}, "c": {"step": 1}})
    assert numbers_of(group) == {"a": {"step": 3}, "b": {}, "c": {"step": 1}}
