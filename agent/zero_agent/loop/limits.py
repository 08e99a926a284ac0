"""Limits of an agent: etcd out of reach (--etcd-grace), no round begins (--join-timeout), its log.

Each wait has one limit, each limit a flag, and the message at its end names it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping

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
from zero_orchestrator.membership.moves import Wait

STORE_FAILS = (StoreUnavailable, StoreRefused)
"""Errors of etcd that an agent survives until --etcd-grace, once it has joined."""
_HOW = {
    StoreRefused: "refuses",
    TakenForGone: "takes this node for gone",
    StoreUnavailable: "cannot be reached",
}
"""What etcd does, in words, by error class; the first entry that matches counts."""
FULL_AGAIN_S = 600.0
"""Interval at which the log repeats that etcd is full while something is to be written."""
FULL_PAUSE_S = 1.0
"""Shortest pause between two writes to an etcd that is full: each raises an alarm there."""
FULL_PAUSE_PER_NODE_S = 0.01
"""The same pause for each node of the job; the longer of both counts."""
_MORE_NODES = "Start more agents, lower the minimum of --nnodes, or raise --join-timeout"
REMEDIES: Mapping[Wait | None, str] = {
    None: _MORE_NODES,
    Wait.NODES: _MORE_NODES,
    Wait.HEALTH: "Repair those nodes, or start agents on other nodes",
    Wait.WORKERS: "Those workers do not end; the logs of their agents contain the cause. "
    "`zero-ctl drain NODE` continues the job without a node",
    Wait.LINKS: "Repair that link (`zero-ctl probe` tries all), or start an agent on another node",
    Wait.IMPORTS: "Raise --join-timeout, or shorten --preload",
}
"""What a job has waited for too long -> the remedy."""


def pause_when_full_s(nodes: int) -> float:
    """Pause of an agent before it writes again to an etcd that is full, with random jitter."""
    return max(FULL_PAUSE_S, FULL_PAUSE_PER_NODE_S * nodes) * random.uniform(0.5, 1.5)


class Limits:
    """The limits of one agent; AgentFailed is raised when one is reached."""

    def __init__(self, config: AgentConfig, clock: Clock, journal: Journal) -> None:
        self._config = config
        self._journal = journal
        self._outage = Stopwatch(clock)
        self._waiting = Stopwatch(clock)
        self._full = Stopwatch(clock)
        # Since the log has said that etcd is full.
        self._said = Stopwatch(clock)
        self._fence = 0
        self.remark: Callable[[], str] = lambda: ""
        """Returns what an outage of etcd costs, for the message at its limit."""

    @property
    def store_silent_s(self) -> float | None:
        """Seconds since etcd's last answer; None while etcd answers."""
        return self._outage.elapsed_s

    def store_fails(self, error: StoreError) -> None:
        """Record that etcd did not answer a call, or refused it; a full etcd may refuse for ever.

        Raises:
            AgentFailed: Etcd has not done what it was asked for longer than --etcd-grace.
        """
        # No limit: a full etcd still answers, no node is lost, and an operator frees space with a
        # few commands, while a job that ended would be lost.
        if isinstance(error, StoreFull):
            self._is_full(error)
            return
        how = next(words for kind, words in _HOW.items() if isinstance(error, kind))
        if self._outage.start():
            self._journal.tell(
                "store",
                f"etcd {how} ({error}); the workers continue, nothing is committed",
                level=logging.WARNING,
                away=True,
            )
        if self._outage.past(self._config.etcd_grace_s):
            raise AgentFailed(
                AgentExit.NO_STORE,
                f"etcd has been out of reach for more than {self._config.etcd_grace_s:g} s "
                f"(--etcd-grace): {error}{self.remark()}",
            )

    def _is_full(self, error: StoreFull) -> None:
        self._full.start()
        if self._said.again(FULL_AGAIN_S):
            self._journal.tell(
                "store",
                f"etcd is full ({error}); the workers continue, and changes of the job wait until "
                "etcd has room again",
                level=logging.WARNING,
                away=True,
            )

    def store_answers(self, fence: int) -> None:
        """Record that etcd answered; it had room for a fence that is new."""
        after_s = self._outage.elapsed_s or 0.0
        if self._outage.stop():
            text = f"etcd answers again, after {after_s:.0f} s"
            self._journal.tell("store", text, away=False, after_s=round(after_s, 3))
        # Only a write shows that there is room again, and a new fence has been written.
        if fence != self._fence and self._full.running:
            after_s = self._full.elapsed_s or 0.0
            text = f"etcd has room again, after {after_s:.0f} s"
            self._journal.tell("store", text, away=False, after_s=round(after_s, 3))
            self._full.stop()
            self._said.stop()
        self._fence = fence

    def check_waiting(
        self,
        job: Snapshot,
        reason: str,
        waits_for: Wait | None,
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        """Check the limit of a job in which no round begins; a full etcd has no room for one.

        Raises:
            AgentFailed: No round began within --join-timeout, although etcd had room for one.
        """
        if job.state not in {None, State.FORMING}:
            self._waiting.stop()
            return
        self._waiting.start()
        if self._waiting.past(self._config.join_timeout_s):
            # Etcd itself may be the reason why no round begins; only a write shows it.
            try:
                confirm()
            except StoreFull as error:
                self._is_full(error)
                self._waiting.stop()
                return
            except StoreUnavailable:  # an outage has a limit of its own; nodes come back after it
                self._waiting.stop()
                return
            except StoreRefused as error:  # no outage: etcd itself keeps the round from beginning
                reason = f"{reason}; {error}"
            raise AgentFailed(
                AgentExit.NO_NODES,
                f"no round began within {self._config.join_timeout_s:g} s (--join-timeout): "
                f"{reason}. {REMEDIES[waits_for]}",
            )


AGAIN_S = 10.0
"""While the workers of many nodes stop, the reason that names the remaining nodes changes with each
of them: it is logged when the wait begins, and again at this interval."""


class LogLimit:
    """Rate limit of the log: each reason is logged once, and a long wait from time to time."""

    def __init__(self, clock: Clock) -> None:
        self._logged = ""
        self._wait = Stopwatch(clock)

    def is_news(self, reason: str, waits_for: Wait | None = None) -> bool:
        """Whether to log this reason now; if so, it counts as logged."""
        if waits_for is not Wait.WORKERS:
            self._wait.stop()
        elif not self._wait.again(AGAIN_S):
            return False
        news, self._logged = reason != self._logged, reason
        return news
