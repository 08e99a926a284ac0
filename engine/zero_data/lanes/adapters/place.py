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
from zero_data.position_loader import kept

_ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1"}
_ALONE = {"get_rank": 0, "get_world_size": 1}


class _Alone:
    """A context in which this thread is told that there is one rank; it may be entered again.

    `get_worker_info()` answers afterwards as before.
    """

    def __init__(self) -> None:
        self._free = threading.RLock()
        self._thread = 0
        self._before: list[Any] = []
        """What `get_worker_info()` has answered, each time that it was entered."""
        self._environment: dict[str, str] = {}
        self._of_torch: dict[str, Callable[..., int] | None] = {}

    def __enter__(self) -> None:
        self._free.acquire()
        self._before.append(torch_worker._worker_info)
        if len(self._before) > 1:
            return
        self._thread = threading.get_ident()
        for name, alone in _ALONE.items():
            self._of_torch[name] = original = getattr(torch.distributed, name, None)
            setattr(torch.distributed, name, self._answer(original, alone))
        self._environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        for variable in self._environment:
            os.environ[variable] = _ENVIRONMENT[variable]

    def __exit__(self, *_: object) -> None:
        torch_worker._worker_info = self._before.pop()
        if not self._before:
            self._thread = 0
            os.environ.update(self._environment)
            for name, original in self._of_torch.items():
                setattr(torch.distributed, name, original)
        self._free.release()

    def is_here(self) -> bool:
        """Whether this thread is within."""
        return self._thread == threading.get_ident()

    def _answer(self, original: Callable[..., int] | None, alone: int) -> Callable[..., int]:
        def answer(*args: Any, **kwargs: Any) -> int:
            if original is None or self.is_here():
                return alone
            return original(*args, **kwargs)

        return answer


ALONE = _Alone()


class Worker:
    """The answer of `get_worker_info()`, and a context in which it is given.

    It notes whether a dataset divides itself by it.
    """

    def __init__(self, number: int, workers: int, epoch: int, *, alone: bool = False) -> None:
        """One of so many workers; `alone`: for whoever asks, there are no workers."""
        self.number, self.workers, self.epoch = number, workers, epoch
        self.seed = mix(epoch, number) >> 1
        self.dataset: Any = None
        self.asked = False
        self._told: Any = None if alone else self

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

    def __enter__(self) -> None:
        ALONE.__enter__()
        self.tell()

    def __exit__(self, *_: object) -> None:
        ALONE.__exit__()

    def tell(self) -> None:
        """Let `get_worker_info()` answer this one, until `ALONE` is left."""
        torch_worker._worker_info = self._told


def seed_process(seed: int) -> None:
    """Seed the random numbers of torch on the CPU, Python and numpy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers come from a seed in this context, and are afterwards as before."""
    with kept():
        seed_process(seed)
        yield
