"""Whatever loop a script writes, each sample is trained once and in the same order."""

from __future__ import annotations

import copy
import io
import itertools
import tempfile
from collections import deque
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.numerics.promises.back_ends import Recipe, training
from tests.support.loops import (
    FURTHER,
    KINDS,
    Operations,
    ahead,
    ledger_problems,
    segment,
    train,
    undisturbed,
)
from tests.support.world import WorldPool
from zero_contract.errors import ZeroError


@pytest.fixture(scope="module")
def expected(worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights after each step of a loop that nothing happens to, in one process."""

    @cache
    def of(kind: str) -> list[str]:
        root = tmp_path_factory.mktemp("undisturbed")
        hashes: list[str] = worlds.run(1, undisturbed, kind, str(root))[0]
        assert ledger_problems(str(root)) == ()
        return hashes

    return of


def check(
    worlds: WorldPool, expected: Any, kind: str, root: str, lives: list[tuple[int, Operations]]
) -> None:
    for number, (world, operations) in enumerate(lives, 1):
        ranks = worlds.run(world, segment, kind, root, number, operations)
        step, _ = ranks[0]
        assert ranks == [(step, expected(kind)[step])] * world
    assert ledger_problems(root) == ()


LOOPS: dict[str, Operations] = {
    "left at its top": [("run", 3), ("drop", 0), ("run", 2), ("drop", 0), ("save", 0), ("run", 6)],
    "zip": [("zip", 4), ("zip", 6), ("run", 1)],
    "one drawn ahead": [("enter", 1), ("run", 13), ("save", 0), ("run", 14)],
    "two drawn ahead": [("enter", 2), ("run", 40)],
    "rolled back": [("run", 5), ("save", 0), ("run", 8), ("rollback", 0), ("run", 12)],
    "rolled back at once": [("run", 3), ("rollback", 0), ("run", 12)],
    "rolled back over epochs": [
        ("save", 0),
        ("epoch", 0),
        ("run", 3),
        ("rollback", 0),
        ("run", 30),
    ],
}


@pytest.mark.parametrize("case", [*itertools.product(LOOPS, KINDS)], ids=", ".join)
@pytest.mark.corners(case=[*zip(LOOPS, itertools.cycle(["engine", "protect"]), strict=False)])
def test_a_loop_trains_each_sample_once_to_the_bits_of_a_plain_one(
    worlds: WorldPool, expected: Any, tmp_path: Path, case: tuple[str, str]
) -> None:
    loop, kind = case
    check(worlds, expected, kind, str(tmp_path), [(2, LOOPS[loop]), (1, [("run", 2)])])


# ---- loops that draw where others do not ----


def drawn_between(kind: str, root: str) -> tuple[int, str]:
    """The next batch is drawn while the gradients of this one travel, before its step."""
    trainer = KINDS[kind](root)
    while trainer.step < 7:
        batches = iter(trainer.loader)
        rows = next(batches, None)
        while rows is not None:
            trainer.backward(rows)
            rows = next(batches, None)
            trainer.end()
    result = trainer.step, trainer.hash()
    trainer.close()
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_may_be_drawn_between_the_backward_and_the_step_of_the_one_before(
    worlds: WorldPool, expected: Any, tmp_path: Path, kind: str
) -> None:
    for world in (1, 2):
        root = str(tmp_path / str(world))
        assert worlds.run(world, drawn_between, kind, root) == [(9, expected(kind)[9])] * world
        assert ledger_problems(root) == ()


def in_evaluation_mode(back_end: str, ahead: int) -> str:
    """The script trains a model that is in eval(), as fine-tuning does, and calls backward()."""
    own = training(Recipe(own_loop=True), back_end)
    own.called.eval()
    batches = iter(own.loader)
    drawn = deque(islice(batches, ahead))
    while drawn:
        (x,) = drawn.popleft()
        own.backward(x)
        own.end()
        drawn.extend(islice(batches, 1))
    own.close()
    return own.hash()


def test_a_loop_that_draws_ahead_may_train_a_model_in_evaluation_mode(worlds: WorldPool) -> None:
    (expected,) = worlds.run(1, in_evaluation_mode, "plain", 1)
    for back_end, world in (("plain", 1), ("ddp", 2), ("fsdp2", 3)):
        assert worlds.run(world, in_evaluation_mode, back_end, 2) == [expected] * world


def copied_while_one_is_drawn_ahead() -> list[bool]:
    own = training(Recipe(), "plain")
    batches = iter(own.loader)
    (x,), *_ = islice(batches, 2)
    own.backward(x)
    own.end()
    file = io.BytesIO()
    torch.save(own.module, file)
    file.seek(0)
    copies = copy.deepcopy(own.module), torch.load(file, weights_only=False)
    found = [torch.equal(own.module.eval()(x), each.eval()(x)) for each in copies]
    own.close()
    return found


def test_a_model_is_copied_in_a_loop_that_draws_ahead(worlds: WorldPool) -> None:
    assert worlds.run(1, copied_while_one_is_drawn_ahead) == [[True, True]]


def drawn_in_bursts(kind: str, root: str) -> tuple[int, str]:
    """Several batches are drawn, then all of them are run, as a Trainer does with a step's."""
    trainer = KINDS[kind](root)
    while trainer.step < 7:
        batches = iter(trainer.loader)
        while burst := [*islice(batches, 3)]:
            for rows in burst:
                train(trainer, rows)
    result = trainer.step, trainer.hash()
    trainer.close()
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.corners(kind=["protect"])
def test_each_of_several_batches_drawn_at_once_has_its_own_random_numbers(
    worlds: WorldPool, expected: Any, tmp_path: Path, kind: str
) -> None:
    for world in (1, 2):
        root = str(tmp_path / str(world))
        assert worlds.run(world, drawn_in_bursts, kind, root) == [(9, expected(kind)[9])] * world
        assert ledger_problems(root) == ()


def read_by_processes(kind: str, root: str) -> tuple[int, str]:
    """Worker processes have prefetched when the loop is rolled back in the middle of a step."""
    trainer = KINDS[kind](root, workers=2)
    rolled_back = False
    while trainer.step < 6:
        for number, rows in enumerate(trainer.loader):
            train(trainer, rows)
            if number == 4 and not rolled_back:
                trainer.save()
            if number == 7 and not rolled_back:
                trainer.load()
                rolled_back = True
    assert rolled_back
    result = trainer.step, trainer.hash()
    trainer.close()
    return result


@pytest.mark.parametrize("kind", ["protect", pytest.param("engine", marks=pytest.mark.full)])
def test_what_worker_processes_have_prefetched_is_left_out_after_a_rollback(
    worlds: WorldPool, expected: Any, tmp_path: Path, kind: str
) -> None:
    assert worlds.run(1, read_by_processes, kind, str(tmp_path)) == [(6, expected(kind)[6])]
    assert ledger_problems(str(tmp_path)) == ()


# ---- what a loop may not do ----


def refusals(kind: str, root: str) -> list[str]:
    """The messages of loops that would lose or repeat samples; each is left at its error."""
    told = []

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(ZeroError) as raised:
            call()
        told.append(str(raised.value))

    def save_and_begin(depth: int) -> tuple[Any, Any]:
        trainer = KINDS[kind](f"{root}/{len(told)}")  # those before still live
        trainer.save()
        batches = ahead(trainer.loader, depth)
        train(trainer, next(batches))
        return trainer, batches

    trainer, batches = save_and_begin(1)
    next(batches)
    trainer.load()
    refused(lambda: next(batches))
    trainer, batches = save_and_begin(0)
    rows = next(batches)
    trainer.load()
    refused(lambda: train(trainer, rows))
    trainer, batches = save_and_begin(0)
    next(iter(trainer.loader))
    refused(lambda: next(batches))
    trainer, batches = save_and_begin(0)
    next(batches)  # by `continue`
    if kind != "engine":
        refused(lambda: next(batches))
        trainer, batches = save_and_begin(0)
        thread = Thread(target=refused, args=(lambda: next(iter(trainer.loader)),))
        thread.start()
        thread.join()
    return told


@pytest.mark.parametrize("kind", ["protect", "engine"])
def test_what_would_lose_or_repeat_a_sample_is_an_error_that_says_what_to_do(
    worlds: WorldPool, tmp_path: Path, kind: str
) -> None:
    (told,) = worlds.run(1, refusals, kind, str(tmp_path))
    assert "in a loop that draws 1 ahead" in told[0]
    stale = "was drawn before the position" if kind == "engine" else "drawn after the last run.load"
    assert stale in told[1]
    assert told[2].startswith("two iterations of one loader at the same time")
    if kind != "engine":
        assert told[3].startswith("a batch of run.loader was drawn and not trained")
        assert "run.loader is iterated in another thread" in told[4]


NUMBERS = {"enter": 2, "run": 7, "drop": 0, "zip": 6, "epoch": 0, "save": 0, "rollback": 0}
OPERATION = st.sampled_from([*NUMBERS, "run", "run", "save", "set_epoch"]).flatmap(
    lambda name: st.tuples(st.just(name), st.integers(0, NUMBERS.get(name, 3)))
)
LIFE = st.tuples(st.integers(1, 3), st.lists(OPERATION, min_size=1, max_size=7))


@pytest.mark.full
@given(kind=st.sampled_from([*KINDS, *FURTHER]), lives=st.lists(LIFE, min_size=1, max_size=3))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sequence_of_what_loops_do_trains_each_sample_once_to_the_same_bits(
    worlds: WorldPool, expected: Any, kind: str, lives: list[tuple[int, Operations]]
) -> None:
    with tempfile.TemporaryDirectory() as root:
        check(worlds, expected, kind, root, lives)
