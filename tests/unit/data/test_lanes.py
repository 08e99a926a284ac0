"""Lanes against a serial model of them: the exact samples in order, whatever the ranks are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from tests.support.lanes import trained as driven
from zero_contract.errors import ConfigError, ZeroError
from zero_data import Lanes, read_ledger, verify
from zero_data.ledger import Entry

Sample = tuple[int, int, int, float]
"""Lane, epoch, number, and a random number that was drawn in reading it."""


class Files(IterableDataset[Sample]):
    """A file of samples for each lane, without a state."""

    read: ClassVar[list[int]] = []
    """The numbers of samples that were read, for whoever clears it."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        yield from self.samples_from(0)

    def samples_from(self, first: int) -> Iterator[Sample]:
        info = get_worker_info()
        assert info is not None
        epoch = self.epoch
        for number in range(first, self.lengths[info.id]):
            self.read.append(number)
            yield info.id, epoch, number, random.random() + torch.rand(()).item()


class Stateful(Files):
    """The same, with a state after every sample, or after every third."""

    def __init__(self, lengths: list[int], every: int = 1) -> None:
        super().__init__(lengths)
        self.every = every
        self.number = 0

    def __iter__(self) -> Iterator[Sample]:
        for sample in self.samples_from(self.number):
            self.number = sample[2] + 1
            yield sample

    def state_dict(self) -> dict[str, Any] | None:
        return {"number": self.number} if self.number % self.every == 0 else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Undivided(IterableDataset[int]):
    """Knows nothing of workers, and has no state."""

    def __iter__(self) -> Iterator[int]:
        yield from range(30)


class Sparse(Stateful):
    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths, every=3)


KINDS = {"stateful": Stateful, "state now and then": Sparse, "no state": Files}


def trained(dataset: Files, world: int, **options: Any) -> tuple[list[list[Sample]], Any]:
    """See `tests.support.lanes`; the steps and the state."""
    found = driven(lambda: dataset, world, lanes=len(dataset.lengths), **options)
    return found.steps, found.state


def serial(lengths: list[int], micro_batch: int, steps: int) -> list[list[tuple[int, int, int]]]:
    """The model: each step takes a micro-batch from every lane that has samples."""
    found: list[list[tuple[int, int, int]]] = []
    epoch = 0
    while len(found) < steps:
        found += [
            [
                (lane, epoch, number)
                for lane, length in enumerate(lengths)
                for number in range(first, min(first + micro_batch, length))
            ]
            for first in range(0, max(lengths), micro_batch)
        ]
        epoch += 1
    return found[:steps]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    micro_batch=st.integers(1, 4),
    kind=st.sampled_from(sorted(KINDS)),
    rounds=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 5)), min_size=1, max_size=4),
)
def test_whatever_ranks_there_are_steps_have_the_samples_of_a_serial_run(
    lengths: list[int], micro_batch: int, kind: str, rounds: list[tuple[int, int]]
) -> None:
    total = sum(steps for _, steps in rounds)
    alone, end = trained(KINDS[kind](lengths), 1, batch_size=micro_batch, until=total)
    model = serial(lengths, micro_batch, total)
    assert [[sample[:3] for sample in step] for step in alone] == model
    resumed: list[list[Sample]] = []
    state = None
    for world, steps in rounds:  # each resumes where the one before was saved
        until = len(resumed) + steps
        found, state = trained(
            KINDS[kind](lengths), world, batch_size=micro_batch, until=until, state=state
        )
        resumed += found
    assert resumed == alone, "with the same random numbers"
    assert state is not None
    assert (state["step"], state["samples"]) == (total, sum(map(len, model)))
    assert state["lanes"] == end["lanes"]


def test_a_state_finds_a_position_without_reading_what_was_before_it() -> None:
    lengths = [1000] * 3
    _, state = trained(Stateful(lengths), 2, batch_size=10, until=90)
    Files.read.clear()
    trained(Stateful(lengths), 3, batch_size=10, until=91, state=state)
    begins = sorted(number for number in Files.read if number < 20)  # the ranks are threads
    assert begins == [0, *range(10)], "one micro-batch is compared, and no lane is begun again"


