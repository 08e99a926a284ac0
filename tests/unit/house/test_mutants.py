"""What `make mutants` changes."""

from __future__ import annotations

from tests.mutants.mutate import mutants

SOURCE = '''
LIMIT = 3


def within(value: int = 1) -> bool:
    """Not changed: this text, defaults, constants of the module."""
    if value > LIMIT and value != 7:
        note(value + 2)
    found: bool | None = True if value else False
    return found
'''


def test_each_decision_operator_number_and_call_is_changed_once() -> None:
    assert sorted(mutant.what for mutant in mutants(SOURCE)) == [
        "2 => 3",
        "7 => 8",
        "False => True",
        "True => False",
        "True if value else False => False if value else True",
        "if value > LIMIT and value != 7: => if not (value > LIMIT and value != 7)",
        "note(value + 2) => None",
        "value != 7 => value == 7",
        "value + 2 => value - 2",
        "value > LIMIT => value >= LIMIT",
        "value > LIMIT and value != 7 => value > LIMIT or value != 7",
    ]
