"""How long a rank computes in a step, and how long it waits for other ranks.

Everything but waits and saves is computing: the script's own work and the loading of data as well.
Rank 0 adds up what all ranks have measured.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median_low

import torch

from zero_contract.worker import SLOW_FACTOR, RankTimes

REPORT_S = 1.0
"""Seconds between two reports of the times of all ranks, or `REPORT_PER_RANK_S` times the number of
ranks if that is longer."""
REPORT_PER_RANK_S = 0.01
_PENDING = 4096
"""The number of waits of a GPU that are kept until it is past them."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The wait of a thread for an exchange."""

    what: str
    """The name of the exchange."""
    turn: int
    """The number of earlier exchanges of that name."""
    began_s: float


class WaitClock:
    """The waits of one process for other ranks; several threads may wait at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: dict[int, Wait] = {}
        self.begun = 0
        """The number of exchanges that this process has begun."""
        self.last = ""
        """The name of the last one."""
        self._since_s = 0.0
        self._spent_s = 0.0
        self._on_streams: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_PENDING)

    def begin(self, what: str) -> None:
        """An exchange begins."""
        self.begun, self.last = self.begun + 1, what

    @contextmanager
    def waiting(self, what: str, turn: int, device: torch.device | None = None) -> Iterator[None]:
        """Measure the wait for one exchange of tensors on a device; None: nothing travels."""
        thread, begin = threading.get_ident(), _mark(device)
        wait = Wait(what=what, turn=turn, began_s=time.perf_counter())
        with self._lock:
            if not self._waits:
                self._since_s = wait.began_s
            self._waits[thread] = wait
        try:
            yield
        finally:
            end = _mark(device)
            with self._lock:
                self._waits.pop(thread, None)
                if not self._waits:
                    self._spent_s += time.perf_counter() - self._since_s
                if begin is not None and end is not None:
                    self._on_streams.append((begin, end))

    def spent_s(self) -> float:
        """Seconds of all waits that have ended; waits at the same time count once."""
        with self._lock:
            # Read only when the stream is past the wait: measuring blocks nothing.
            while self._on_streams and self._on_streams[0][1].query():
                begin, end = self._on_streams.popleft()
                self._spent_s += begin.elapsed_time(end) / 1e3
            return self._spent_s

    def longest(self) -> tuple[Wait, float] | None:
        """The wait under way that began first, and its length in seconds."""
        with self._lock:
            waits = sorted(self._waits.values(), key=lambda wait: wait.began_s)
        return (waits[0], time.perf_counter() - waits[0].began_s) if waits else None


def _mark(device: torch.device | None) -> torch.cuda.Event | None:
    """A point in the work of a GPU's stream; None without a GPU, or while a graph is captured."""
    if device is None or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


WAITS = WaitClock()
"""The waits of this process."""


class StepTimer:
    """Divides the time of this rank at the end of each step."""

    def __init__(self, waits: WaitClock, now: Callable[[], float] = time.perf_counter) -> None:
        self._waits = waits
        self._now = now
        self._last: tuple[float, float] | None = None
        self._saving_s = 0.0

    def saved(self, stall_s: float) -> None:
        """Note for how long a save has blocked training."""
        self._saving_s += stall_s

    def step(self) -> tuple[float, float]:
        """The seconds of computing and of waits since the step before; zeros for the first one."""
        now_s, waited_s = self._now(), self._waits.spent_s()
        last, self._last = self._last, (now_s, waited_s)
        saving_s, self._saving_s = self._saving_s, 0.0
        if last is None:  # imports, the load of a checkpoint and compilation
            return 0.0, 0.0
        # Waits of threads and of a stream may add up to more than the time between two steps.
        wait_s = waited_s - last[1]
        return max(0.0, now_s - last[0] - wait_s - saving_s), wait_s


class EveryonesTimes:
    """On rank 0: the times of all ranks since the first step of the round."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._due_s = 0.0
        self._steps = -1
        self._compute_s: list[float] = []
        self._wait_s: list[float] = []
        self._slow_steps: list[int] = []

    def add(self, step: int, times: Sequence[Sequence[float]]) -> RankTimes | None:
        """Add what each rank has measured in a step; a message if one is due.

        See `AgentLink.step_times`.
        """
        self._steps += 1
        if not self._steps:  # the first step of a round is not measured
            self._compute_s, self._wait_s = [0.0] * len(times), [0.0] * len(times)
            self._slow_steps = [0] * len(times)
            return None
        slow_s = SLOW_FACTOR * median_low(compute_s for compute_s, *_ in times)
        for rank, (compute_s, wait_s, *_) in enumerate(times):
            self._compute_s[rank] += compute_s
            self._wait_s[rank] += wait_s
            self._slow_steps[rank] += compute_s >= slow_s > 0
        if self._now() < self._due_s:
            return None
        self._due_s = self._now() + max(REPORT_S, REPORT_PER_RANK_S * len(times))
        return RankTimes(
            step=step,
            steps=self._steps,
            compute_s=tuple(round(each, 6) for each in self._compute_s),
            wait_s=tuple(round(each, 6) for each in self._wait_s),
            slow_steps=tuple(self._slow_steps),
            write_bytes_per_s=tuple(float(round(of_rank[2])) for of_rank in times),
            write_s=tuple(round(of_rank[3], 3) for of_rank in times),
        )
