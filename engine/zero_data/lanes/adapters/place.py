"""The place of a dataset that a lane reads: a loading process among several, of a job of one rank.

Must always hold: whatever a dataset asks to divide itself (`get_worker_info()`, the rank and world
size of torch.distributed or of the environment), the answer depends on the lane alone. Only the
thread that reads gets these answers from torch.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch.distributed
import torch.utils.data._utils.worker as torch_worker

from zero_data.global_batch import mix

_ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1"}
_ALONE = {"get_rank": 0, "get_world_size": 1}
_FREE = threading.RLock()
"""Of what a reading thread replaces."""


class Worker:
    """The answer of `get_worker_info()`; notes whether a dataset divides itself by it."""

    def __init__(self, number: int, workers: int, epoch: int, *, alone: bool = False) -> None:
        """One of so many workers; `alone`: for whoever asks, there are no workers."""
        self.number, self.workers, self.epoch, self.alone = number, workers, epoch, alone
        self.seed = mix(epoch, number) >> 1
        self.dataset: Any = None
        self.asked = False

    @property
    def id(self) -> int:
        """The number of the process."""
        self.asked = True
        return self.number

    @property
    def num_workers(self) -> int:
        """The number of processes."""
        self.asked = True
        return self.workers


@contextmanager
def reading_as(worker: Worker) -> Iterator[None]:
    """Let what a dataset asks be answered with the place of a worker."""
    with _FREE:
        before = torch_worker._worker_info
        torch_worker._worker_info = None if worker.alone else worker  # type: ignore[assignment]
        asked = {name: getattr(torch.distributed, name, None) for name in _ALONE}
        for name, original in asked.items():
            setattr(torch.distributed, name, _answer(_ALONE[name], original))
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        os.environ.update({name: _ENVIRONMENT[name] for name in environment})
        try:
            yield
        finally:
            os.environ.update(environment)
            for name, original in asked.items():
                setattr(torch.distributed, name, original)
            torch_worker._worker_info = before


def _answer(alone: int, original: Callable[..., int] | None) -> Callable[..., int]:
    thread = threading.get_ident()

    def answer(*args: Any, **kwargs: Any) -> int:
        if original is None or threading.get_ident() == thread:
            return alone
        return original(*args, **kwargs)

    return answer


def seed_process(seed: int) -> None:
    """Seed the random numbers of torch on the CPU, Python and numpy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


@contextmanager
def seeds_kept() -> Iterator[None]:
    """Leave these random numbers as they were."""
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
