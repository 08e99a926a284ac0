"""Data that can only be iterated, in lanes of unequal lengths: one result, each sample once."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.numerics.promises.back_ends import (
    EVERYWHERE,
    IN,
    Net,
    OfEngine,
    Place,
    Recipe,
    agreed,
    training,
)
from tests.numerics.promises.test_saves import kept_in_memory
from tests.support.lane_data import KINDS, BeginsLate, Stateful, consumed
from tests.support.queued import BACKEND
from tests.support.world import WorldPool
from zero_checkpoint.errors import ModelMismatch
from zero_data import read_ledger, verify

STEPS = 7
SAMPLES = 21 + 8 + 7 + 5


def recipe(kind: str, ledger: str | None = None, **sections: Any) -> Recipe:
    elastic = {"sample_ledger": ledger, **sections}
    return Recipe(**KINDS[kind], sections={"elastic": elastic})


def run(
    given: Recipe,
    back_end: str,
    until: int,
    save: str | None = None,
    load: str | None = None,
) -> list[str]:
    """The hash after each step."""
    own = training(given, back_end, weights=1 if load else 0)
    if load:
        own.load(load)
    found = list(own.hashes(until))
    if save:
        own.save(save)
    own.close()
    return found


@pytest.fixture(scope="module")
def whole(worlds: WorldPool) -> list[str]:
    """The hashes of the run that nothing disturbs."""
    return agreed(worlds.run(1, run, recipe("no state"), "plain", STEPS))


@pytest.mark.parametrize("place", EVERYWHERE, ids=lambda place: "{}-{}".format(*place))
@pytest.mark.corners(place=[("ddp", 3), ("stage3", 4)])
def test_lanes_of_unequal_lengths_train_alike_everywhere_and_their_samples_once(
    worlds: WorldPool, tmp_path: Path, place: Place, whole: list[str]
) -> None:
    back_end, world = place
    found = agreed(worlds.run(world, run, recipe("a state", str(tmp_path)), back_end, STEPS))
    assert found == whole
    report = verify(read_ledger(tmp_path), None)
    assert (report.problems, report.steps, report.samples) == ((), STEPS, SAMPLES)


class Averages(Net):
    """A model whose forward keeps an average of its inputs in a buffer, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(IN))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.1)
        return super().forward(x + self.average)


LATE = Recipe(model=Averages, data=BeginsLate)


@pytest.mark.parametrize("place", EVERYWHERE, ids=lambda place: "{}-{}".format(*place))
@pytest.mark.corners(place=[("ddp", 2), ("stage3", 3)])
def test_buffers_are_those_of_the_first_lane_that_has_samples(
    worlds: WorldPool, place: Place
) -> None:
    back_end, world = place
    expected = agreed(worlds.run(1, run, LATE, "plain", STEPS))
    assert agreed(worlds.run(world, run, LATE, back_end, STEPS)) == expected


PATHS = [("ddp", "stage3"), ("stage3", "fsdp2"), ("fsdp2", "stage0"), ("stage0", "ddp")]


@pytest.mark.parametrize("world", [3, 8])
@pytest.mark.parametrize("at", [2, 3, 4], ids=lambda step: f"after {step}")
@pytest.mark.parametrize("kind", ["a state", "no state"])
@pytest.mark.parametrize("path", PATHS, ids="-".join)
@pytest.mark.corners(world=[3], at=[3], kind=["a state"], path=[PATHS[0], PATHS[2]])
def test_saved_by_four_ranks_a_run_goes_on_with_any_number(
    worlds: WorldPool,
    tmp_path: Path,
    path: tuple[str, str],
    kind: str,
    at: int,
    world: int,
    whole: list[str],
) -> None:
    first, then = path
    ledger, saved = tmp_path / "ledger", str(tmp_path / "saved")
    begun = agreed(worlds.run(4, run, recipe(kind, str(ledger)), first, at, saved))
    given = recipe(kind, str(ledger))
    ended = agreed(worlds.run(world, run, given, then, STEPS, None, saved))
    assert begun + ended == whole
    report = verify(read_ledger(ledger), None)
    assert (report.problems, report.steps, report.samples) == ((), STEPS, SAMPLES)


