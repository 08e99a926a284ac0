"""Every kind of data: consumed exactly once, one result at every world, resumed at the sample."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.support.models import Tokens
from tests.support.training import DATASET_SIZE, config, make_engine, train
from tests.support.world import WorldError, WorldPool, one_result
from zero_contract.errors import ZeroError
from zero_data.ledger import read_ledger, verify
from zero_engine.core.engine import Engine

STEPS = 7
"""Into the third epoch of 23 samples, in steps of 10."""


class Stream(IterableDataset[Tensor]):
    """The sequences of `Tokens`, one after the other; nobody knows how many."""

    def __init__(self, size: int = DATASET_SIZE) -> None:
        self.size = size
        self.read = 0

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.size):
            self.read += 1
            yield Tokens(self.size)[index]


class Shuffling(Stream):
    """Out of a buffer, in an order of global random numbers and of the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[Tensor] = []
        for sample in super().__iter__():
            buffer.append((sample + self.epoch) % 131)
            if len(buffer) > 4:
                yield buffer.pop(random.randrange(len(buffer)))
        yield from buffer


class Shards(Stream):
    """The same sequences in four shards; counts what is read."""

    shard_sizes = (9, 2, 0, 12)

    def read_shard(self, shard: int, start: int) -> Iterator[Tensor]:
        before = sum(self.shard_sizes[:shard])
        for number in range(start, self.shard_sizes[shard]):
            self.read += 1
            yield Tokens(self.size)[before + number]


class ShardPerMicroBatch(Shards):
    """A shard for each of the five micro-batches of a step."""

    shard_sizes = (5, 4, 5, 4, 5)


class Growing(Stream):
    """One sample more in every pass."""

    def __iter__(self) -> Iterator[Tensor]:
        self.size += 1
        return super().__iter__()


class Map(Dataset[Tensor]):
    """The same sequences with random access."""

    def __len__(self) -> int:
        return DATASET_SIZE

    def __getitem__(self, index: int) -> Tensor:
        return Tokens(DATASET_SIZE)[index]


KINDS: dict[str, Any] = {
    "stream": Stream,
    "shuffling": Shuffling,
    "shards": Shards,
    "shard per micro-batch": ShardPerMicroBatch,
    "map": Map,
}


def make(kind: str, ledger: str | None = None, workers: int = 0, stage: int = 2) -> Engine:
    elastic = {"shuffle": False, "sample_ledger": ledger}
    return make_engine(
        config(stage, elastic=elastic), training_data=KINDS[kind](), num_workers=workers
    )


def train_on(kind: str, ledger: str | None = None, workers: int = 0) -> str:
    engine = make(kind, ledger, workers)
    train(engine, STEPS)
    assert engine.global_samples == 56  # 10 + 10 + 3, twice, and 10
    assert engine.training_dataloader.epoch == 2
    engine.destroy()
    return engine.weight_hash()


# ---- streams and shards ----


@pytest.mark.parametrize("kind", ["stream", "shuffling", "shards"])
@pytest.mark.full
def test_iterable_data_gives_one_result_and_is_consumed_exactly_once_at_every_world(
    worlds: WorldPool, tmp_path: Path, kind: str
) -> None:
    hashes = set()
    for world in (1, 2, 3, 4):
        ledger = tmp_path / str(world)
        hashes |= set(worlds.run(world, train_on, kind, str(ledger)))
        report = verify(read_ledger(ledger), DATASET_SIZE)
        assert (report.problems, report.samples) == ((), 56)
    hashes |= set(worlds.run(2, train_on, kind, None, 1))  # read ahead by another process
    assert len(hashes) == 1


def test_a_stream_is_trained_on_as_the_same_data_with_random_access(worlds: WorldPool) -> None:
    assert one_result(worlds, train_on, "stream") == one_result(worlds, train_on, "map")


@pytest.mark.parametrize("kind", ["stream", "shuffling", "shards"])
@pytest.mark.parametrize("at", [2, 3, 5], ids=lambda step: f"after {step}")
@pytest.mark.corners(at=[3], kind=["shuffling", "shards"])
def test_iterable_data_goes_on_at_the_sample_at_another_world(
    worlds: WorldPool, tmp_path: Path, kind: str, at: int
) -> None:
    (whole,) = worlds.run(1, train_on, kind)
    worlds.run(2, begin, kind, str(tmp_path), at)
    assert set(worlds.run(3, go_on, kind, str(tmp_path))) == {whole}


def begin(kind: str, root: str, steps: int) -> None:
    engine = make(kind)
    train(engine, steps)
    engine.save_checkpoint(root)


def go_on(kind: str, root: str) -> str:
    engine = make(kind, stage=3)
    engine.load_checkpoint(root)
    train(engine, STEPS)
    return engine.weight_hash()


def test_of_shards_a_rank_reads_what_it_runs_of_a_stream_everything(worlds: WorldPool) -> None:
    assert worlds.run(4, count_read, "stream") == [23] * 4
    # Five micro-batches on four ranks: all run the last one, one rank's and three padding
    # micro-batches.
    assert max(worlds.run(4, count_read, "shard per micro-batch")) <= 11


def count_read(kind: str) -> int:
    engine = make(kind)
    train(engine, 3)
    dataset = engine.training_dataloader.dataset
    return getattr(dataset, "_dataset", dataset).read


@pytest.mark.parametrize("size", [20, 23])
def test_the_tail_of_a_stream_is_dropped_on_request(worlds: WorldPool, size: int) -> None:
    assert worlds.run(2, drop_the_tail, size) == [([10, 20, 30, 40], 2)] * 2


