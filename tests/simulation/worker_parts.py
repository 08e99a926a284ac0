"""What takes the place of what in the product's libraries, while simulated workers use them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, MutableMapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.simulation.group import Distributed, Votes
from tests.simulation.kernel import Kernel
from tests.simulation.sockets import to_agent
from tests.simulation.standard_library import EPOCH_S
from tests.simulation.training import Training, Worker
from zero_checkpoint.last_save import Beginning
from zero_checkpoint.memory.node import keep_manifest
from zero_checkpoint.saving.schedule import Schedule
from zero_comm.worker.rank_times import EveryonesTimes, StepTimer

REAL_ENVIRON = os.environ
POLL_S = 0.02
"""The first pause of a rank that waits for votes; the millisecond of the product costs a third of
all events."""


class OfProcess:
    """A variable of a module, of which each process has its own."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.__dict__.update(kernel=kernel, name=name)

    def _own(self) -> Any:
        return getattr(_worker(self.__dict__["kernel"]).globals, self.__dict__["name"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own(), name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value


class Environ(MutableMapping[str, str]):
    """`os.environ`: that of the simulated worker that runs, or else the real one."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def _own(self) -> MutableMapping[str, str]:
        task = self._kernel.current
        return (
            REAL_ENVIRON if task is None or task.process.owner is None else task.process.owner.env
        )

    def __getitem__(self, name: str) -> str:
        return self._own()[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._own()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._own()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


def _worker(kernel: Kernel) -> Worker:
    assert kernel.current is not None
    worker: Worker = kernel.current.process.owner
    return worker


def worker_parts(training: Training) -> dict[str, Any]:
    """See `standard_library.replaced`."""
    kernel = training.kernel
    environ = Environ(kernel)

    def now() -> float:
        return float(kernel.now)

    def disk_of(place: object, local: object = None) -> Any:
        return training.disk

    def kill(pid: int, number: int) -> None:
        _worker(kernel).signalled(number)

    def beginning() -> Beginning:
        return Beginning(wall_s=EPOCH_S + now(), begin_s=now())

    def keep(directory: Path, text: bytes) -> None:
        training.on_kept(text)
        keep_manifest(directory, text)

    def handle(number: int, handler: Any) -> None:
        _worker(kernel).sigterm_handler = handler

    own_os = SimpleNamespace(environ=environ, getpid=lambda: _worker(kernel).pid, kill=kill)
    own_signal = SimpleNamespace(
        SIGTERM=signal.SIGTERM,
        SIG_DFL=signal.SIG_DFL,
        getsignal=lambda number: _worker(kernel).sigterm_handler,
        signal=handle,
    )
    no_devices = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    return {
        "os:environ": environ,
        "zero_comm.worker.agent_link:hang_up_on_store": lambda: _worker(kernel).hang_up_on_store(),
        "zero_comm.worker.agent_link:os": own_os,
        "zero_comm.worker.agent_link:signal": own_signal,
        "zero_comm.worker.agent_link:socket": to_agent(training.machines),
        "zero_comm.worker.distributed:dist": Distributed(partial(_worker, kernel)),
        "zero_comm.worker.distributed:socket": to_agent(training.machines),
        "zero_comm.worker.distributed:torch": no_devices,
        "zero_comm.worker.agent_link:WAITS": OfProcess(kernel, "waits"),
        "zero_comm.worker.agent_link:recorded": list,
        "zero_comm.worker.agent_link:StepTimer": partial(StepTimer, now=now),
        "zero_comm.worker.agent_link:EveryonesTimes": partial(EveryonesTimes, now=now),
        "zero_checkpoint.persistence:Schedule": partial(Schedule, clock=now),
        "zero_checkpoint.persistence:group_store": lambda part: Votes(_worker(kernel), part),
        "zero_checkpoint.persistence:Beginning": beginning,
        "zero_checkpoint.last_save:Beginning": beginning,
        "zero_checkpoint.persistence:gc": SimpleNamespace(collect=lambda: 0),
        "zero_checkpoint.last_save:_AT_EXIT": OfProcess(kernel, "at_exit"),
        "zero_checkpoint.loading.ownership:_seen": OfProcess(kernel, "seen"),
        "zero_checkpoint.loading.suspects:_suspects": OfProcess(kernel, "suspects"),
        "zero_checkpoint.loading.candidates:disk_of": disk_of,
        "zero_checkpoint.saving.commit:disk_of": disk_of,
        "zero_checkpoint.saving.retention:disk_of": disk_of,
        "zero_checkpoint.saving.memory_commit:keep_manifest": keep,
        "zero_checkpoint.saving.saver:disk_of": disk_of,
        "zero_checkpoint.saving.staging:_GRAIN_BYTES": 4096,
        "zero_checkpoint.consensus:_FIRST_PAUSE_S": POLL_S,
    }