@pytest.mark.parametrize("world", [3, 8])
@pytest.mark.parametrize("path", PATHS, ids="-".join)
@pytest.mark.corners(world=[3], path=[PATHS[0]])
def test_a_document_that_is_cut_where_ranks_change_is_trained_once_with_all_its_pieces(
    worlds: WorldPool, tmp_path: Path, path: tuple[str, str], world: int
) -> None:
    (first, then), saved = path, str(tmp_path / "saved")
    alone, ledger = tmp_path / "alone", tmp_path / "ledger"
    whole = agreed(worlds.run(1, run, recipe("packed", str(alone)), "plain", STEPS))
    begun = agreed(worlds.run(4, run, recipe("packed", str(ledger)), first, 3, saved))
    ended = agreed(worlds.run(world, run, recipe("packed", str(ledger)), then, STEPS, None, saved))
    assert begun + ended == whole
    assert verify(read_ledger(ledger), None).problems == ()
    found = consumed(ledger)
    assert found == consumed(alone)
    pieces = [
        {
            (lane, number)
            for step, lane in found
            for number, _, _ in chain(*found[step, lane][1])
            if here(step)
        }
        for here in (lambda step: step <= 3, lambda step: step > 3)
    ]
    assert pieces[0] & pieces[1], "a document is on both sides"


def counted(batch: Tensor) -> int:
    """Tokens, of which padding would add some."""
    return 3 * len(batch) + int(batch[0, 0] > 1)


@pytest.mark.parametrize("back_end", ["stage1", "ddp"])
@pytest.mark.parametrize("where", ["owner", "node", "local"])
@pytest.mark.corners(back_end=["ddp"], where=["local"])
def test_lanes_train_alike_wherever_their_gradients_are_added(
    worlds: WorldPool, where: str, back_end: str, whole: list[str]
) -> None:
    given = replace(recipe("no state", accumulate=where), nodes="2,2")
    assert agreed(worlds.run(4, run, given, back_end, STEPS)) == whole


def norms(given: Recipe, back_end: str) -> list[float | None]:
    """The norm of each step, on which every bit of the weights before it has an effect.

    The group that is written in Python has no weights of FSDP2 gathered by torch, as a hash needs.
    """
    own = training(given, back_end)
    found = [own.norm for _ in own.steps(STEPS)]
    own.close()
    return found


@pytest.mark.parametrize("place", [("ddp", 3), ("fsdp2", 4), ("stage0", 8), ("stage3", 4)])
@pytest.mark.corners(place=[("stage3", 4)])
def test_lanes_train_alike_over_a_group_that_matches_exchanges_by_their_order_alone(
    worlds: WorldPool, place: Place
) -> None:
    back_end, world = place
    given = replace(recipe("a state"), max_norm=0.05)
    (alone,) = worlds.run(1, norms, given, "plain")
    given = replace(given, nodes="2,2" if world == 4 else "")
    assert agreed(worlds.run(world, norms, given, back_end, backend=BACKEND)) == alone
    assert None not in alone


def weights(given: Recipe, back_end: str) -> list[Tensor]:
    own = training(given, back_end)
    own.train(STEPS)
    found = own.weights()
    own.close()
    return found


@pytest.mark.parametrize("counts", [None, counted], ids=["samples", "tokens"])
@pytest.mark.parametrize("place", [("ddp", 3), ("fsdp2", 4), ("stage0", 8), ("stage3", 4)])
@pytest.mark.corners(place=[("ddp", 3), ("stage3", 4)], counts=[counted])
def test_lanes_train_the_same_weights_within_rounding_by_the_sums_of_the_backend(
    worlds: WorldPool, tmp_path: Path, place: Place, counts: Any
) -> None:
    back_end, world = place
    native = replace(recipe("a state", str(tmp_path), reduction="native"), counts=counts)
    (wanted,) = worlds.run(1, weights, replace(native, sections={}), "plain")
    for found in worlds.run(world, weights, native, back_end):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert verify(read_ledger(tmp_path), None).problems == ()


