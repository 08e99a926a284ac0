"""Data that can only be iterated, in lanes of unequal lengths: one result, each sample once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from tests.numerics.promises import back_ends
from tests.numerics.promises.back_ends import (
    EVERYWHERE,
    IN,
    OfEngine,
    Place,
    Recipe,
    agreed,
    training,
)
from tests.support.world import WorldPool
from zero_checkpoint.errors import ModelMismatch
from zero_data import read_ledger, verify
from zero_data.lanes import Pack, Packed

LENGTHS = (7, 3, 6, 0, 5)
"""Of five lanes: an epoch has steps of 8, 7, 5 and 1 samples, in micro-batches of 2."""
STEPS = 7
SAMPLES = 21 + 8 + 7 + 5


class Files(IterableDataset[Any]):
    """A file for each lane, out of which samples come in an order of global random numbers."""

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        info = get_worker_info()
        assert info is not None
        yield from self.rows(info.id, 0)

    def rows(self, file: int, first: int) -> Iterator[tuple[Tensor]]:
        for number in range(first, LENGTHS[file]):
            row = torch.arange(IN) * 0.1 + file + number / 7
            yield (row * random.random() + torch.randn(IN),)


class Stateful(Files):
    """The same, with a state."""

    number = 0
    loaded = 0

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        info = get_worker_info()
        assert info is not None
        for sample in self.rows(info.id, self.number):
            self.number += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "moment": torch.tensor([self.number])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        Stateful.loaded += 1
        self.number = state["number"]


class Documents(IterableDataset[Any]):
    """Documents of 1 to 15 tokens, with a state; each lane has its own."""

    number = 0

    def __iter__(self) -> Iterator[list[int]]:
        info = get_worker_info()
        assert info is not None
        while self.number < 3 * LENGTHS[info.id]:
            self.number += 1
            size = 1 + (7 * self.number + info.id) % 15
            yield [self.number % 5 + at for at in range(size)]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def packed() -> Pack:
    return Pack(Documents(), IN, how="chunk")


def inputs(samples: list[Packed]) -> tuple[Tensor]:
    return (torch.stack([sample["input_ids"] for sample in samples]) / 7,)


DATA: dict[str, Callable[[], Any]] = {"no state": Files, "a state": Stateful}


def recipe(kind: str, ledger: str | None = None, **sections: Any) -> Recipe:
    return Recipe(data=DATA[kind], sections={"elastic": {"sample_ledger": ledger, **sections}})


def of_documents(ledger: Path) -> Recipe:
    return replace(recipe("a state", str(ledger)), data=packed, collate=inputs)


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


PATHS = [("ddp", "stage3"), ("stage3", "fsdp2"), ("fsdp2", "stage0"), ("stage0", "ddp")]


@pytest.mark.parametrize("world", [3, 8])
@pytest.mark.parametrize("at", [2, 3, 4], ids=lambda step: f"after {step}")
@pytest.mark.parametrize("kind", sorted(DATA))
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


def consumed(ledger: Path) -> dict[tuple[int, int], Any]:
    """What each step and lane has consumed, by its last execution: samples and their documents."""
    found = {}
    for entry in sorted(read_ledger(ledger), key=lambda entry: entry.round):
        for lane, ids in entry.microbatches.items():
            found[entry.step, lane] = ids, entry.documents[lane]
    return found


@pytest.mark.parametrize("world", [3, 8])
@pytest.mark.parametrize("path", PATHS, ids="-".join)
@pytest.mark.corners(world=[3], path=[PATHS[0]])
def test_a_document_that_is_cut_where_ranks_change_is_trained_once_with_all_its_pieces(
    worlds: WorldPool, tmp_path: Path, path: tuple[str, str], world: int
) -> None:
    (first, then), saved = path, str(tmp_path / "saved")
    alone, ledger = tmp_path / "alone", tmp_path / "ledger"
    whole = agreed(worlds.run(1, run, of_documents(alone), "plain", STEPS))
    begun = agreed(worlds.run(4, run, of_documents(ledger), first, 3, saved))
    ended = agreed(worlds.run(world, run, of_documents(ledger), then, STEPS, None, saved))
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


@pytest.mark.full
@pytest.mark.parametrize("where", ["owner", "node", "local"])
def test_lanes_train_alike_wherever_their_gradients_are_added(
    worlds: WorldPool, where: str, whole: list[str]
) -> None:
    given = replace(recipe("no state", accumulate=where), nodes="2,2")
    assert agreed(worlds.run(4, run, given, "stage1", STEPS)) == whole


@pytest.mark.parametrize("place", [("ddp", 3), ("stage3", 4), ("stage0", 8), ("fsdp2", 2)])
@pytest.mark.corners(place=[("ddp", 3), ("stage3", 4)])
def test_padding_has_no_tokens(worlds: WorldPool, place: Place) -> None:
    given = replace(recipe("no state"), counts=counted)
    alone = agreed(worlds.run(1, run, given, "plain", STEPS))
    assert agreed(worlds.run(place[1], run, given, place[0], STEPS)) == alone


def of_other_lanes(back_end: str, saved: str) -> tuple[str, bool]:
    """Why a checkpoint of five lanes is refused by four, and whether all is as before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(back_ends, "MICROBATCHES", 4)
        own = training(recipe("a state"), back_end, weights=1)
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
