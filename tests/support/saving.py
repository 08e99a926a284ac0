"""What tests of saves share: disks that wait, fill up or kill; what the engine says."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

from tests.support.inside import persistence_of
from tests.support.training import config, make_engine, train
from zero_checkpoint.files.storage import Disk
from zero_contract import kernel
from zero_engine.core.engine import Engine
from zero_engine.observe.reporting import LOGGERS
from zero_step import Session

D = TypeVar("D", bound=Disk)
ASYNC = {"checkpoint": {"async": True}}
SAVED_AT, ENDS_AT = 2, 5


class Gated(Disk):
    """A disk on which nothing can be written until the gate is opened."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.reached = threading.Event()

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        self.reached.set()
        assert self.gate.wait(120), "nobody opened the gate"
        super().write(file, data)


class Throttled(Disk):
    """A disk that writes a little each time that it is let, and the rest at the end."""

    def __init__(self) -> None:
        self.turns = threading.Semaphore(0)
        self.written = 0

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        for begin in range(0, len(data), 1 << 10):
            assert self.turns.acquire(timeout=120), "nobody let it write"
            part = memoryview(data)[begin : begin + (1 << 10)]
            super().write(file, part)
            self.written += len(part)


class Full(Disk):
    """A disk on which the files of one rank find no room."""

    def __init__(self, rank: int = 1) -> None:
        self._name = f"r{rank:05d}"

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        if self._name in file.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(file, data)


class Deadly(Disk):
    """A disk that kills the process once half of a chunk is written."""

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        super().write(file, data[: len(data) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def full_container(directory: Path) -> Iterator[None]:
    """This process in a container that has no memory left, as its cgroup's files say it."""
    directory.mkdir(exist_ok=True)
    for name, text in {"max": "4096", "current": "8192", "stat": "inactive_file 4096"}.items():
        (directory / f"memory.{name}").write_text(f"{text}\n")
    before, kernel.CGROUPS = kernel.CGROUPS, directory
    try:
        yield
    finally:
        kernel.CGROUPS = before


@contextmanager
def heard(level: int = logging.INFO) -> Iterator[list[str]]:
    """What the engine, zero_torch and their libraries log meanwhile."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = {name: logging.getLogger(name).level for name in (*LOGGERS, "zero_torch")}
    for name in loggers:
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).addHandler(handler)
    try:
        yield lines
    finally:
        for name, before in loggers.items():
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).setLevel(before)


def use(training: Engine | Session, disk: D) -> D:
    persistence_of(training).saver.disk = disk
    return disk


def go_on(root: str) -> tuple[str, int]:
    """Resume at stage 1; the hash at the end, and the step that was loaded."""
    engine = make_engine(config(1), seed=8)
    engine.load_checkpoint(root)
    loaded = engine.global_steps
    train(engine, ENDS_AT)
    return engine.weight_hash(), loaded


def undisturbed() -> str:
    engine = make_engine(config(0))
    train(engine, ENDS_AT)
    return engine.weight_hash()
