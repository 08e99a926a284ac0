"""Since when an observer has seen its job as it is: the durations that a decision looks at.

`rounds.decide` waits where acting at once would be hasty, and never asks a clock: it is handed for
how long things have been as they are, by the clock of whoever looks. Clocks of two nodes are never
compared. Who calls it: `rendezvous`, for an agent that sees the whole job.
"""

from __future__ import annotations

from zero_contract.clock import Clock
from zero_orchestrator.membership.job_state import Snapshot, State
from zero_orchestrator.membership.moves import Move
from zero_orchestrator.membership.rounds import Observation


class Durations:
    """Since when this observer has seen things as they are."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._nodes: frozenset[tuple[str, str]] | None = None
        self._nodes_since_s = 0.0
        self._symptom: int | None = None
        self._symptom_since_s = 0.0
        self._pending: tuple[int, Move] | None = None
        self._pending_since_s = 0.0
        self._fence = 0
        self._round = 0
        self._round_since_s = 0.0
        self._left = 0
        self._left_since_s = 0.0
        self._reform_s = 0.0
        self._silent = False
        self._heard_s = float("-inf")

    def silent(self, reason: str) -> None:
        """The store does not answer this node's keep-alive."""
        self._silent = True

    def heard(self, reason: str) -> None:
        """It answers again."""
        self._silent, self._heard_s = False, self._clock.now()

    def look(self, job: Snapshot) -> None:
        """Take note of a new snapshot."""
        now_s = self._clock.now()
        self._fence = job.fence
        if job.alive != self._nodes:
            self._nodes, self._nodes_since_s = job.alive, now_s
        if job.state is State.ACTIVE and job.n != self._round:
            self._round, self._round_since_s = job.n, now_s
        # What a failure costs says nothing: a round may then wait for nodes, for long.
        if job.yielding is not None and job.n != self._left:
            self._left, self._left_since_s = job.n, now_s
        symptom = job.failures[0].revision if job.failures else None
        if symptom != self._symptom:
            self._symptom, self._symptom_since_s = symptom, now_s

    def observed(self) -> Observation:
        """The durations as of now."""
        now_s = self._clock.now()
        return Observation(
            nodes_s=now_s - self._nodes_since_s,
            symptom_s=now_s - self._symptom_since_s if self._symptom is not None else 0.0,
            heard_s=0.0 if self._silent else now_s - self._heard_s,
            round_s=now_s - self._round_since_s if self._round else 0.0,
            reform_s=self._reform_s,
        )

    def stepped(self, n: int) -> None:
        """Workers of this node have finished a step of round n; told as often as one likes."""
        if n == self._left + 1 > 1:
            self._reform_s = self._clock.now() - self._left_since_s
            self._left = 0

    def left_s(self, n: int) -> float:
        """Since the workers of round n were asked to leave; 0 if they were not."""
        return self._clock.now() - self._left_since_s if self._left == n > 0 else 0.0

    def pending(self, move: Move) -> float:
        """For how long this move has been due on this revision of the round."""
        now_s = self._clock.now()
        if self._pending != (self._fence, move):
            self._pending, self._pending_since_s = (self._fence, move), now_s
        return now_s - self._pending_since_s
