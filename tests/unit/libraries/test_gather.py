"""What a script gathers by accelerate is complete, also where ranks have other numbers of rows."""

from __future__ import annotations

import os
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.world import WorldPool

pytestmark = pytest.mark.filterwarnings("ignore")  # its own, when it is imported
ROWS = [(2, 2, 2), (2, 1, 2), (0, 3, 1)]
"""Of each of three ranks."""


def rows_of(rank: int, count: int) -> dict[str, Any]:
    rows = torch.arange(2 * count).reshape(count, 2) + 10 * rank
    return {"rows": rows, "more": [rows.bool().any(1)], "mean": torch.tensor(float(rank))}


def gathers(shapes: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    from accelerate import Accelerator

    from zero_libraries.accelerate import hand_over

    rank, run = dist.get_rank(), None  # which only a step needs
    world = str(dist.get_world_size())
    ours = {"RANK": str(rank), "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": world}
    with patch.dict(os.environ, {**ours, **local}):  # the group is there: nobody connects
        accelerator = Accelerator(cpu=True)
    hand_over(accelerator, cast(Any, run))
    return [accelerator.gather_for_metrics(rows_of(rank, counts[rank])) for counts in shapes]


def test_rows_of_all_ranks_are_gathered_whatever_their_number(worlds: WorldPool) -> None:
    pytest.importorskip("accelerate")
    for found in worlds.run(3, gathers, ROWS):
        for counts, each in zip(ROWS, found, strict=True):
            wanted = [rows_of(rank, count) for rank, count in enumerate(counts)]
            torch.testing.assert_close(each, joined(wanted))


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    def cat(tensors: list[Tensor]) -> Tensor:
        return torch.cat([each.reshape(-1) if not each.ndim else each for each in tensors])

    return {
        "rows": cat([part["rows"] for part in parts]),
        "more": [cat([part["more"][0] for part in parts])],
        "mean": cat([part["mean"] for part in parts]),
    }
