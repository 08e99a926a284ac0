"""What all ranks must be given alike, compared before they train.

Must always hold: ranks with other parameters, data or settings do not train together. Exchanges are
matched by their order: of two layers of one shape that a rank has made in another order, each would
get the gradients of the other, and nothing would fail. With another seed or dataset some samples
would be trained twice, and others never.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

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


def of_module(module: nn.Module) -> dict[str, Any]:
    """Its parameters and buffers, in their order."""
    trained = {True: "trained", False: "frozen"}
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
    """The number of samples of a dataset or DataLoader, if it has one for all ranks."""
    dataset = getattr(data, "dataset", data) if isinstance(data, DataLoader) else data
    if isinstance(dataset, IterableDataset):  # it may count those of one rank
        return {}
    try:
        return {"the number of samples": len(dataset)}
    except (TypeError, NotImplementedError):
        return {}


def of_settings(elastic: Elastic) -> dict[str, Any]:
    """The section "elastic", but for a directory that nodes may name in their own way."""
    found = {f"elastic.{key}": value for key, value in vars(elastic).items()}
    del found["elastic.sample_ledger"]
    return found


def check(facts: Mapping[str, Any], everybodys: Callable[[Tensor, str], Tensor]) -> None:
    """Compare what this rank is given with what the others are. Collective.

    Args:
        facts: By its name, each a JSON value; of a list the first item that differs is named.
        everybodys: Gathers rows of all ranks.

    Raises:
        ConfigError: Something differs; names the first. On every rank.
    """
    checksum = zlib.crc32(json.dumps(facts).encode())
    seen = everybodys(torch.tensor([checksum], device="cpu"), _WHAT)
    if bool((seen == seen[0]).all()):
        return
    first, *others = gather_objects(dict(facts), _WHAT, everybodys)
    for rank, other in enumerate(others, 1):
        for name, ours in first.items():
            what, mine, theirs = name, ours, other.get(name)
            if theirs == mine:
                continue
            if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
                pairs = enumerate(zip_longest(ours, theirs, fillvalue="absent"))
                number, (mine, theirs) = next(each for each in pairs if each[1][0] != each[1][1])
                what = f"{name} {number}"
            raise ConfigError(_DIFFERS.format(what=what, ours=mine, theirs=theirs, rank=rank))
