"""Memory for gradients on their way, used again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor


def current_stream() -> Hashable:
    """The current stream of the current device; None on a machine without one."""
    return torch.cuda.current_stream() if torch.cuda.is_available() else None


class BufferPool:
    """Flat buffers that are used again within a backward: fresh ones cost page faults."""

    def __init__(
        self,
        device: torch.device,
        *,
        pin: bool = False,
        stream: Callable[[], Hashable] = current_stream,
    ) -> None:
        """An empty pool, of pinned host memory if `pin`.

        Uses of a buffer on one `stream` follow each other.
        """
        self.device = device
        self._pin = pin
        self._stream = stream
        self._idle: defaultdict[tuple[int, torch.dtype, Hashable], list[Tensor]] = defaultdict(list)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer with undefined contents, to be used on the current stream."""
        # By stream: what uses a buffer next comes after what used it before, also where the
        # script's modules run on streams of their own.
        idle = self._idle[numel, dtype, self._stream()]
        if idle:
            return idle.pop()
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self._pin)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer that only what the current stream has yet to do still uses."""
        stream = self._stream()
        if buffer.is_cuda and isinstance(stream, torch.cuda.Stream):
            buffer.record_stream(stream)  # it may have been allocated on another one
        self._idle[buffer.numel(), buffer.dtype, stream].append(buffer)

    def free(self) -> None:
        """Give back the memory of the idle buffers."""
        self._idle.clear()
