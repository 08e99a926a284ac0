"""Making records by the ten thousand without Python's collector of cycles looking at them.

The collector runs after every 700 new containers, and now and then it visits all that there are.
A table of 30,000 tensors sets it off a thousand times, to find nothing: half the time of a load.

Must always hold: it runs again when the last thread has left, if it ran before; what is wrapped
is computing, never waiting, because nothing is collected in the whole process meanwhile.

The idea is that of Mercurial's `util.nogc`.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0
_resume = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Around what makes many records; any number of threads may be inside."""
    global _inside, _resume  # noqa: PLW0603  # there is one collector
    with _lock:
        if not _inside:
            _resume = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _resume:
                gc.enable()
