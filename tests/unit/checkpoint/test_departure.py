"""How a worker leaves: with a save of the engine's, after one of the script's, or without."""

from __future__ import annotations

import itertools

import pytest

from zero_checkpoint.saving.departure import Departure, Script, choose_departure

FACTS = ("directory_known", "script_has_state", "script_has_saved", "script_asks")
CASES = [dict(zip(FACTS, values, strict=True)) for values in itertools.product((0, 1), repeat=4)]


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("facts", CASES, ids=lambda facts: "".join(map(str, facts.values())))
def test_only_what_the_engine_can_save_completely_is_saved_at_once(
    facts: dict[str, int], engines: int
) -> None:
    known, state, saved, asks = facts.values()
    departure, why = choose_departure(
        engines=engines, **{name: bool(value) for name, value in facts.items()}
    )
    waits = state or (asks and not saved) or (known and engines > 1)
    expected = Departure.AWAIT_SAVE if waits else Departure.SAVE_AND_LEAVE
    assert departure is (expected if waits or known else Departure.LEAVE)
    assert why


def test_what_the_engine_saves_beside_the_state_is_what_the_script_has_named() -> None:
    assert Script().client_state() == {}
    assert Script(client_source=lambda: {"epoch": 3}).client_state() == {"epoch": 3}
