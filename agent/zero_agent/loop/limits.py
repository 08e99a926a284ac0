"""How long an agent puts up with what it waits for: etcd out of reach, a round that never begins.

Must always hold: each wait has one limit, each limit a flag, and the message at its end names it.
An etcd that is full has no limit: it answers, nobody is lost, and a person can make room; a job
that ended instead would be lost for want of a few commands.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable

from zero_agent.errors import AgentFailed
from zero_agent.loop.config import AgentConfig
from zero_contract.clock import Clock, Stopwatch
from zero_contract.exit_codes import AgentExit
from zero_contract.journal import Journal
from zero_orchestrator.errors import (
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    TakenForGone,
)
from zero_orchestrator.membership.job_state import Snapshot, State

STORE_FAILS = (StoreUnavailable, StoreRefused)
"""What an agent outlives for a while, once it has joined."""
_HOW = {
    StoreRefused: "refuses",
    TakenForGone: "takes this node for gone",
    StoreUnavailable: "cannot be reached",
}
"""What etcd does then, in words; the first that fits."""
FULL_AGAIN_S = 600.0
"""While etcd is full and something is to be written, that is said again after so long."""
FULL_PAUSE_S = 1.0
"""Between two attempts to write to an etcd that is full, each of which costs it an alarm..."""
FULL_PAUSE_PER_NODE_S = 0.01
"""...or this, times the nodes of the job, if that is longer."""


_WORKERS_STOP = re.compile(r"waiting for .* to stop$")


def waits_for_workers(reason: str) -> bool:
    """Whether the job waits for workers that are to stop."""
    return _WORKERS_STOP.search(reason) is not None


def remedy(reason: str) -> str:
    """What helps a job that has waited too long for this."""
    if waits_for_workers(reason):
        return (
            "They do not end, and their agents say why; `zero-ctl drain NODE` goes on without one"
        )
    if " is unfit: " in reason:
        return "Mend what is said of those nodes, or start agents on others"
    return "Start more agents, lower the minimum of --nnodes, or raise --join-timeout"


def pause_when_full_s(nodes: int) -> float:
    """How long an agent of so many leaves an etcd alone that is full."""
    return max(FULL_PAUSE_S, FULL_PAUSE_PER_NODE_S * nodes) * random.uniform(0.5, 1.5)


class Limits:
    """The limits of one agent; each is reached with an AgentFailed."""

    def __init__(self, config: AgentConfig, clock: Clock, journal: Journal) -> None:
        self._config = config
        self._journal = journal
        self._outage = Stopwatch(clock)
        self._waiting = Stopwatch(clock)
        self._full = Stopwatch(clock)
        self._said = Stopwatch(clock)
        self._fence = 0

    @property
    def store_silent_s(self) -> float | None:
        """For how long etcd has not answered; None while it does."""
        return self._outage.elapsed_s

    def store_fails(self, error: StoreError) -> None:
        """Etcd did not answer a call, or refused it; one that is full may refuse for ever.

        Raises:
            AgentFailed: It has not done what it was asked for longer than --etcd-grace.
        """
        if isinstance(error, StoreFull):
            self._is_full(error)
            return
        how = next(words for kind, words in _HOW.items() if isinstance(error, kind))
        if self._outage.start():
            self._journal.tell(
                "store",
                f"etcd {how} ({error}); the workers go on, nothing is committed",
                level=logging.WARNING,
            )
        if self._outage.past(self._config.etcd_grace_s):
            raise AgentFailed(
                AgentExit.NO_STORE,
                f"etcd has been out of reach for more than {self._config.etcd_grace_s:g} s "
                f"(--etcd-grace): {error}",
            )

    def _is_full(self, error: StoreFull) -> None:
        self._full.start()
        if self._said.again(FULL_AGAIN_S):
            self._journal.tell(
                "store",
                f"etcd is full ({error}); the workers go on, and what must change in the job waits "
                "until etcd has room again",
                level=logging.WARNING,
            )

    def store_answers(self, fence: int) -> None:
        """Etcd answered.

        Args:
            fence: Of the job; a new one was written, so there was room for it.
        """
        if self._outage.stop():
            self._journal.tell("store", "etcd answers again")
        if fence != self._fence and self._full.running:
            self._journal.tell("store", f"etcd has room again, after {self._full.elapsed_s:.0f} s")
            self._full.stop()
            self._said.stop()
        self._fence = fence

    def check_waiting(
        self, job: Snapshot, reason: str, confirm: Callable[[], object] = lambda: None
    ) -> None:
        """No round has begun for too long?

        Args:
            job: As last read.
            reason: What it waits for.
            confirm: Writes something. No agent is to blame if etcd has no room for a round.

        Raises:
            AgentFailed: None has within --join-timeout, and etcd had room for one.
        """
        if job.state not in {None, State.FORMING}:
            self._waiting.stop()
            return
        self._waiting.start()
        if self._waiting.past(self._config.join_timeout_s):
            try:
                confirm()
            except StoreFull as error:
                self._is_full(error)
                self._waiting.stop()
                return
            except STORE_FAILS:
                pass  # the limit of an outage is another one
            raise AgentFailed(
                AgentExit.NO_NODES,
                f"no round began within {self._config.join_timeout_s:g} s (--join-timeout): "
                f"{reason}. {remedy(reason)}",
            )
