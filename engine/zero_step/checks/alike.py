"""What all ranks must be given alike, compared before they train.

Must always hold: ranks with other parameters, data or settings do not train together. With another
seed or dataset some samples would be trained twice, and others never.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from zero_comm.exchange.objects import gather_objects
from zero_contract.errors import ConfigError
from zero_step.options import Elastic

_WHAT = "what all ranks are given"
_DIFFERS = (
    "the ranks are not given the same: {what} is {ours} on rank 0, and {theirs} on rank {rank}. "
    "Give all ranks the same, in the same order: that of a set of names is another one in each "
    "process (unless PYTHONHASHSEED is the same), as is that of a directory on each node; and a "
    "time or a random number differs"
)


_SHARES = "attributes of the dataset"
_MOST = 100_000
"""Items that are compared."""
_SHARE = (
    "%s of the dataset is %s on rank 0, and %s on rank %d. If that makes it the share of a rank, "
    "samples are lost or repeated, and the bits depend on the number of ranks: give all ranks the "
    "whole dataset, which is divided among them here; a stream divides itself by "
    "torch.utils.data.get_worker_info() in __iter__()"
)
_log = logging.getLogger(__name__)


def of_module(module: nn.Module) -> dict[str, Any]:
    """Its parameters and buffers, in their order."""
    trained = {True: "trained", False: "frozen"}
    # Exchanges are matched by their order: of two layers of one shape that a rank has made in
    # another order, each would get the gradients of the other, and nothing would fail.
    return {
        "parameter": [
            f"{name} {list(each.shape)} {each.dtype}, {trained[each.requires_grad]}"
            for name, each in module.named_parameters()
        ],
        "buffer": [
            f"{name} {list(each.shape)} {each.dtype}" for name, each in module.named_buffers()
        ],
    }


def of_data(data: Any) -> dict[str, Any]:
    """What a dataset or DataLoader has for all ranks: how many samples, which, and its numbers."""
    dataset = getattr(data, "dataset", data) if isinstance(data, DataLoader) else data
    found: dict[str, Any] = {}
    if not isinstance(dataset, IterableDataset):  # which may count those of one rank
        with suppress(TypeError, NotImplementedError):
            found["the number of samples"] = len(dataset)
    if type(dataset) is Subset:
        found["the Subset"] = _described([*dataset.indices])
    attributes = getattr(dataset, "__dict__", {}).items()
    found[_SHARES] = {key: _described(each) for key, each in attributes if _may_share(each)}
    return found


def _may_share(each: object) -> bool:
    """Whether it may be the share of a rank, or say which: a number, or some numbers or names."""
    if isinstance(each, list | tuple):
        return all(type(one) in (int, str) for one in each[:_MOST])
    return type(each) in (int, range)


def _described(each: Any) -> str:
    if isinstance(each, list | tuple):
        return f"{len(each)} items, of the checksum {zlib.crc32(repr(each[:_MOST]).encode()):08x}"
    return repr(each)


def of_settings(elastic: Elastic) -> dict[str, Any]:
    """The section "elastic", but for a directory that nodes may name in their own way."""
    found = {f"elastic.{key}": value for key, value in vars(elastic).items()}
    del found["elastic.sample_ledger"]
    return found


def check(
    facts: Mapping[str, Any], everybodys: Callable[[Tensor, str], Tensor], call: str = _WHAT
) -> None:
    """Compare facts that this rank is given with those of the others, as JSON. Collective.

    `call` is what a rank that waits for the others waits for.

    Rank 0 warns of a dataset that may be the share of a rank.

    Raises:
        ConfigError: Something differs; names the first, of a list its first item. On every rank.
    """
    refuse(differences(facts, everybodys, call))


Difference = tuple[int, str, Any, Any]
"""A rank, the name of a fact, the fact on rank 0, and on that rank."""


def differences(
    facts: Mapping[str, Any], everybodys: Callable[[Tensor, str], Tensor], call: str
) -> list[Difference]:
    """What is not as on rank 0, by rank. Collective."""
    checksum = zlib.crc32(json.dumps(facts).encode())
    seen = everybodys(torch.tensor([checksum], device="cpu"), call)
    if bool((seen == seen[0]).all()):
        return []
    first, *others = gather_objects(dict(facts), call, everybodys)
    return [
        (rank, name, first.get(name), other.get(name))
        for rank, other in enumerate(others, 1)
        for name in {**first, **other}
        if other.get(name) != first.get(name)
    ]


def refuse(differing: Iterable[Difference]) -> None:
    """Raise the error of `check`, if anything differs."""
    for rank, name, ours, theirs in differing:
        if name == _SHARES:
            # No error: whether an attribute makes it a share, the script alone knows.
            rest = theirs or {}
            key = next(key for key in {**ours, **rest} if ours.get(key) != rest.get(key))
            if dist.get_rank() == 0:
                _log.warning(_SHARE, key, ours.get(key), rest.get(key), rank)
            continue
        what, pair = name, (ours, theirs)
        if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
            pairs = enumerate(zip_longest(ours, theirs, fillvalue="absent"))
            number, pair = next(each for each in pairs if each[1][0] != each[1][1])
            what = f"{name} {number}"
        raise ConfigError(_DIFFERS.format(what=what, ours=pair[0], theirs=pair[1], rank=rank))
