"""The simulated network: which machine's messages arrive where, and after how long."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.kernel import Kernel

ETCD = "etcd"
"""The name of the place where etcd is."""
SYN_S = (0.0, 1.0, 3.0, 7.0, 15.0)
"""When TCP sends the first packet of a connection, until it is answered."""


class Network:
    """Links between machines, each in one direction."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._draw = kernel, kernel.random("network")
        self._cut: set[tuple[str, str]] = set()
        self.loss = 0.0
        """The part of the messages to and from etcd that is lost."""

    def cut(self, source: str, target: str) -> None:
        """Nothing arrives any more from one machine at another."""
        self._cut.add((source, target))

    def mend(self, source: str, target: str) -> None:
        """It arrives again."""
        self._cut.discard((source, target))

    def mend_all(self) -> None:
        """Everything arrives again."""
        self._cut.clear()
        self.loss = 0.0

    def delivers(self, source: str, target: str) -> bool:
        """Whether a message arrives."""
        return (source, target) not in self._cut

    def connects(self, one: str, other: str) -> bool:
        """Whether messages arrive in both directions."""
        return self.delivers(one, other) and self.delivers(other, one)

    def connect(self, one: str, other: str, is_on: Callable[[], bool], timeout_s: float) -> None:
        """Wait until the kernel of another machine, which `is_on`, has answered a first packet.

        Raises:
            TimeoutError: It has not in this time.
        """
        began_s = self._kernel.now
        for sent_s in (at_s for at_s in SYN_S if at_s < timeout_s):
            self._kernel.park(began_s + sent_s - self._kernel.now)
            if self.connects(one, other) and is_on():
                self._kernel.park(self.latency_s(one, other))
                return
        self._kernel.park(began_s + timeout_s - self._kernel.now)
        raise TimeoutError(110, "Connection timed out")

    def loses(self) -> bool:
        """Whether this message is lost, although its link works."""
        return self.loss > 0 and self._draw.random() < self.loss

    def latency_s(self, source: str, target: str) -> float:
        """The time that a message needs."""
        return self._draw.uniform(0.0002, 0.002)
