"""Whatever orders a script's samples is taken exactly, or refused by its name."""

from __future__ import annotations

import itertools
import logging
import random
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import data
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import zero_torch
from tests.support.saving import heard
from tests.support.world import WorldPool
from zero_contract.errors import ConfigError

SIZE = 8


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> int:
        return number


DATA = Numbers()


class Weighted(DistributedSampler[int]):
    """Derives from a sampler of torch, and has another order."""

    def __iter__(self) -> Iterator[int]:
        return iter([7] * len(self))


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE - 1, -1, -1))


class Own(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


class Batches(BatchSampler):
    pass


class Lengths(Sampler[list[int]]):
    """Batches of samples of about one length, of 1 to 3, in an order that it keeps and changes."""

    def __init__(self) -> None:
        self.batches = [[0, 1], [2, 3, 4], [5, 6], [7]]
        self.generator = np.random.default_rng(3)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        self.generator.shuffle(self.batches)
        yield from self.batches


class Clock(Lengths):
    """Draws by numbers of its own, which nobody can seed."""

    def __iter__(self) -> Iterator[list[int]]:
        random.SystemRandom().shuffle(order := list(range(SIZE)))
        return iter([order[:4], order[4:]])


class Endless(Lengths):
    """A loop over it leaves it."""

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.cycle(self.batches)


class Locked(Lengths):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Share(Lengths):
    """Of one rank."""

    rank = 0

    def __iter__(self) -> Iterator[list[int]]:
        yield self.batches[self.rank]


class Mixing(DataLoader[Any]):
    """Does something to each batch."""

    def __iter__(self) -> Any:
        return (batch + 1 for batch in super().__iter__())


def distributed(kind: Any = DistributedSampler, dataset: Any = DATA, **options: Any) -> Any:
    return kind(dataset, num_replicas=2, rank=0, **options)


def batched(of: Any) -> dict[str, Any]:
    return {"batch_sampler": of}


IN_ORDER, SHUFFLED = False, True
SAMPLERS: list[tuple[type, dict[str, Any], bool | str | Sequence[int]]] = [
    (SequentialSampler, {}, IN_ORDER),
    (SequentialSampler, {"sampler": SequentialSampler(range(SIZE))}, IN_ORDER),
    (SequentialSampler, {"sampler": SequentialSampler(range(3))}, "draws 3 of the 8 samples"),
    (RandomSampler, {"shuffle": True}, SHUFFLED),
    (RandomSampler, {"sampler": RandomSampler(DATA)}, SHUFFLED),
    (RandomSampler, {"sampler": RandomSampler(DATA, num_samples=4)}, range(SIZE)),
    (RandomSampler, {"sampler": RandomSampler(DATA, replacement=True)}, range(SIZE)),
    (RandomSampler, {"sampler": RandomSampler(range(4))}, range(4)),
    (DistributedSampler, {"sampler": distributed()}, SHUFFLED),
    (DistributedSampler, {"sampler": distributed(shuffle=False)}, IN_ORDER),
    (DistributedSampler, {"sampler": distributed(dataset=range(5))}, "draws 5 of the 8 samples"),
    (Weighted, {"sampler": distributed(Weighted)}, "Weighted .*give shuffle=True or"),
    (Backwards, {"sampler": Backwards(DATA)}, "Backwards .*give shuffle=True or"),
    (Own, {"sampler": Own()}, "Own .*give shuffle=True or"),
    (SubsetRandomSampler, {"sampler": SubsetRandomSampler([1, 2])}, [1, 2]),
    (WeightedRandomSampler, {"sampler": WeightedRandomSampler([0, 0, 0.1, 0.9], 12)}, [2, 3]),
    (BatchSampler, batched(BatchSampler(Own(), 2, False)), "a BatchSampler, has no length"),
    (Batches, batched(Batches(Own(), 2, False)), "a Batches, has no length .*give batch_size"),
    (BatchSampler, batched(BatchSampler(SequentialSampler(DATA), 2, False)), IN_ORDER),
    (BatchSampler, batched(BatchSampler(RandomSampler(DATA), 2, False)), SHUFFLED),
    (BatchSampler, batched(BatchSampler(SubsetRandomSampler([1, 2]), 2, False)), [1, 2]),
    (Batches, batched(Batches(RandomSampler(DATA), 4, False)), SHUFFLED),
    (BatchSampler, batched(BatchSampler(Backwards(DATA), 3, True)), [7, 6, 5, 4, 3, 2]),
    (list, batched([[3, 1, 2], [0]]), [3, 1, 2, 0]),
    (list, batched([[3, 1], [], [2], [0], []]), [3, 1, 2, 0]),
    (Lengths, batched(Lengths()), SHUFFLED),
    (Clock, batched(Clock()), "a Clock, draws other batches when .*set_epoch"),
    (Endless, batched(Endless()), "an? Endless, has more than 16 .* says that it has 4"),
    (Locked, batched(Locked()), "a Locked, cannot be copied .*give batch_size"),
    (Sampler, {"sampler": [3, 2, 1]}, r"a list \(builtins.list\)"),
]


def test_the_table_has_every_sampler_of_torch() -> None:
    classes = {each for each in vars(data).values() if isinstance(each, type)}
    samplers = {each for each in classes if issubclass(each, Sampler)}
    assert samplers <= {kind for kind, _, _ in SAMPLERS}


def protected(loader: Any, **config: Any) -> zero_torch.Run:
    model: nn.Module = nn.Linear(1, 1)
    if dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return zero_torch.protect(model, optimizer, loader, microbatches=2, config=config)


def refusal(loader: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        protected(loader)
    return str(refused.value)


def taken() -> list[list[int] | str]:
    """The samples of an epoch by each sampler, or why it is refused."""
    found: list[list[int] | str] = []
    for _, options, order in SAMPLERS:
        batch_size = {} if "batch_sampler" in options else {"batch_size": 2}
        loader = DataLoader(DATA, **options, **batch_size)
        if isinstance(order, str):
            found.append(refusal(loader))
        else:
            found.append(torch.cat(trained(loader)).tolist())
    return found


def trained(loader: DataLoader[Any]) -> list[Any]:
    """The batches of an epoch."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = zero_torch.protect(model, optimizer, loader, microbatches=2)
    batches = []
    for batch in run.loader:
        run.backward(model(batch.float().view(-1, 1)).mean())
        run.step()
        batches.append(batch)
    return batches


def test_a_sampler_is_taken_exactly_or_refused_by_name(worlds: WorldPool) -> None:
    (found,) = worlds.run(1, taken)
    for (kind, options, order), samples in zip(SAMPLERS, found, strict=True):
        if isinstance(order, str):
            assert isinstance(samples, str)
            assert re.search(order, samples)
            assert kind is Sampler or kind.__name__ in samples
        elif not isinstance(order, bool):
            assert "batch_sampler" in options or len(samples) == len(options["sampler"])
            assert set(samples) <= set(order)
            # A step that not all micro-batches have is filled with others, which do not count.
            assert "batch_sampler" not in options or set(samples) == set(order)
        else:
            assert sorted(samples) == list(range(SIZE))
            assert (samples != list(range(SIZE))) == order


def refusals() -> list[str]:
    loaders = [[torch.zeros(1)], iter(()), Mixing(DATA, batch_size=2)]
    return [refusal(loader) for loader in loaders]


def test_a_loader_that_cannot_be_taken_is_refused_with_a_way_out(worlds: WorldPool) -> None:
    (found,) = worlds.run(1, refusals)
    assert "got a list as its loader, which is no DataLoader" in found[0]
    assert "got a tuple_iterator as its loader" in found[1]
    assert "Mixing has an iteration of its own" in found[2]
    assert all("client_state" in told for told in found[:2])


def told(seed: int, loader: Any, **config: Any) -> list[str]:
    torch.manual_seed(seed)
    with heard(logging.WARNING) as lines:
        protected(loader, **config)
    return lines


def warnings() -> list[list[str]]:
    plain = DataLoader(DATA, batch_size=2, shuffle=True)
    seeded = DataLoader(DATA, batch_size=2, shuffle=True, generator=torch.Generator())
    by_sampler = DataLoader(DATA, batch_size=2, sampler=distributed(seed=3))
    cut = DataLoader(range(SIZE - 1), batch_size=2, drop_last=True)  # type: ignore[arg-type]
    return [
        told(5, plain),
        told(42, plain),
        told(5, plain, elastic={"seed": 7}),
        told(42, seeded),
        told(42, by_sampler),
        told(42, cut),
    ]


def test_what_has_no_effect_on_the_order_of_samples_is_said_once(worlds: WorldPool) -> None:
    (found,) = worlds.run(1, warnings)
    source = "elastic.seed, 42 by default; give protect(config={'elastic': {'seed': ...}})"
    assert [len(lines) for lines in found] == [1, 0, 0, 1, 1, 1]
    assert found[0][0].startswith("torch.manual_seed(5) seeds the initial weights alone: ")
    assert found[3][0].startswith("the generator of the DataLoader has no effect: ")
    assert found[4][0].startswith("the seed of the sampler, 3, has no effect: ")
    assert all(source in found[number][0] for number in (0, 3, 4))
    assert found[5][0].startswith("drop_last leaves out 3 of 7 samples in each epoch: ")


def drawn(options: dict[str, Any]) -> list[str]:
    """The weights after each step of two epochs of a loader."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped = nn.parallel.DistributedDataParallel(model)
    loader = DataLoader(DATA, **options)
    run = zero_torch.protect(wrapped, optimizer, loader, microbatches=3)
    found = []
    for _ in range(2):
        for batch in run.loader:
            run.backward(wrapped(batch.float().view(-1, 1)).mean())
            if run.step():
                found.append(run.weight_hash())
    return found


ELEVEN = {"batch_size": 2, "sampler": WeightedRandomSampler(range(1, SIZE + 1), 11)}
BY_LENGTH = batched(Lengths())


@pytest.mark.parametrize(("options", "steps"), [(ELEVEN, 4), (BY_LENGTH, 4)])
def test_what_a_sampler_draws_is_the_same_at_any_number_of_ranks(
    worlds: WorldPool, options: dict[str, Any], steps: int
) -> None:
    (alone,) = worlds.run(1, drawn, options)
    assert len(set(alone)) == steps
    assert worlds.run(4, drawn, options) == [alone] * 4


def refused_share() -> str:
    batches = Share()
    batches.rank = dist.get_rank()
    return refusal(DataLoader(DATA, batch_sampler=batches))


def test_batches_of_one_rank_are_refused_on_every_rank(worlds: WorldPool) -> None:
    for said in worlds.run(2, refused_share):
        assert "a Share, gives the batches of one rank; give one of the whole dataset" in said
