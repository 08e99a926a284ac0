"""How one node leaves a job that goes on: because of a signal, or because somebody asked it to.

Must always hold: the first wish decides about the exit code; a second signal, or the deadline,
ends the wait for the step boundary. Who calls it: the agent's loop.
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
        self.code: int = AgentExit.OK
        """With which the agent exits when it has left."""

    @property
    def begun(self) -> bool:
        """Whether this node wants to leave."""
        return self._since.running

    def signalled(self, number: int) -> None:
        """Leave at the next step boundary; at the second signal at once.

        Raises:
            AgentFailed: It is the second, or etcd is away.
        """
        name = signal.Signals(number).name
        if self._signal is not None:
            raise AgentFailed(128 + number, f"{name} again: the workers are killed")
        self._signal = number
        why = f"{name}: leaving at the next step boundary; once more to leave at once"
        try:
            self._leave(128 + number, why)
        except STORE_FAILS as error:
            raise AgentFailed(128 + number, f"{name} while etcd is away: {error}") from error

    def obey(self, order: DrainOrder | None) -> None:
        """Leave if somebody wants this node to."""
        if order is not None and not self._since.running:
            why = f"zero-ctl drain by {order.by}: leaving at the next step boundary"
            self._leave(AgentExit.DRAINED, why)

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

    def _leave(self, code: int, why: str) -> None:
        """Exit with `code` after the next step boundary, unless that has begun already."""
        if self._since.running:
            self._journal.tell("drain", why)
            return
        revision = self._rdzv.drain()
        self._since.start()
        self.code = code
        self._journal.tell("drain", why, revision=revision)
