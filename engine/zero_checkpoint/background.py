"""At most one save of this rank at a time, in a thread of its own.

Must always hold: what a save ends with, a path or an error, is handed out once, by `wait` or by
`finished`, and never lost; a save that is under way when the interpreter ends is finished first
(`concurrent.futures` joins its threads there). A thread is ended by nobody: a save ends by the
deadlines of its store consensus, or when the store consensus's `on_wait` raises.

Called by `persistence`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from zero_checkpoint.files.place import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a save ended."""

    step: int
    write_s: float
    """From its beginning to its end in the background."""
    path: Place | None = None
    error: Exception | None = None


class Background:
    """Runs saves."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zero-checkpoint")
        self._running: Future[Outcome] | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._running is not None and not self._running.done()

    def start(self, step: int, save: Callable[[], Place]) -> None:
        """Begin a save; the outcome of the one before must have been taken."""
        assert self._running is None, "take the outcome of the save before"
        self._running = self._threads.submit(_outcome_of, step, save)

    def wait(self) -> Outcome | None:
        """The outcome of the save that was started last, once it has ended; None after that."""
        outcome = self._running.result() if self._running is not None else None
        self._running = None  # not before: whatever a signal raises, the outcome can be waited for
        return outcome

    def finished(self) -> Outcome | None:
        """The same, or None at once if it has not ended."""
        return None if self.busy else self.wait()

    def close(self) -> None:
        """End the thread, once it has let go of the last save; no other may follow."""
        self._threads.shutdown()


def _outcome_of(step: int, save: Callable[[], Place]) -> Outcome:
    begin = time.monotonic()
    try:
        path = save()
        return Outcome(step=step, path=path, write_s=time.monotonic() - begin)
    except Exception as error:
        return Outcome(step=step, error=error, write_s=time.monotonic() - begin)
