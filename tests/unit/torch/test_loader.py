"""The loader that zero_torch makes of the script's: its worker processes are as the script says."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from zero_data.global_batch import Cursor, strided
from zero_data.position_loader import LoopCalls
from zero_torch.loader import in_order

SIZE = 6


class Numbers(Dataset[int]):
    """Numbers from `first` on, which each loading process sets for itself."""

    first = 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> int:
        return self.first + number


def begin_at_a_hundred(_: int) -> None:
    info: Any = get_worker_info()
    info.dataset.first = 100


def test_worker_processes_begin_and_live_as_the_scripts_loader_says() -> None:
    loader = DataLoader(
        Numbers(),
        batch_size=2,
        num_workers=1,
        worker_init_fn=begin_at_a_hundred,
        multiprocessing_context="fork",
        prefetch_factor=3,
        timeout=60,
    )
    told: list[str] = []
    batches = in_order(loader, 1, Cursor(), 0, strided(1), 1, torch.atleast_2d)
    batches.calls = LoopCalls(*(partial(told.append, at) for at in ("begin", "-", "end")))
    assert [batch.tolist() for batch in batches] == [[100, 101], [102, 103], [104, 105]]
    assert told == ["begin", "-", "-", "-", "end"]
    own = batches._loader
    for name in ("multiprocessing_context", "prefetch_factor", "timeout", "persistent_workers"):
        assert getattr(own, name) == getattr(loader, name)
