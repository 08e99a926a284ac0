"""Ranks that save together, each a process that a test can kill or stop at any operation.

The votes go through a TCPStore that the test hosts, so that it outlives rank 0. Processes are
forked from a server that has imported torch once.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from tests.unit.checkpoint.support import Full, SmallBlocks, SmallObjects, share
from zero_checkpoint import StoreConsensus
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.place import Place
from zero_checkpoint.files.storage import Disk
from zero_checkpoint.loading.ownership import runs
from zero_checkpoint.saving.commit import save
from zero_contract.worker import ENV_RUN

DEADLINE_S = 60


class Signals:
    """Sends this very process a signal, once, at one operation on one file."""

    def __init__(
        self, stage: str, name: str, number: int = signal.SIGKILL, from_bytes: float = 1
    ) -> None:
        self.stage, self.name, self.number, self.from_bytes = stage, name, number, from_bytes
        self.written = 0

    def _reached(self, stage: str, path: object) -> None:
        if stage == self.stage and self.name in str(path):
            self.stage = ""
            os.kill(os.getpid(), self.number)

    def create(self, path: Any) -> Any:
        self._reached("create", path)
        return super().create(path)  # type: ignore[misc]

    def write(self, file: Any, data: Any) -> None:
        super().write(file, data)  # type: ignore[misc]
        self.written += len(data) if self.name in str(file.name) else 0
        if self.written >= self.from_bytes:
            file.flush()
            self._reached("write", file.name)

    def publish(self, temporary: Any, final: Any, *, replace: bool = False) -> None:
        self._reached("publish", final)
        super().publish(temporary, final, replace=replace)  # type: ignore[misc]
        self._reached("published", final)


class SignalAt(Signals, SmallBlocks):
    """On a file system."""


class SignalAtObject(Signals, SmallObjects):
    """On an object store."""


def own_bytes(full: Full, rank: int, world: int) -> int:
    return sum(p.data.numel() * p.data.element_size() for p in share(full, rank, world).pieces)


class SavingJob:
    """One process for each disk, saving `full` as step 2."""

    def __init__(
        self,
        root: Place,
        full: Full,
        disks: Mapping[int, Disk],
        file_limits: Mapping[int, int] | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._ends: list[Connection] = []
        self.processes = []
        for rank, disk in disks.items():
            receive, send = context.Pipe(duplex=False)
            limit = (file_limits or {}).get(rank)
            # Of the run that has saved before, as the workers that an agent starts again.
            environment = {**os.environ, ENV_RUN: runs()[-1]}
            settings = (environment, self._store.port, limit, timeout_s)
            args = (rank, len(disks), root, full, disk, settings, send)
            process = context.Process(target=_save_as_rank, args=args, daemon=True)
            process.start()
            send.close()
            self._ends.append(receive)
            self.processes.append(process)

    def outcome(self, rank: int) -> str:
        """What a rank said at its end, or the signal that ended it."""
        assert self._ends[rank].poll(DEADLINE_S), f"rank {rank} hangs"
        try:
            return str(self._ends[rank].recv())
        except EOFError:
            self.processes[rank].join(DEADLINE_S)
            exit_code = self.processes[rank].exitcode
            assert exit_code is not None, f"rank {rank} hangs"
            return signal.Signals(-exit_code).name

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(DEADLINE_S)


def _save_as_rank(
    rank: int,
    world: int,
    root: Place,
    full: Full,
    disk: Disk,
    settings: tuple[dict[str, str], int, int | None, float],
    outcome: Connection,
) -> None:
    """One rank, in a process of its own; tells the test how it ended."""
    environment, port, file_limit, timeout_s = settings
    os.environ |= environment  # the server that forks this was started long ago
    torch.set_num_threads(1)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    store = TCPStore("127.0.0.1", port, None, is_master=False)
    # All begin together, so that a short limit below is not spent on starting processes.
    StoreConsensus(PrefixStore("begin", store), rank, world, timeout_s=DEADLINE_S).ask(
        {}, lambda _: {}
    )
    consensus = StoreConsensus(PrefixStore("save", store), rank, world, timeout_s=timeout_s)
    state = share(full, rank, world)
    try:
        save(root, state, consensus, step=2, tag="t", round=0, fence=None, disk=disk)
    except CheckpointError as error:
        outcome.send(str(error))
    else:
        outcome.send("saved")