@pytest.mark.parametrize("kind", ["a state", "packed"])
@pytest.mark.corners(kind=["packed"])
def test_lanes_go_on_from_the_memory_of_nodes_with_fewer_ranks(
    worlds: WorldPool, tmp_path: Path, kind: str
) -> None:
    root, ledger, found = str(tmp_path), tmp_path / "ledger", list[str]()
    given = recipe(kind, str(ledger))
    places = [("ddp", 3), ("stage3", 2), ("fsdp2", 2)]
    for number, (back_end, world) in enumerate(places):
        until = 2 * number + 2
        ranks = worlds.run(world, kept_in_memory, root, given, back_end, until, number)
        assert {begun for begun, _ in ranks} == {2 * number}
        found += agreed([part for _, part in ranks])
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    assert found == agreed(worlds.run(1, run, recipe(kind), "plain", 6))
    assert verify(read_ledger(ledger), None).problems == ()


@pytest.mark.parametrize("place", [("ddp", 3), ("stage3", 4), ("stage0", 8), ("fsdp2", 2)])
@pytest.mark.corners(place=[("ddp", 3), ("stage3", 4)])
def test_padding_has_no_tokens(worlds: WorldPool, place: Place) -> None:
    given = replace(recipe("no state"), counts=counted)
    alone = agreed(worlds.run(1, run, given, "plain", STEPS))
    assert agreed(worlds.run(place[1], run, given, place[0], STEPS)) == alone


def of_other_lanes(back_end: str, saved: str) -> tuple[str, bool]:
    """Why a checkpoint of five lanes is refused by four, and whether all is as before."""
    own = training(replace(recipe("a state"), microbatches=4), back_end, weights=1)
    before = own.hash()
    with pytest.raises(ModelMismatch) as refused:
        own.load(saved)
    kept = own.hash() == before
    if isinstance(own, OfEngine):
        own.engine.load_checkpoint(saved, load_module_only=True)
        kept &= own.hash() != before
    kept &= own.step == 0
    own.train(1)
    return str(refused.value), kept


@pytest.mark.parametrize("back_end", ["ddp", "stage3"])
def test_a_checkpoint_of_other_lanes_is_refused_before_weights_are_read(
    worlds: WorldPool, tmp_path: Path, back_end: str
) -> None:
    saved = str(tmp_path / "saved")
    worlds.run(2, run, recipe("a state"), back_end, 2, saved)
    for said, kept in worlds.run(2, of_other_lanes, back_end, saved):
        assert "has 5 lanes" in said
        assert "give it 5 of 2, or begin a new run" in said
        assert kept


BATCH_OF_WORLD = {"train_batch_size": None, "gradient_accumulation_steps": 1}
"""A micro-batch of each rank of the first round, which are five."""


def test_lanes_that_the_number_of_ranks_has_fixed_go_on_with_their_states(
    worlds: WorldPool, tmp_path: Path, whole: list[str]
) -> None:
    given = replace(recipe("a state"), sections=BATCH_OF_WORLD)
    saved = str(tmp_path / "saved")
    begun = agreed(worlds.run(5, run, given, "stage0", 2, saved))
    found = worlds.run(3, run_and_count, given, saved)
    assert begun + found[0][0] == whole
    assert [count for _, count in found] == [1, 1, 1], "of the lanes that have samples left"


def run_and_count(given: Recipe, saved: str) -> tuple[list[str], int]:
    """The hashes after a load, and the states that lanes have loaded in this epoch."""
    Stateful.loaded = 0
    own = training(given, "stage0", weights=1)
    own.load(saved)
    found = [next(own.hashes(3))]
    loaded = Stateful.loaded
    return [*found, *own.hashes(STEPS)], loaded
