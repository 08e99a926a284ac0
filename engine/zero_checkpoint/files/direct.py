"""Writing past the page cache, where that is measured to be faster.

A checkpoint is written once and not read again, so the page cache does it no good: the bytes are
copied once more, and the kernel throws out what training reads. But not every file system is
faster without it. So the first large chunks that go to a device are written in both ways in turn,
each made durable, and the faster way is kept; until the next trial, because what the disk did
meanwhile for others, or the disk itself, may have spoilt this one.

Must always hold: what is written is the same either way; whatever cannot be written directly (the
last bytes of a file, a file system that refuses) goes through the cache.

Called by `commit` through `storage.Disk`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import BinaryIO

import numpy as np

from zero_checkpoint.files.storage import Disk
from zero_checkpoint.format.layout import PAGE_BYTES

_log = logging.getLogger(__name__)

TRIAL_BYTES = 4 << 20
"""Chunks of at least this size are tried."""
_LEAST_BYTES = 256 << 10
"""Shorter ones are left to the cache, whatever a trial has said."""
_TRIES = 3
"""Of each way; the best counts, because whatever else the disk does only adds to a time."""
_GOOD_FOR_BYTES = 8 << 30
"""A trial is repeated so seldom that it costs next to nothing."""
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class Way(StrEnum):
    """How a chunk goes to the device."""

    CACHED = "through the page cache"
    DIRECT = "past the page cache"


@dataclass(slots=True)
class Trial:
    """What is known of one device: a pure state machine, fed with measurements."""

    seconds: dict[Way, list[float]] = field(default_factory=lambda: {way: [] for way in Way})
    """Per byte, durable."""
    refused: bool = False
    told: Way | None = None
    """The answer that was told last."""
    _used_bytes: int = 0

    @property
    def over(self) -> bool:
        """Whether `way` is the answer, rather than what to try next."""
        return self.refused or all(len(tries) >= _TRIES for tries in self.seconds.values())

    @property
    def way(self) -> Way:
        """How to write the next chunk."""
        if self.refused:
            return Way.CACHED
        measure = min if self.over else len
        return min(Way, key=lambda way: measure(self.seconds[way]))

    def use(self, size_bytes: int) -> None:
        """So much was written in the way that was found: after some time, it is asked anew."""
        self._used_bytes += size_bytes
        if self._used_bytes >= _GOOD_FOR_BYTES and not self.refused:
            self._used_bytes, self.seconds = 0, {way: [] for way in Way}


class DirectDisk(Disk):
    """A `Disk` that finds out how its large writes are fastest."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._trials: dict[int, Trial] = {}

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        """Append all of `data`."""
        file.flush()
        pages = _whole_pages(data)
        trial = self._trials.setdefault(os.fstat(file.fileno()).st_dev, Trial())
        if pages and trial.over:
            self._write(file, pages, trial)
            trial.use(len(pages))
        elif len(pages) >= TRIAL_BYTES:
            self._try(file, pages, trial)
        else:
            pages = pages[:0]
        if rest := memoryview(data)[len(pages) :]:
            _set_direct(file, False)
            super().write(file, rest)

    def _try(self, file: BinaryIO, data: memoryview, trial: Trial) -> None:
        way, begin = trial.way, self._clock()
        self._write(file, data, trial)
        os.fdatasync(file.fileno())
        trial.seconds[way].append((self._clock() - begin) / len(data))
        if trial.over and trial.way is not trial.told:
            trial.told = trial.way
            rates = {way: 1e-9 / min(s) for way, s in trial.seconds.items() if s}
            told = ", ".join(f"{rate:.2f} GB/s {way}" for way, rate in rates.items())
            _log.info("checkpoints are written %s: %s", trial.way, told)

    def _write(self, file: BinaryIO, data: memoryview, trial: Trial) -> None:
        while data:
            try:
                _set_direct(file, trial.way is Way.DIRECT)
                data = data[os.write(file.fileno(), data) :]
            except OSError as error:
                if trial.way is Way.CACHED or error.errno not in _REFUSED:
                    raise
                trial.refused = True


def _whole_pages(data: memoryview | bytes) -> memoryview:
    """What of a chunk can be written directly, and is worth it."""
    whole = memoryview(data)
    if len(whole) < _LEAST_BYTES or np.frombuffer(whole, np.uint8).ctypes.data % PAGE_BYTES:
        return whole[:0]
    return whole[: len(whole) // PAGE_BYTES * PAGE_BYTES]


def _set_direct(file: BinaryIO, wanted: bool) -> None:
    flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
    if bool(flags & os.O_DIRECT) != wanted:
        fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags ^ os.O_DIRECT)
