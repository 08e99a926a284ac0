"""Whether this node may take part, as its agent knows: checked before it joins and after failures.

Before it has joined a sick node waits, tries again at growing intervals, and gives up after
--join-timeout. After a failure of its own workers the checks run on a thread beside the agent's
loop; the node says "quiet" only when they have ended, so the next round begins with it, or, if it
is unfit, without it. An unfit node stays in the job as a spare that is not eligible.

Must always hold: the loop never waits for a check. Who calls it: `cli` and the agent's loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from zero_agent.config import AgentConfig, AgentFailed
from zero_agent.fitness.checks import Surroundings
from zero_agent.fitness.examination import complaint, examine
from zero_agent.limits import Stopwatch
from zero_orchestrator.clock import Clock
from zero_orchestrator.exit_codes import AgentExit
from zero_orchestrator.journal import Journal

log = logging.getLogger("zero")

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
"""Between two examinations of a sick node; each pause is twice the one before."""


def surroundings(config: AgentConfig, environ: Mapping[str, str]) -> Surroundings:
    """What is checked of an agent's node; whether etcd answers, the agent sees for itself."""
    return Surroundings(
        slots=config.slots,
        gpus=config.gpus,
        address=config.address,
        log_dir=config.log_dir,
        command=config.health_check,
        command_timeout_s=config.health_check_timeout_s,
        environ=environ,
    )


def await_fit(
    node: Surroundings, timeout_s: float, tell: Callable[[str], None] = lambda why: None
) -> None:
    """Return when this node is fit to join.

    Args:
        node: What is looked at.
        timeout_s: How long to be patient.
        tell: Told why it is not fit, each time.

    Raises:
        AgentFailed: It has not become so in time.
    """
    deadline_s, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while why := complaint(examine(node)):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise _unfit(why, timeout_s)
        log.warning("this node does not join yet: %s", why)
        tell(why)
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _unfit(why: str, timeout_s: float) -> AgentFailed:
    return AgentFailed(
        AgentExit.UNFIT,
        f"this node has not become fit within {timeout_s:g} s (--join-timeout): {why}",
    )


class Fitness:
    """The fitness of a node that has joined."""

    def __init__(
        self,
        config: AgentConfig,
        environ: Mapping[str, str],
        *,
        clock: Clock,
        journal: Journal,
        post: Callable[[Callable[..., None]], Callable[..., None]],
    ) -> None:
        """It was fit when it joined.

        Args:
            config: What to look at, and for how long to be patient.
            environ: The agent's own.
            clock: Paces the examinations of a sick node.
            journal: Told when the node falls ill and when it is well again.
            post: Wraps a handler so that it runs on the agent's thread.
        """
        self._node = surroundings(config, environ)
        self._journal = journal
        self._timeout_s = config.join_timeout_s
        self._done = post(self._examined)
        self._ill, self._paused = Stopwatch(clock), Stopwatch(clock)
        self._pause_s = FIRST_PAUSE_S
        self.checking = False
        """An examination is under way."""
        self.complaint = ""
        """Why the node is not fit; empty: it is."""

    def examine(self) -> None:
        """Begin an examination, unless one is under way."""
        if not self.checking:
            self.checking = True
            self._paused.stop()
            threading.Thread(target=self._run, name="fitness", daemon=True).start()

    def check_limit(self) -> None:
        """Examine a sick node again when it is time.

        Raises:
            AgentFailed: It has been sick for too long.
        """
        if self._ill.past(self._timeout_s):
            raise _unfit(self.complaint, self._timeout_s)
        if self._paused.past(self._pause_s):
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self.examine()

    def _run(self) -> None:
        self._done(complaint(examine(self._node)))

    def _examined(self, why: str) -> None:
        self.checking = False
        if bool(why) != bool(self.complaint):  # amounts in a complaint change all the time
            self.complaint = why
            text = f"this node is unfit: {why}" if why else "this node is fit again"
            self._journal.tell("health", text, level=logging.WARNING if why else logging.INFO)
        if why:
            self._ill.start()
            self._paused.start()
        else:
            self._ill.stop()
            self._pause_s = FIRST_PAUSE_S
