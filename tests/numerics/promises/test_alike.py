"""Ranks that are given other models, data or settings do not train together: it is said what."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import zero_engine
import zero_torch
from tests.support import stock
from tests.support.saving import heard
from tests.support.world import WorldPool
from zero_contract.errors import ConfigError

ALIKE: dict[str, Any] = {
    "layers": ["key", "query", "value"],
    "width": 4,
    "frozen": "",
    "buffer": "scale",
    "samples": 12,
    "microbatches": 4,
    "batch_size": 1,
    "seed": 7,
    "reduction_block": 4,
    "deterministic": "warn",
}
OTHERS: dict[str, tuple[Any, str]] = {
    "layers": (["query", "value", "key"], "parameter 0 is key.weight [4, 4] torch.float32, tra"),
    "width": (5, "parameter 0 is key.weight [4, 4] torch.float32, trained on rank 0, and key.w"),
    "frozen": ("query.bias", "parameter 3 is query.bias [4] torch.float32, trained on rank 0, a"),
    "buffer": ("shift", "buffer 0 is scale [1] torch.float32 on rank 0, and shift [1] torch.f"),
    "samples": (11, "the number of samples is 12 on rank 0, and 11 on rank 1"),
    "microbatches": (2, " is 4 on rank 0, and 2 on rank 1"),
    "batch_size": (3, " is 1 on rank 0, and 3 on rank 1"),
    "seed": (8, "seed is 7 on rank 0, and 8 on rank 1"),
    "reduction_block": (2, "elastic.reduction_block is 4 on rank 0, and 2 on rank 1"),
    "deterministic": ("off", "elastic.deterministic is warn on rank 0, and off on rank 1"),
}


def model_of(layers: list[str], width: int, frozen: str, buffer: str) -> nn.Module:
    model = nn.Sequential(OrderedDict({name: nn.Linear(width, width) for name in layers}))
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    model.register_buffer(buffer, torch.ones(1))
    return model


def told(back_end: str, what: str) -> str:
    """What a rank is told where rank 1 is given something else."""
    given = {**ALIKE, **({what: OTHERS[what][0]} if dist.get_rank() and what else {})}
    model = model_of(given["layers"], given["width"], given["frozen"], given["buffer"])
    data = TensorDataset(torch.ones(given["samples"], 4))
    elastic = {key: given[key] for key in ("reduction_block", "deterministic")}
    try:
        if back_end.startswith("stage"):
            config = {
                "train_batch_size": given["microbatches"] * given["batch_size"],
                "train_micro_batch_size_per_gpu": given["batch_size"],
                "zero_optimization": {"stage": int(back_end[-1])},
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "seed": given["seed"],
                "elastic": elastic,
            }
            zero_engine.initialize(model, training_data=data, config=config)
        else:
            wrapped = stock.wrap(model, back_end)
            zero_torch.protect(
                wrapped,
                torch.optim.SGD(wrapped.parameters(), lr=0.1),
                DataLoader(data, batch_size=given["batch_size"]),
                microbatches=given["microbatches"],
                config={"elastic": {"seed": given["seed"], **elastic}},
            )
    except ConfigError as error:
        return str(error)
    return ""


NOT_BY = {"ddp": {"width", "frozen"}}
"""What torch itself refuses before."""


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("back_end", ["ddp", "fsdp2", "stage0", "stage3"])
@pytest.mark.corners(back_end=["fsdp2", "stage3"], what=["layers", "samples", "seed"])
def test_what_one_rank_is_given_differently_is_named_on_all(
    worlds: WorldPool, back_end: str, what: str
) -> None:
    if what in NOT_BY.get(back_end, ()):
        return
    sentence = OTHERS[what][1]
    if what == "batch_size" and back_end.startswith("stage"):
        sentence = "train_batch_size is 4 on rank 0, and 12 on rank 1"
    for found in worlds.run(2, told, back_end, what):
        assert sentence in found
        assert found.startswith("the ranks are not given the same: ")


@pytest.mark.parametrize("back_end", ["fsdp2", "stage3"])
@pytest.mark.corners(back_end=["stage3"])
def test_what_all_are_given_alike_is_taken(worlds: WorldPool, back_end: str) -> None:
    assert worlds.run(2, told, back_end, "") == ["", ""]


class OfRank(IterableDataset[tuple[torch.Tensor]]):
    """As scripts of DDP divide a stream: the rank is asked for where the dataset is made."""

    def __init__(self) -> None:
        self.rank, self.world, self.path = dist.get_rank(), dist.get_world_size(), str(os.getpid())

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        for number in range(self.rank, 12, self.world):
            yield (torch.full((4,), float(number)),)


class OfFiles(OfRank):
    def __init__(self) -> None:
        self.files = [f"{number}.parquet" for number in range(dist.get_rank(), 12, 2)]


def own_part() -> Any:
    return Subset(TensorDataset(torch.ones(12, 4)), range(dist.get_rank(), 12, 2))


def own_part_of_others() -> Any:
    """Rank 0 has the whole of its own, with as many samples."""
    data = TensorDataset(torch.ones(12, 4))
    return Subset(data, range(0, 12, 2)) if dist.get_rank() else TensorDataset(torch.ones(6, 4))


def told_of_shares(back_end: str, made: Any) -> list[str]:
    """What a rank is told of a dataset: warnings, and the error last."""
    model = nn.Linear(4, 4)
    with heard(logging.WARNING) as lines:
        try:
            if back_end == "stage0":
                config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}
                optimizer = {"type": "SGD", "params": {"lr": 0.1}}
                zero_engine.initialize(
                    model, training_data=made(), config={**config, "optimizer": optimizer}
                )
            else:
                wrapped = stock.wrap(model, back_end)
                optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
                zero_torch.protect(wrapped, optimizer, DataLoader(made()), microbatches=4)
        except ConfigError as error:
            lines.append(str(error))
    return [line for line in lines if "rank 0" in line]


@pytest.mark.parametrize("back_end", ["ddp", "stage0"])
@pytest.mark.corners(back_end=["ddp"])
def test_a_dataset_that_is_the_share_of_its_rank_is_named(worlds: WorldPool, back_end: str) -> None:
    first, second = worlds.run(2, told_of_shares, back_end, OfRank)
    assert ["rank of the dataset is 0 on rank 0, and 1 on rank 1" in it for it in first] == [True]
    assert second == []  # once, and not that of the path
    (told,), _ = worlds.run(2, told_of_shares, back_end, OfFiles)
    assert told.startswith("files of the dataset is 6 items, of the checksum ")
    for (refused,) in worlds.run(2, told_of_shares, back_end, own_part):
        assert "the Subset is 6 items, of the checksum " in refused
    for *_, refused in worlds.run(2, told_of_shares, back_end, own_part_of_others):
        assert "the Subset is None on rank 0, and 6 items, of the checksum " in refused
