"""The process group of simulated workers: their exchanges in a step, and their TCPStore."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.simulation.standard_library import Waiters
from zero_comm.worker.distributed import GroupStore

if TYPE_CHECKING:
    from tests.simulation.training import Training, Worker

UNREACHABLE_S = 30.0
"""A call to a TCPStore that does not answer fails after this time."""


class Exchange:
    """One exchange of a group: it ends when all ranks have come to it."""

    def __init__(self, training: Training, name: str) -> None:
        self.name = name
        self.notes: dict[int, Any] = {}
        self.over = False
        self.waiters = Waiters(training.kernel)


class Group:
    """The workers of one round, as they meet at its TCPStore."""

    def __init__(self, training: Training, store: str, world: int) -> None:
        self.training, self.store, self.world = training, store, world
        self.members: dict[int, Worker] = {}
        self.exchanges: dict[str, Exchange] = {}
        self.values: dict[str, bytes] = {}
        """What the TCPStore holds."""
        self.deaf: set[Worker] = set()
        """Who has ended its own calls to the TCPStore."""

    def reaches_store(self, worker: Worker) -> bool:
        """Whether the TCPStore answers a worker."""
        host = self.store.partition(":")[0]
        connects = self.training.machines.network.connects
        return self.is_open and connects(worker.machine.name, host)

    @property
    def is_open(self) -> bool:
        """Whether the process of the TCPStore lives."""
        host = self.store.partition(":")[0]
        return self.store in self.training.machines.by_name[host].stores

    def exchange(
        self, worker: Worker, name: str, note: Any, within_s: float = math.inf
    ) -> dict[int, Any]:
        """The notes of all ranks, by rank.

        Raises:
            PeerLost: A rank is lost.
            RuntimeError: A rank has not come in time.
        """
        until_s = self.training.kernel.now + within_s
        worker.raise_if_lost(name)
        exchange = self.exchanges.setdefault(name, Exchange(self.training, name))
        exchange.notes[worker.rank] = note
        if len(exchange.notes) == self.world:
            self.training.kernel.after(0.002, lambda: self._complete(exchange))
        worker.meets = exchange.waiters
        with worker.globals.waits.waiting(name, 0):
            while not exchange.over:
                exchange.waiters.wait_until(lambda: exchange.over or worker.lost, 1.0)
                if not exchange.over:
                    worker.raise_if_lost(name)
                    if self.training.kernel.now > until_s:
                        raise RuntimeError(f"timed out waiting for {within_s:g} s")
        worker.meets = None
        return dict(sorted(exchange.notes.items()))

    def _complete(self, exchange: Exchange) -> None:
        if exchange.over:
            return
        names = {member.machine.name for member in self.members.values()}
        connects = self.training.machines.network.connects
        if all(connects(one, other) for one in names for other in names if one < other):
            exchange.over = True
            self.exchanges.pop(exchange.name, None)
            exchange.waiters.wake()
        else:  # the kernel sends again until it arrives
            self.training.kernel.after(0.5, lambda: self._complete(exchange))

    def lose(self, gone: Worker, *, silent: bool) -> None:
        """A member has ended, or left; whom its machine reaches notices."""
        connects = self.training.machines.network.connects
        for member in list(self.members.values()):
            if member is gone or silent or not connects(member.machine.name, gone.machine.name):
                continue
            self.training.kernel.after(0.01, partial(member.peer_lost, self))


class Votes:
    """A part of the TCPStore of a group, as one worker sees it: what a torch `Store` does."""

    votes_key = GroupStore.votes_key

    def __init__(self, worker: Worker, part: str) -> None:
        self.path = f"zero/{part}"
        self._worker, self._group = worker, worker.group

    def check(self, keys: list[str]) -> bool:
        return self._call(lambda: all(f"{self.path}/{key}" in self._group.values for key in keys))

    def get(self, key: str) -> bytes:
        found: bytes = self._call(lambda: self._group.values[f"{self.path}/{key}"])
        return found

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._call(lambda: self._group.values.update({f"{self.path}/{key}": data}))

    def add(self, key: str, amount: int) -> int:
        def add() -> int:
            name = f"{self.path}/{key}"
            sum_ = int(self._group.values.get(name, b"0")) + amount
            self._group.values[name] = b"%d" % sum_
            return sum_

        return int(self._call(add))

    def delete_key(self, key: str) -> bool:
        return self._call(lambda: self._group.values.pop(f"{self.path}/{key}", None)) is not None

    def _call(self, call: Callable[[], Any]) -> Any:
        kernel, group = self._group.training.kernel, self._group
        until_s = kernel.now + UNREACHABLE_S
        kernel.park(0.0004)
        while self._worker in group.deaf or not group.reaches_store(self._worker):
            if self._worker in group.deaf or not group.is_open or kernel.now > until_s:
                raise RuntimeError("Broken pipe")
            kernel.park(0.5)
        return call()


class Meeting:
    """What `zero_step.session` needs of the collectives of a group."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._group, self.world = worker, worker.group, worker.world
        self.detector = SimpleNamespace(begun=Counter(), end=lambda what: None)

    def call(self, what: str) -> Callable[[], None]:
        """Count it: nobody looks at the others."""
        self.detector.begun[what] += 1
        return lambda: None

    def barrier(self, what: str) -> None:
        """Wait for all ranks."""
        self._group.exchange(self._worker, what, None)

    def everybodys(self, data: Tensor, what: str) -> Tensor:
        """The rows of all ranks."""
        return torch.stack([*self._group.exchange(self._worker, what, data).values()])


class Distributed:
    """What `zero_comm.worker.distributed` needs of `torch.distributed`, in the worker that runs."""

    def __init__(self, worker: Callable[[], Worker]) -> None:
        self._worker = worker
        store = SimpleNamespace(set_timeout=lambda timeout: None)
        self.distributed_c10d = SimpleNamespace(
            _abort_process_group=lambda: worker().leave_group(),
            _set_pg_timeout=lambda timeout: None,
            _get_default_store=lambda: store,
        )

    def is_initialized(self) -> bool:
        """Whether it is in a group."""
        return self._worker().group is not None

    def is_nccl_available(self) -> bool:
        """There are no devices."""
        return False

    def init_process_group(self, backend: str, timeout: timedelta) -> None:
        """Meet the other ranks at the store that the environment names."""
        self._worker().join_group(timeout.total_seconds())
