"""How one node leaves a job that goes on: because of a signal, or because somebody asked it to.

Must always hold: the first wish decides about the exit code; a second signal, or the deadline,
ends the wait for the step boundary; a wish that etcd does not take is told when it answers. Who
calls it: the agent's loop.
"""

from __future__ import annotations

import signal

from zero_agent.config import AgentExit, AgentFailed
from zero_agent.limits import STORE_FAILS, Stopwatch
from zero_orchestrator.clock import Clock
from zero_orchestrator.journal import Journal
from zero_orchestrator.membership.job_state import DrainOrder
from zero_orchestrator.membership.rendezvous import Rendezvous


class Leaving:
    """This node's wish to leave, once there is one."""

    def __init__(
        self, rdzv: Rendezvous, journal: Journal, clock: Clock, shutdown_timeout_s: float
    ) -> None:
        self._rdzv = rdzv
        self._journal = journal
        self._since = Stopwatch(clock)
        self._timeout_s = shutdown_timeout_s
        self._signal: int | None = None
        self._why = ""
        self._told = False
        self.code: int = AgentExit.OK
        """With which the agent exits when it has left."""

    @property
    def begun(self) -> bool:
        """Whether this node wants to leave."""
        return self._since.running

    def signalled(self, number: int) -> None:
        """Leave at the next step boundary; at the second signal at once.

        Raises:
            AgentFailed: It is the second.
        """
        name = signal.Signals(number).name
        if self._signal is not None:
            raise AgentFailed(128 + number, f"{name} again: the workers are killed")
        self._signal = number
        why = f"{name}: leaving at the next step boundary; once more to leave at once"
        if not self._begin(128 + number, why):
            self._journal.tell("drain", why)
            return
        try:
            self._tell_the_others()
        except STORE_FAILS as error:
            text = f"{name}: leaving when etcd answers, within {self._timeout_s:g} s in any case"
            self._journal.tell("drain", f"{text}; once more to leave at once ({error})")

    def obey(self, order: DrainOrder | None) -> None:
        """Leave if somebody wants this node to; called in every turn.

        Raises:
            StoreError: The others could not be told.
        """
        if order is not None:
            why = f"zero-ctl drain by {order.by}: leaving at the next step boundary"
            self._begin(AgentExit.DRAINED, why)
        if self.begun and not self._told:
            self._tell_the_others()

    def check_limit(self) -> None:
        """Whether leaving takes too long.

        Raises:
            AgentFailed: It does.
        """
        if self._since.past(self._timeout_s):
            raise AgentFailed(
                self.code,
                f"the node could not leave within {self._timeout_s:g} s "
                "(--shutdown-timeout); its workers are killed",
            )

    def _begin(self, code: int, why: str) -> bool:
        """Exit with `code` after the next step boundary; False if that has begun already."""
        fresh = self._since.start()
        if fresh:
            self.code, self._why = code, why
        return fresh

    def _tell_the_others(self) -> None:
        revision = self._rdzv.drain()
        self._told = True
        self._journal.tell("drain", self._why, revision=revision)
