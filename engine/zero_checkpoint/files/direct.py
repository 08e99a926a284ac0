"""Direct I/O (O_DIRECT): writing past the page cache, on devices where it is measured to be faster.

A checkpoint is written once and not read again, so it gains nothing from the page cache: the bytes
are copied once more, and the kernel evicts the data that training reads. But not every file system
is faster without the cache, so the first large chunks that go to a device are written in both ways
in turn, and the faster way is kept until the next trial.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import BinaryIO

import numpy as np

from zero_checkpoint.files.local_file import NOT_DIRECT
from zero_checkpoint.files.storage import Disk
from zero_checkpoint.format.layout import PAGE_BYTES

_log = logging.getLogger(__name__)

TRIAL_BYTES = 4 << 20
"""Chunks of at least this size are measured."""
_LEAST_BYTES = 256 << 10
"""Shorter chunks go through the cache, whatever the result of a trial."""
_TRIES = 3
"""Measurements of each way. The best counts, because other load only adds to a time."""
_GOOD_FOR_BYTES = 8 << 30
"""Bytes after which a trial is repeated: so seldom that it costs next to nothing."""


class Way(StrEnum):
    """The way of a chunk to the device."""

    CACHED = "through the page cache"
    DIRECT = "past the page cache"


@dataclass(slots=True)
class Trial:
    """The measurements of one device: a pure state machine that chooses the next way."""

    seconds: dict[Way, list[float]] = field(default_factory=lambda: {way: [] for way in Way})
    """Seconds per byte, until the bytes are durable."""
    refused: bool = False
    """Whether the file system refuses direct I/O."""
    logged: Way | None = None
    """The result that was logged last."""
    _used_bytes: int = 0

    @property
    def over(self) -> bool:
        """Whether `way` is the result, rather than the way to measure next."""
        return self.refused or all(len(tries) >= _TRIES for tries in self.seconds.values())

    @property
    def way(self) -> Way:
        """The way to write the next chunk in."""
        if self.refused:
            return Way.CACHED
        # The way with the fewest measurements; once each has enough, the one with the best.
        measure = min if self.over else len
        return min(Way, key=lambda way: measure(self.seconds[way]))

    def use(self, size_bytes: int) -> None:
        """Count bytes written in the way that was found; after 8 GiB the trial is repeated."""
        self._used_bytes += size_bytes
        # Other load on the disk may have spoilt the last trial.
        if self._used_bytes >= _GOOD_FOR_BYTES and not self.refused:
            self._used_bytes, self.seconds = 0, {way: [] for way in Way}


class DirectDisk(Disk):
    """A `Disk` that measures which way its large writes are fastest."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._trials: dict[int, Trial] = {}

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        """Append all of `data`."""
        file.flush()  # what follows goes past its buffer
        whole = memoryview(data)
        # The part that can be written directly; empty if the data are short or not aligned.
        pages = whole[: len(whole) // PAGE_BYTES * PAGE_BYTES]
        if len(whole) < _LEAST_BYTES or np.frombuffer(whole, np.uint8).ctypes.data % PAGE_BYTES:
            pages = whole[:0]
        trial = self._trials.setdefault(os.fstat(file.fileno()).st_dev, Trial())
        if pages and trial.over:
            self._write(file, pages, trial)
            trial.use(len(pages))
        elif len(pages) >= TRIAL_BYTES:
            way, begin = trial.way, self._clock()
            self._write(file, pages, trial)
            os.fdatasync(file.fileno())  # else the cache would win by writing nothing yet
            trial.seconds[way].append((self._clock() - begin) / len(pages))
            if trial.over and trial.way is not trial.logged:
                trial.logged = trial.way
                rates = {way: 1e-9 / min(s) for way, s in trial.seconds.items() if s}
                measured = ", ".join(f"{rate:.2f} GB/s {way}" for way, rate in rates.items())
                _log.info("checkpoints are written %s: %s", trial.way, measured)
        else:  # too short to be measured while a trial is under way
            pages = pages[:0]
        if rest := whole[len(pages) :]:
            _set_direct(file, False)
            super().write(file, rest)

    def _write(self, file: BinaryIO, data: memoryview, trial: Trial) -> None:
        while data:
            try:
                _set_direct(file, trial.way is Way.DIRECT)
                data = data[os.write(file.fileno(), data) :]
            except OSError as error:
                if trial.way is Way.CACHED or error.errno not in NOT_DIRECT:
                    raise
                trial.refused = True  # and once more, through the cache


def _set_direct(file: BinaryIO, wanted: bool) -> None:
    flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
    if bool(flags & os.O_DIRECT) != wanted:
        fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags ^ os.O_DIRECT)
