"""The hub ends in any order of its thread and the agent's."""

from __future__ import annotations

import contextlib
import os
import threading

from zero_agent.workers.hub import Hub


class HubFirst:
    """A lock after whose release by the agent's thread the hub's has run to its end."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread() is not self._hub._thread:
            with contextlib.suppress(OSError):
                os.write(self._hub._wake_write, b".")  # an event of a moment before
            self._hub._thread.join(10)


def test_a_hub_that_has_ended_before_close_returns_is_no_error():
    hub = Hub()
    hub._lock = HubFirst(hub)
    hub.close()
    assert not hub._thread.is_alive()
