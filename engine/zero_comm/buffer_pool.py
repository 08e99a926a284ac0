"""Memory for gradients on their way, used again."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class BufferPool:
    """Flat buffers that are used again within a backward: fresh ones cost page faults."""

    def __init__(self, device: torch.device, *, pin: bool = False) -> None:
        self.device = device
        self._pin = pin
        self._idle: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer with undefined contents."""
        idle = self._idle[numel, dtype]
        if idle:
            return idle.pop()
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self._pin)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer that nobody reads any more."""
        self._idle[buffer.numel(), buffer.dtype].append(buffer)

    def free(self) -> None:
        """Give back the memory of the idle buffers."""
        self._idle.clear()
