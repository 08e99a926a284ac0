"""For how long an observer has seen its job unchanged: the durations that decisions depend on.

`rounds.decide` waits where acting at once would be hasty, and never reads a clock: its argument
`Observation` holds these durations, measured by the observer's monotonic clock. Clocks of two nodes
are never compared.
"""

from __future__ import annotations

from zero_contract.clock import Clock
from zero_orchestrator.membership.job_state import Node, Snapshot, State
from zero_orchestrator.membership.moves import Move
from zero_orchestrator.membership.rounds import Observation


class Durations:
    """Measures for how long this observer has seen its job unchanged."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._nodes: frozenset[tuple[str, str]] | None = None
        self._nodes_since_s = 0.0
        self._symptom: int | None = None
        self._symptom_since_s = 0.0
        self._dead_links_of = 0
        self._dead_links_since_s = 0.0
        self._pending: tuple[int, Move] | None = None
        self._pending_since_s = 0.0
        self._fence = 0
        self._round = 0
        self._round_since_s = 0.0
        self._left = 0
        self._left_since_s = 0.0
        self._step = (0, 0.0)
        """The round of this node's last finished step, and when that was."""
        self._reform_s = 0.0
        self._silent = False
        self._heard_s = float("-inf")
        self._ended: frozenset[tuple[str, str]] = frozenset()

    def silent(self, reason: str) -> None:
        """The store does not answer this node's keep-alive."""
        self._silent = True

    def heard(self, reason: str) -> None:
        """The store answers this node's keep-alive again."""
        self._silent, self._heard_s = False, self._clock.now()

    def ended(self, node: Node) -> None:
        """The process of this agent has ended, whatever its lease says."""
        self._ended |= {node.agent}

    def look(self, job: Snapshot) -> None:
        """Update the durations with a new snapshot."""
        now_s = self._clock.now()
        self._fence = job.fence
        # A node that comes while the others settle starts their wait anew.
        if job.alive != self._nodes:
            self._nodes, self._nodes_since_s = job.alive, now_s
        if job.state is State.ACTIVE and job.n != self._round:
            self._round, self._round_since_s = job.n, now_s
            # What began an older round says nothing of this one. After a failure a node that is
            # back joins at once, as with an agent that has measured nothing.
            self._reform_s = 0.0
        # A re-forming after a failure is not measured, nor is a wait for nodes: it may be long.
        waits = job.state is State.FORMING and job.lacks_nodes
        if job.yielding is not None and (job.n != self._left or waits):
            self._left, self._left_since_s = job.n, now_s
        symptom = job.failures[0].revision if job.failures else None
        if symptom != self._symptom:
            self._symptom, self._symptom_since_s = symptom, now_s
        # From the first dead link of the round on: further ones do not prolong the wait.
        if job.dead_links and job.n != self._dead_links_of:
            self._dead_links_of, self._dead_links_since_s = job.n, now_s
        elif not job.dead_links:
            self._dead_links_of = 0

    def observed(self) -> Observation:
        """The durations as of now."""
        now_s = self._clock.now()
        return Observation(
            nodes_s=now_s - self._nodes_since_s,
            symptom_s=now_s - self._symptom_since_s if self._symptom is not None else 0.0,
            links_s=now_s - self._dead_links_since_s if self._dead_links_of else 0.0,
            heard_s=0.0 if self._silent else now_s - self._heard_s,
            ended=self._ended,
            round_s=now_s - self._round_since_s if self._round else 0.0,
            reform_s=self._reform_s,
        )

    def stepped(self, n: int, ago_s: float) -> None:
        """Workers here finished a step of round n so long ago; callable any number of times."""
        self._step = n, self._clock.now() - ago_s
        if n == self._left + 1 > 1:  # the first step after workers were asked to leave
            self._reform_s = self._clock.now() - self._left_since_s
            self._left = 0

    def idle_s(self, n: int) -> float | None:
        """Seconds since workers here have finished a step of round n; None: they have not."""
        step_of, at_s = self._step
        return self._clock.now() - at_s if step_of == n > 0 else None

    def left_s(self, n: int) -> float:
        """Seconds since the workers of round n were asked to leave; 0 if they were not."""
        return self._clock.now() - self._left_since_s if self._left == n > 0 else 0.0

    def pending(self, move: Move) -> float:
        """Seconds for which this move has been due at this revision of the round."""
        now_s = self._clock.now()
        # After a transition the same move is another one: every agent waits for its turn again.
        if self._pending != (self._fence, move):
            self._pending, self._pending_since_s = (self._fence, move), now_s
        return now_s - self._pending_since_s
