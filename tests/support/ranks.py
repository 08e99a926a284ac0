"""Ranks as threads of this process, of which one runs at a time: they meet in `exchange` alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Exchange = Callable[[Tensor], Tensor]


class Ranks:
    def __init__(self, world: int) -> None:
        self._world = world
        self._turn = threading.Condition()
        self._given: dict[int, Tensor] = {}
        self._together: list[Tensor] = []

    def _exchange(self, rank: int, own: Tensor) -> Tensor:
        meeting = len(self._together)
        self._given[rank] = own.clone()
        if len(self._given) == self._world:
            self._together.append(torch.stack([self._given[each] for each in range(self._world)]))
            self._given.clear()
            self._turn.notify_all()
        else:
            assert self._turn.wait_for(lambda: len(self._together) > meeting, timeout=30)
        return self._together[meeting]

    def run(self, function: Callable[[int, Exchange], T]) -> list[T]:
        """What `function(rank, exchange)` returns on every rank."""

        def of_rank(rank: int) -> T:
            with self._turn:
                return function(rank, lambda own: self._exchange(rank, own))

        with ThreadPoolExecutor(self._world) as pool:
            return list(pool.map(of_rank, range(self._world)))