def drop_the_tail(size: int) -> tuple[list[int], int]:
    engine = make_engine(config(1, dataloader_drop_last=True), training_data=Stream(size))
    positions = []
    for _ in range(2):
        for batch in engine.training_dataloader:
            engine.backward(engine(batch))
            engine.step()
            if engine.global_samples not in positions[-1:]:
                positions += [engine.global_samples] if engine.global_samples else []
    return positions, engine.training_dataloader.epoch


def misread(kind: str, root: str) -> None:
    match kind:
        case "iterator":
            make_engine(config(), training_data=iter([1, 2]))
        case "loader":
            make_engine(config(), training_data=DataLoader(Tokens(8), batch_size=2))
        case "empty":
            next(iter(make_engine(config(), training_data=Stream(0)).training_dataloader))
        case "small":
            settings = config(dataloader_drop_last=True)
            next(iter(make_engine(settings, training_data=Stream(7)).training_dataloader))
        case "growing":
            train(make_engine(config(), training_data=Growing(11)), 4)
        case "ledger":
            engine = make_engine(config(elastic={"sample_ledger": root}), training_data=None)
            engine.backward(engine(torch.stack([Tokens(2)[0], Tokens(2)[1]])))
        case "evaluation":
            make("map").deepspeed_io(Stream(), route="eval")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("iterator", "training_data: list_iterator cannot be begun again"),
        ("loader", "training_data: a DataLoader, whose batches would be taken for samples"),
        ("empty", "training_data: the dataset is empty"),
        ("small", "training_data: less than one global batch of 10 samples"),
        ("growing", "this epoch has more samples, the one before had 12: a position in it"),
        ("ledger", "elastic.sample_ledger: the samples of this batch are not known; give"),
        ("evaluation", "Stream has no length, so there are no shares of it"),
    ],
)
def test_data_that_cannot_be_walked_is_named(
    worlds: WorldPool, tmp_path: Path, kind: str, message: str
) -> None:
    with pytest.raises(WorldError, match=message):
        worlds.run(1, misread, kind, str(tmp_path))


# ---- a DataLoader of the script's own ----


def own_engine(ledger: str | None = None) -> tuple[Engine, DataLoader[Any]]:
    engine = make_engine(config(2, elastic={"sample_ledger": ledger}), training_data=None)
    dataset = Tokens(DATASET_SIZE)
    loader = DataLoader(
        dataset,
        batch_sampler=engine.batch_sampler(dataset),
        collate_fn=torch.stack,
        num_workers=1,
        prefetch_factor=3,
        persistent_workers=True,
    )
    return engine, loader


def train_through(engine: Engine, loader: DataLoader[Any], steps: int) -> str:
    while engine.global_steps < steps:
        assert len(loader) > 0
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()
            if engine.global_steps == steps:
                break
    return engine.weight_hash()


def train_with_own_loader(ledger: str) -> str:
    return train_through(*own_engine(ledger), STEPS)


def train_with_ours() -> str:
    engine = make_engine(config(2))
    train(engine, STEPS)
    return engine.weight_hash()


def test_a_loader_of_ones_own_with_the_engines_order_trains_as_the_engines(
    worlds: WorldPool, tmp_path: Path
) -> None:
    expected = one_result(worlds, train_with_ours, sizes=(1,))
    for world in (1, 3):
        ledger = tmp_path / str(world)
        assert set(worlds.run(world, train_with_own_loader, str(ledger))) == {expected}
        assert verify(read_ledger(ledger), DATASET_SIZE).exact


def test_it_goes_on_at_the_sample_whatever_was_prefetched(
    worlds: WorldPool, tmp_path: Path
) -> None:
    expected = one_result(worlds, train_with_ours, sizes=(1,))
    worlds.run(2, stop_early, str(tmp_path))
    assert set(worlds.run(3, load_and_go_on, str(tmp_path))) == {expected}


def stop_early(root: str) -> None:
    engine, loader = own_engine()
    train_through(engine, loader, 2)
    engine.save_checkpoint(root)
    with pytest.raises(ZeroError, match="your own DataLoader has prefetched batches"):
        engine.set_train_batch_size(4)


def load_and_go_on(root: str) -> str:
    engine, loader = own_engine()
    engine.load_checkpoint(root)
    return train_through(engine, loader, STEPS)


def test_a_loader_that_the_engine_knows_nothing_of_is_told_of_in_one_line(
    worlds: WorldPool,
) -> None:
    told, *others = worlds.run(3, lines_of_foreign_loader)
    assert others == [[], []]
    (line,) = told
    assert line.startswith(
        "the batches come from your own DataLoader, and no checkpoint knows which"
    )
    assert worlds.run(1, lines_of_own_loader) == [[]]
    assert worlds.run(1, lines_of_foreign_loader, True) == [[]]  # as accelerate's loops do


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def lines_of_foreign_loader(declares: bool = False) -> list[str]:
    engine = make_engine(config(1), training_data=None)
    if declares:
        engine.set_gradient_accumulation_boundary(True)
    return lines_of(engine, DataLoader(Tokens(8), batch_size=2))


def lines_of_own_loader() -> list[str]:
    return lines_of(*own_engine())


def lines_of(engine: Engine, loader: DataLoader[Any]) -> list[str]:
    handler = Lines()
    logging.getLogger("zero_engine").addHandler(handler)
    try:
        while engine.global_steps < 3:
            for batch in loader:
                engine.backward(engine(batch))
                engine.step()
    finally:
        logging.getLogger("zero_engine").removeHandler(handler)
    return handler.lines
