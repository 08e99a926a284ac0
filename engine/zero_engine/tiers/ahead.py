"""What will be asked for next: learnt from what was asked for the last time.

A model's modules run in the same order step after step, so what follows a unit is what followed
it before. A wrong guess costs a read and changes nothing.

Called by `nvme`. DeepSpeed records a trace of the whole pass and drops it when one module runs in
another order; here every module knows its successor alone.
"""

from __future__ import annotations

from concurrent.futures import Future

from torch import Tensor


class ReadAhead:
    """Reads under way, by what they read: so many at most, and so many bytes."""

    def __init__(self, reads: int, room_bytes: int) -> None:
        self._reads = reads
        self._room_bytes = room_bytes
        self._next: dict[int, Tensor] = {}
        self._last: Tensor | None = None
        self._started: dict[int, tuple[Tensor, Future[Tensor]]] = {}

    def take(self, held: Tensor) -> Future[Tensor] | None:
        """The read of what is needed now, if it was begun ahead."""
        if self._last is not None:
            self._next[self._last.data_ptr()] = held
        self._last = held
        _, future = self._started.pop(held.data_ptr(), (held, None))
        return future

    def wanted(self, held: Tensor) -> list[Tensor]:
        """What to begin to read: what follows, in order, as far as there is room."""
        found: list[Tensor] = []
        room = self._room_bytes - sum(each.nbytes for each, _ in self._started.values())
        following = self._next.get(held.data_ptr())
        seen = {held.data_ptr()}
        while following is not None and following.data_ptr() not in seen:
            seen.add(following.data_ptr())
            if following.data_ptr() not in self._started:
                room -= following.nbytes
                if room < 0 or len(self._started) + len(found) >= self._reads:
                    break
                found.append(following)
            following = self._next.get(following.data_ptr())
        return found

    def add(self, held: Tensor, future: Future[Tensor]) -> None:
        """Note a read that has begun."""
        self._started[held.data_ptr()] = (held, future)

    def clear(self) -> list[Future[Tensor]]:
        """Forget the reads under way, and return them; the order that was learnt stays."""
        futures = [future for _, future in self._started.values()]
        self._started.clear()
        return futures
