"""The states of a micro-step: what a script calls is a legal move, or an error that helps."""

from __future__ import annotations

import itertools

import pytest

from zero_contract.errors import ZeroError
from zero_engine.sharding.grad_reducer import CALLS
from zero_step.phase import ILLEGAL, LEGAL, Move, Phase, State


def phase(state: State) -> Phase:
    made = Phase(CALLS)
    made.state = state
    return made


@pytest.mark.parametrize(("move", "state"), list(itertools.product(Move, State)))
def test_a_move_is_legal_or_an_error_that_changes_nothing(move: Move, state: State) -> None:
    sources, target = LEGAL[move]
    now = phase(state)
    if state in sources:
        now.move(move)
        assert now.state is target
        return
    with pytest.raises(ZeroError if (move, state) in ILLEGAL else ValueError):
        now.move(move)
    assert now.state is state


def test_every_state_is_reached_and_is_left() -> None:
    reached = {target for _, target in LEGAL.values()}
    left = {source for sources, target in LEGAL.values() for source in sources if source != target}
    assert reached == left == set(State)


def test_no_move_is_both_legal_and_illegal() -> None:
    assert not any(state in LEGAL[move][0] for move, state in ILLEGAL)


def test_an_error_names_the_calls_of_the_script() -> None:
    now = phase(State.FAILED)
    with pytest.raises(ZeroError, match=r"half way.*engine\.load_checkpoint\(\)"):
        now.move(Move.STEP)


def test_a_micro_step_that_is_none_of_the_scripts_leaves_the_state_as_it_was() -> None:
    now = phase(State.READY)
    with now.aside():
        now.move(Move.BEGIN)
    assert now.state is State.READY


@pytest.mark.parametrize("state", State)
def test_a_micro_step_has_begun_with_a_gradient_and_has_run_with_all_of_them(state: State) -> None:
    now = phase(state)
    assert now.begun == (state not in (State.READY, State.DRAWN))
    assert not now.has_run or now.begun
