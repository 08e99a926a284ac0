"""Every kind of data: consumed exactly once, one result at every world, resumed at the sample."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tests.support.models import Tokens
from tests.support.training import DATASET_SIZE, config, make_engine, train
from tests.support.world import WorldError, WorldPool, one_result
from zero_contract.errors import ConfigError, ZeroError
from zero_data.ledger import read_ledger, verify
from zero_engine.core.engine import Engine

STEPS = 7
"""Into the third epoch of 23 samples, in steps of 10."""


class Stream(IterableDataset[Tensor]):
    """The sequences of `Tokens`, divided among those who read."""

    def __init__(self, size: int = DATASET_SIZE) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        assert info is not None
        for index in range(info.id, self.size, info.num_workers):
            yield Tokens(self.size)[index]


class Map(Dataset[Tensor]):
    """The same sequences with random access."""

    def __len__(self) -> int:
        return DATASET_SIZE

    def __getitem__(self, index: int) -> Tensor:
        return Tokens(DATASET_SIZE)[index]


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


def change_the_batch() -> list[str]:
    engine = make_engine(config(1), training_data=Stream())
    engine.set_train_batch_size(8)
    train(engine, 1)
    found = []
    for change in (engine.set_train_batch_size, engine.set_train_micro_batch_size):
        with pytest.raises(ConfigError) as refused:
            change(4)
        found.append(str(refused.value))
    train(engine, 2)
    return found


def test_a_run_keeps_its_lanes_from_its_first_step_on(worlds: WorldPool) -> None:
    (found,) = worlds.run(1, change_the_batch)
    for text in found:
        assert text.startswith("a lane gives one micro-batch to each step, so a run with 4 lanes")


def misread(kind: str, root: str) -> None:
    match kind:
        case "iterator":
            make_engine(config(), training_data=iter([1, 2]))
        case "loader":
            make_engine(config(), training_data=DataLoader(Tokens(8), batch_size=3))
        case "empty":
            next(iter(make_engine(config(), training_data=Stream(0)).training_dataloader))
        case "small":
            settings = config(dataloader_drop_last=True)
            next(iter(make_engine(settings, training_data=Stream(7)).training_dataloader))
        case "unmanaged":
            settings = config(managed_gradient_accumulation=False)
            make_engine(settings, training_data=Stream())
        case "ledger":
            engine = make_engine(config(elastic={"sample_ledger": root}), training_data=None)
            engine.backward(engine(torch.stack([Tokens(2)[0], Tokens(2)[1]])))
        case "evaluation":
            engine = make_engine(config(), training_data=Map())
            engine.deepspeed_io(Stream(), route="eval")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("iterator", "list_iterator cannot be begun again"),
        ("loader", "train_micro_batch_size_per_gpu=2: the DataLoader has batch_size=3; give one"),
        ("empty", "training_data: no lane of 5 has a sample in epoch 0"),
        ("small", "training_data: lanes do not fill one global batch of 10 samples"),
        ("unmanaged", "Stream is read in lanes, and a step has one micro-batch of each"),
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
