"""Aligned buffers that are used again, and the count of what they take.

Must always hold: there are never more buffers than were in use at one time, and none is larger
than the largest that was asked for; so the memory of a tier on disk is its working set, however
many sizes there are.

Called by `nvme`, from its threads as well.
"""

from __future__ import annotations

from threading import Lock

from torch import Tensor

from zero_engine.tiers.scratch import aligned


class Buffers:
    """A pool; `size_bytes` and `peak_bytes` are of all its buffers, idle ones included."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._lock = Lock()
        self._idle: list[Tensor] = []
        self.size_bytes = 0
        self.peak_bytes = 0

    def take(self, size_bytes: int) -> Tensor:
        """A buffer of undefined bytes, of this size or larger."""
        with self._lock:
            fitting = [b for b in self._idle if b.numel() >= size_bytes]
            chosen = min(fitting or self._idle, key=Tensor.numel, default=None)
            if chosen is not None:
                self._idle = [b for b in self._idle if b is not chosen]
            if fitting and chosen is not None:
                return chosen
            # One that is too small makes room for the new one.
            self.size_bytes -= chosen.numel() if chosen is not None else 0
            del chosen
            buffer = aligned(size_bytes, pin=self._pin)
            self.size_bytes += buffer.numel()
            self.peak_bytes = max(self.peak_bytes, self.size_bytes)
            return buffer

    def give(self, buffer: Tensor) -> None:
        """Return a buffer that nobody uses any more."""
        with self._lock:
            self._idle.append(buffer)
