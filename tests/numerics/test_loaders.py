"""Every argument of a DataLoader, by whoever takes one: done, refused by name, or said."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, get_worker_info

import zero_engine
import zero_torch
from tests.support.saving import heard
from tests.support.world import WorldPool
from zero_contract.errors import ConfigError
from zero_data import Lanes

SIZE, STEP = 7, 4
"""Samples of an epoch, and of a step: two micro-batches of two."""


class Numbers(Dataset[Tensor]):
    """Numbers from `first` on, of which each also says who has read it: 0.5 more in a process."""

    first = 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor([self.first + number + 0.5 * (get_worker_info() is not None)])


def begin_at_a_hundred(_: int) -> None:
    info: Any = get_worker_info()
    info.dataset.first = 100


def negative(samples: list[Tensor]) -> Tensor:
    return -torch.stack(samples)


class Forks(multiprocessing.context.ForkContext):
    """A way to start processes that counts them."""

    started = 0

    def Process(self, *args: Any, **options: Any) -> Any:  # type: ignore[override] # noqa: N802
        Forks.started += 1
        return super().Process(*args, **options)


IN_ORDER = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
BY_PROCESSES = [[number + 0.5 for number in step] for step in IN_ORDER]
Steps = list[list[float]]


@dataclass(frozen=True)
class Case:
    options: dict[str, Any]
    steps: Steps | Callable[[Steps], bool] = field(default_factory=lambda: IN_ORDER)
    """The sorted samples of each step, or whether they are right."""
    refused: str = ""
    said: str = ""


def some(steps: Steps) -> bool:
    return sorted(chain(*steps)) == [*chain(*IN_ORDER)] and steps != IN_ORDER


def drawn(steps: Steps) -> bool:
    return sorted(chain(*steps)) == [1, 3, 5, 6]


PROCESS = {"num_workers": 1}
CASES: dict[str, list[Case]] = {
    "dataset": [Case({})],
    "batch_size": [
        Case({"batch_size": None}, refused="neither batch_size nor batch_sampler"),
    ],
    "shuffle": [Case({"shuffle": False}), Case({"shuffle": True}, some)],
    "sampler": [
        Case({"sampler": SubsetRandomSampler([1, 3, 5, 6])}, drawn),
        Case({"sampler": [3, 2, 1]}, refused="the DataLoader has a list"),
    ],
    "batch_sampler": [
        Case({"batch_sampler": [[6, 1], [0], [5], [3, 4]]}, [[0.0, 1.0, 6.0], [3.0, 4.0, 5.0]]),
    ],
    "num_workers": [Case(PROCESS, BY_PROCESSES)],
    "collate_fn": [Case({"collate_fn": negative}, [[-3.0, -2.0, -1.0, 0.0], [-6.0, -5.0, -4.0]])],
    "pin_memory": [Case({"pin_memory": True})],
    "drop_last": [Case({"drop_last": True}, IN_ORDER[:1])],
    "timeout": [Case({**PROCESS, "timeout": 60}, BY_PROCESSES)],
    "worker_init_fn": [
        Case(
            {**PROCESS, "worker_init_fn": begin_at_a_hundred},
            [[100 + number for number in step] for step in BY_PROCESSES],
        )
    ],
    "multiprocessing_context": [
        Case({**PROCESS, "multiprocessing_context": Forks()}, BY_PROCESSES)
    ],
    "generator": [
        Case(
            {"shuffle": True, "generator": torch.Generator()},
            some,
            said="the generator of the DataLoader has no effect",
        )
    ],
    "prefetch_factor": [Case({**PROCESS, "prefetch_factor": 3}, BY_PROCESSES)],
    "persistent_workers": [Case({**PROCESS, "persistent_workers": True}, BY_PROCESSES)],
    "pin_memory_device": [Case({"pin_memory_device": ""})],
    "in_order": [Case({**PROCESS, "in_order": False}, BY_PROCESSES)],
}


def test_the_table_has_every_argument_of_a_loader() -> None:
    assert CASES.keys() == inspect.signature(DataLoader).parameters.keys()


def by_lanes(loader: DataLoader[Any]) -> Iterator[tuple[int, Tensor]]:
    lanes = Lanes(loader, lanes=2)
    for batch in lanes:
        yield lanes.step - lanes.last, batch


def test_lanes_and_loader_do_not_say_two_sizes_of_a_micro_batch() -> None:
    with pytest.raises(ConfigError, match="batch_size of Lanes=2: the DataLoader has batch_size=3"):
        Lanes(DataLoader(Numbers(), batch_size=3), batch_size=2, lanes=2)
    with pytest.raises(ConfigError, match="batch_size of Lanes=None: give the samples of a micro"):
        Lanes(Numbers(), lanes=2)


def by_engine(loader: DataLoader[Any]) -> Iterator[tuple[int, Tensor]]:
    engine = zero_engine.initialize(
        nn.Linear(1, 1),
        training_data=loader,
        config={
            "train_batch_size": STEP,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
    )
    for batch in engine.training_dataloader:
        yield engine.global_steps, batch
        engine.backward(engine(batch).mean())
        engine.step()
    engine.destroy()


def by_protect(loader: DataLoader[Any]) -> Iterator[tuple[int, Tensor]]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = zero_torch.protect(model, optimizer, loader, microbatches=2)
    for batch in run.loader:
        yield run.global_step, batch
        run.backward(model(batch).mean())
        run.step()
    run.close()


TAKERS = {"Lanes": by_lanes, "engine": by_engine, "protect": by_protect}


def epoch(name: str, number: int, taker: str) -> tuple[Steps, str, list[str], int]:
    """The samples of each step or why there is none, what was said, and processes of `Forks`."""
    options, steps, refused = CASES[name][number].options, dict[int, list[float]](), ""
    batch_size = {} if "batch_sampler" in options else {"batch_size": 2}
    Forks.started = 0
    torch.manual_seed(42)
    with heard(logging.WARNING) as said:
        try:
            for step, batch in TAKERS[taker](DataLoader(Numbers(), **{**batch_size, **options})):
                steps.setdefault(step, []).extend(batch.flatten().tolist())
        except ConfigError as error:
            refused = str(error)
    return [sorted(step) for step in steps.values()], refused, said, Forks.started


@pytest.mark.parametrize("processes", [False, True], ids=["", "processes"])
@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.corners(processes=[False])
def test_what_a_loader_says_is_done_or_refused_by_name(
    worlds: WorldPool, taker: str, processes: bool
) -> None:
    numbered = ((name, *each) for name, cases in CASES.items() for each in enumerate(cases))
    for name, number, case in numbered:
        if ("num_workers" in case.options) != processes:
            continue
        ((steps, refused, said, started),) = worlds.run(1, epoch, name, number, taker)
        if case.refused:
            assert case.refused in refused, name
            continue
        assert not refused, name
        assert case.steps(steps) if callable(case.steps) else steps == case.steps, name
        assert case.said in "\n".join(said), name
        assert (started > 0) == (name == "multiprocessing_context")
