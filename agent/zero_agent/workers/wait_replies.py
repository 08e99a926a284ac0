"""What the workers wait for, by their replies to one question at a time.

The question is asked on a thread that waits for the replies, which arrive on the agent's thread.
Must always hold: the wait is bounded; a reply to an earlier question is not taken for one to this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from zero_contract.worker import WaitReply


class WaitReplies:
    """The replies to the newest question, by rank."""

    def __init__(self) -> None:
        self._came = threading.Condition()
        self._replies: dict[int, WaitReply] = {}
        self._number = 0

    def add(self, rank: int, reply: WaitReply) -> None:
        """Keep the reply of a rank."""
        with self._came:
            if reply.request == self._number:
                self._replies[rank] = reply
                self._came.notify_all()

    def collect(
        self, ranks: Collection[int], ask: Callable[[int], None], within_s: float
    ) -> dict[int, WaitReply]:
        """Ask, and wait for the replies of these ranks; those that came in time.

        Args:
            ranks: The ranks that are asked.
            ask: Sends the question of a number, on the agent's thread.
            within_s: Seconds to wait.
        """
        with self._came:
            self._replies.clear()
            self._number += 1
            ask(self._number)
            self._came.wait_for(lambda: set(ranks) <= self._replies.keys(), within_s)
            return dict(self._replies)
