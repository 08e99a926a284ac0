"""When the agent of rank 0 lets the agents probe the network between the nodes of its round.

Once some time after the first steps of a round, when a job becomes slower and no rank explains it
(`slowdown`), and again soon after a link was found to be slow: a verdict needs two probes. A probe
costs each node some MiB at most, and milliseconds on a fast network (`zero_agent.node.probe`).

Must always hold: probes are rare, whatever the job does; no wait for one delays the agent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from zero_contract.clock import Clock
from zero_contract.worker import RankTimes
from zero_orchestrator.errors import StoreError
from zero_orchestrator.observe import links
from zero_orchestrator.observe.detectors.slow_link import Network, SlowLink
from zero_orchestrator.observe.detectors.slowdown import Slowdown
from zero_orchestrator.observe.links import Link
from zero_orchestrator.store.kv import KeyValueStore

log = logging.getLogger("zero")

Post = Callable[[Callable[..., None]], Callable[..., None]]
"""Wraps a handler so that it runs on the agent's thread."""

Probe = Callable[[Sequence[str]], Sequence[Link]]
"""Measures the links between some nodes."""
FIRST_S = 60.0
"""The first probe of a round comes so long after its first reported steps."""
CONFIRM_S = 10.0
"""The pause after a probe that has found a slow link for the first time."""
RECHECK_S = 120.0
"""The pause between two probes while there is a verdict."""
SOONEST_S = 30.0
"""A slower job is probed so long after the last probe, and twice as long after each probe that has
found nothing, up to `LATEST_S`."""
LATEST_S = 300.0


class NetworkWatch:
    """The network of the round; used on the agent's thread alone."""

    def __init__(self, clock: Clock, post: Post, probe: Probe) -> None:
        """Nothing is known of the network yet.

        Args:
            clock: Paces the probes.
            post: Wraps handlers so that they run on the agent's thread.
            probe: Called on a thread of its own.
        """
        self._clock = clock
        self._post = post
        self._probe = probe
        self.on_change: Callable[[SlowLink, bool], None] = lambda found, holds: None
        """Called with a verdict, and whether it is new or holds no more."""
        self.begin(0, [])

    def begin(self, n: int, nodes: Sequence[str]) -> None:
        """A round begins: forget the one before."""
        self._round, self._nodes = n, list(nodes)
        self._network, self._slowdown = Network(), Slowdown()
        self._probing = False
        self._due_s: float | None = None
        """When the next probe comes in any case; None: no step is reported yet."""
        self._last_s = self._clock.now()
        self._pause_s = SOONEST_S

    def times(self, report: RankTimes) -> None:
        """Look whether a probe is due, given the times of all ranks."""
        now_s = self._clock.now()
        if self._due_s is None:
            self._due_s = now_s + FIRST_S
        self._slowdown = self._slowdown.add(report)
        slower = self._slowdown.is_slower and now_s >= self._last_s + self._pause_s
        if self._probing or len(self._nodes) < 2 or not (slower or now_s >= self._due_s):
            return
        self._probing = True
        found = partial(self._post(self._judge), self._round)
        nodes = list(self._nodes)
        threading.Thread(target=lambda: found(self._probe(nodes)), daemon=True).start()

    def _judge(self, n: int, measured: Sequence[Link]) -> None:
        """Add what was measured in round n."""
        if n != self._round:
            return
        before, self._network = self._network.verdict, self._network.add(measured)
        self._probing, self._last_s = False, self._clock.now()
        found = self._network.verdict
        self._pause_s = min(2 * self._pause_s, LATEST_S)
        pause_s = RECHECK_S if found is not None else CONFIRM_S
        self._due_s = self._last_s + (pause_s if self._network.slow is not None else float("inf"))
        if found is not None and before is None:
            self.on_change(found, True)
        elif before is not None and found is None:
            self.on_change(before, False)


def probe_through(store: KeyValueStore, job: str, nodes: Sequence[str]) -> list[Link]:
    """A `Probe` through etcd; nothing if etcd does not answer."""
    try:
        return links.probe(store, job, nodes)
    except StoreError as error:
        log.debug("the network is not probed: %s", error)
        return []
