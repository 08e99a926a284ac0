"""Whether this node may take part, as its agent knows: checked before it joins and after failures.

Before it has joined a sick node waits, tries again at growing intervals, and gives up after
--join-timeout; or much sooner, if no other node is there to train without it (`patience`).
After a failure of its own workers the checks run on a thread beside the agent's loop; the node says
"quiet" only when they have ended, so the next round begins with it, or, if it is unfit, without it.
An unfit node stays in the job as a spare that is not eligible.

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
from zero_contract.clock import Clock
from zero_contract.exit_codes import AgentExit
from zero_contract.journal import Journal

log = logging.getLogger("zero")

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
"""Between two examinations of a sick node; each pause is twice the one before."""
ALONE_S = 30.0
"""So long an unhealthy node waits that sees no other of its job: others may be starting, but
without any nothing goes on, and whoever has started it should know..."""
SINGLE_S = 5.0
"""...and so long where there can be no other: it is looked at once or twice more."""


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


def patience(timeout_s: float, *, max_nodes: int, others: bool) -> tuple[float, str]:
    """How long an unhealthy node waits to become healthy, and what limits that.

    Args:
        timeout_s: --join-timeout.
        max_nodes: Of the job: where it is 1, nobody else will come.
        others: Another node of the job is alive.
    """
    alone_s = SINGLE_S if max_nodes == 1 else ALONE_S
    if others or timeout_s <= alone_s:
        return timeout_s, "--join-timeout"
    return alone_s, "there is no other node to run the job without it"


def await_fit(
    node: Surroundings,
    timeout_s: float,
    tell: Callable[[str], None] = lambda why: None,
    *,
    max_nodes: int,
    others: Callable[[], bool],
) -> None:
    """Return when this node is healthy, and may join.

    Args:
        node: What is looked at.
        timeout_s: How long to be patient while others run the job.
        tell: Told why it is not healthy, each time.
        max_nodes: Of the job.
        others: Whether another node of the job is alive.

    Raises:
        AgentFailed: It has not become so in time.
    """
    began_s, pause_s = time.monotonic(), FIRST_PAUSE_S
    while why := complaint(examine(node)):
        limit_s, limit = patience(timeout_s, max_nodes=max_nodes, others=others())
        left_s = began_s + limit_s - time.monotonic()
        if left_s <= 0:
            raise _unfit(why, limit_s, limit)
        log.warning(
            "this node does not join yet: %s; it is checked again, for %.0f s more (%s)",
            why,
            left_s,
            limit,
        )
        tell(why)
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _unfit(why: str, limit_s: float, limit: str) -> AgentFailed:
    return AgentFailed(
        AgentExit.UNFIT, f"this node has not become healthy within {limit_s:g} s ({limit}): {why}"
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
        self._max_nodes = config.spec.max_nodes
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

    def check_limit(self, *, needed: bool) -> None:
        """Examine a sick node again when it is time.

        Args:
            needed: Another node is alive, or this one holds checkpoints in memory: it may wait.

        Raises:
            AgentFailed: It has been sick for too long.
        """
        limit_s, limit = patience(self._timeout_s, max_nodes=self._max_nodes, others=needed)
        if self._ill.past(limit_s):
            raise _unfit(self.complaint, limit_s, limit)
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
