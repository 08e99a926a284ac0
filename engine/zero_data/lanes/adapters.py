"""The source of a dataset: how its samples are divided among lanes.

Must always hold: what a dataset yields in a lane depends on (lane, lanes, epoch) alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.utils.data._utils.worker as torch_worker

from zero_contract.errors import ConfigError
from zero_data.lanes.source import Reader, Source


def source_of(dataset: Any) -> Source:
    """How lanes read a dataset.

    Raises:
        ConfigError: It cannot be begun again.
    """
    if isinstance(dataset, Iterator) or not isinstance(dataset, Iterable):
        raise ConfigError(
            f"{type(dataset).__name__} cannot be begun again, so a position in it cannot be found; "
            "give a dataset, or an object whose iter() starts from the beginning"
        )
    return Iterables(dataset)


@dataclass(frozen=True, slots=True)
class Iterables:
    """An iterable that divides itself by `torch.utils.data.get_worker_info()`."""

    dataset: Iterable[Any]

    def open(self, lane: int, lanes: int, epoch: int, state: dict[str, Any] | None) -> Reader:
        """See `Source`."""
        return _Iterating(self.dataset, lane, lanes, epoch, state)


class _Iterating:
    def __init__(
        self, dataset: Any, lane: int, lanes: int, epoch: int, state: dict[str, Any] | None
    ) -> None:
        self._lane = lane, lanes
        if hasattr(dataset, "state_dict"):  # which is that of one iteration
            dataset = copy.deepcopy(dataset)
        self._dataset = dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if state is not None:
            dataset.load_state_dict(state)
        with as_worker(dataset, *self._lane):
            self._samples = iter(dataset)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with as_worker(self._dataset, *self._lane):
            return next(self._samples)

    def state(self) -> dict[str, Any] | None:
        given = getattr(self._dataset, "state_dict", None)
        return None if given is None else given()


@contextmanager
def as_worker(dataset: Any, number: int, workers: int) -> Iterator[None]:
    """Let `get_worker_info()` say that this is one of so many loading processes."""
    before = torch_worker._worker_info
    seed = before.seed if before is not None else 0
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=workers, seed=seed, dataset=dataset
    )
    try:
        yield
    finally:
        torch_worker._worker_info = before