def test_without_a_state_lanes_are_read_again_and_one_rank_says_how_much(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lengths = [40] * 3
    _, state = trained(Files(lengths), 2, batch_size=2, until=5)
    trained(Files(lengths), 3, batch_size=2, until=6, state=state)
    (said,) = caplog.messages
    assert "reading up to 10 samples of each from the begin of epoch 0" in said


def test_one_rank_says_that_lanes_share_what_does_not_divide_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driven(Undivided, 7, lanes=4, batch_size=2, until=7)  # some ranks have padding alone
    assert [each.partition(" for ")[0] for each in caplog.messages] == ["Undivided has 1 part"]


def test_the_ledger_of_lanes_is_exact_over_rounds_and_names_what_is_not(tmp_path: Path) -> None:
    lengths = [7, 3, 0, 5]
    for number, (world, until) in enumerate([(4, 3), (3, 6), (8, 8)]):
        ledger = tmp_path, number
        trained(Files(lengths), world, batch_size=2, until=until, ledger=ledger)
    entries = read_ledger(tmp_path)
    report = verify(entries, None)
    assert report.problems == ()
    assert (report.steps, report.samples, report.repeated_steps) == (8, 30, 6)
    lost = [e for e in entries if (e.round, e.step, e.rank) != (2, 8, 3)]
    assert "step 8: 7 of 8 ranks have an entry" in verify(lost, None).problems


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([{0: (0, 1)}, {0: (3,)}], "step 2, epoch 0, lane 0: has samples [3], and 2 comes next"),
        ([{0: (0,), 1: (0,)}, {0: (1,)}, {0: (2,), 1: (1,)}], "step 3, epoch 0, lane 1: it had"),
        ([{0: (0,), 1: (0,)}, {0: (0,), 1: (1,)}], "step 2, epoch 0, lane 0: has samples [0]"),
    ],
)
def test_gaps_repetitions_and_lanes_that_go_on_after_their_end_are_named(
    steps: list[dict[int, tuple[int, ...]]], problem: str
) -> None:
    entries = [Entry(number, 0, 0, 1, each) for number, each in enumerate(steps, 1)]
    assert any(each.startswith(problem) for each in verify(entries, None).problems)
    other = Entry(1, 1, 0, 1, {0: (0, 1, 2)})
    assert (
        "step 1 had other samples when it was done again"
        in verify([*entries, other], None).problems
    )


def test_an_epoch_without_its_rest_ends_before_the_first_step_that_is_not_full() -> None:
    alone, state = trained(Files([5, 6, 4]), 1, batch_size=2, until=4, drop_last=True)
    three, _ = trained(Files([5, 6, 4]), 3, batch_size=2, until=4, drop_last=True)
    assert alone == three
    assert [sample[:3] for sample in alone[2]] == [
        (lane, 1, n) for lane in range(3) for n in (0, 1)
    ]
    assert state["lanes"]["epoch"] == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_loading_processes_change_nothing(workers: int) -> None:
    options = {"batch_size": 2, "lanes": 5, "collate_fn": list}
    lengths = [7, 3, 0, 5, 2]
    alone, lanes, resumed = (
        Lanes(Stateful(lengths), num_workers=n, **options) for n in (0, workers, workers)
    )
    plain = [batch for batch in alone if alone.weight]
    found = []
    for batch in lanes:
        found += [batch] if lanes.weight else []
        if lanes.last and lanes.step == 2:
            break
    resumed.load_state_dict(lanes.state_dict())
    assert [*found, *(batch for batch in resumed if resumed.weight)] == plain


@pytest.mark.parametrize("workers", [0, 1])
def test_the_random_numbers_of_the_script_are_not_touched(workers: int) -> None:
    def numbers() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    drawn: list[list[tuple[float, ...]]] = []
    for read in False, True:
        lanes = iter(Lanes(Files([4, 4]), batch_size=2, lanes=2, num_workers=workers))
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        drawn.append([])
        for _ in range(4):
            if read:
                next(lanes)
            drawn[-1].append(numbers())
    assert drawn[0] == drawn[1]


def test_a_state_that_the_data_do_not_take_any_more_is_named() -> None:
    _, state = trained(Stateful([9, 9]), 1, batch_size=2, until=3)
    with pytest.raises(ConfigError, match="has a state of its data, and Files takes none"):
        trained(Files([9, 9]), 1, batch_size=2, until=4, state=state)


def test_data_that_cannot_be_begun_again_are_refused() -> None:
    with pytest.raises(ConfigError, match="generator cannot be begun again"):
        Lanes((each for each in [1]), batch_size=1, lanes=1)


@pytest.mark.parametrize(("lanes", "micro_batch"), [(3, 1), (2, 2)])
def test_another_number_of_lanes_or_of_their_samples_is_refused(
    lanes: int, micro_batch: int
) -> None:
    saved = Lanes(Files([4, 4]), batch_size=1, lanes=2)
    assert len([*saved]) == 8
    other = Lanes(Files([4] * lanes), batch_size=micro_batch, lanes=lanes)
    with pytest.raises(ConfigError, match=r"has 2 lanes.*, of 1 .*give it 2 of 1, or begin a new"):
        other.load_state_dict(saved.state_dict())


def test_a_position_inside_of_a_global_batch_is_refused() -> None:
    lanes = Lanes(Files([4, 4]), batch_size=1, lanes=2)
    next(iter(lanes))
    with pytest.raises(ZeroError, match=r"lanes\.last is True"):
        lanes.state_dict()


def test_data_that_are_not_the_same_again_are_named() -> None:
    _, state = trained(Files([9, 9]), 1, batch_size=2, until=3)
    with pytest.raises(ConfigError, match="lane 0 of 2 has ended after 3 samples in epoch 0, of"):
        trained(Files([3, 9]), 1, batch_size=2, until=4, state=state)


def test_no_samples_at_all_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no lane of 2 has a sample in epoch 0"):
        next(iter(Lanes(Files([0, 0]), batch_size=1, lanes=2)))
    with pytest.raises(ConfigError, match="lanes do not fill one global batch of 4"):
        next(iter(Lanes(Files([1, 4]), batch_size=2, lanes=2, drop_last=True)))
