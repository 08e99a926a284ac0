"""Ranks that wait for each other in a circle: found, and named.

Owns what a rank tells the others when its wait grows long, and the judgement. Must always hold:

- Nobody is judged slow: only a circle is an error, in which each rank waits for an exchange that
  the next has not begun. It cannot end by itself, however slow the network is.
- The judge is in the circle. It is waiting now, so a rank that waits for it is waiting still,
  and so on around: what the others have posted need not be fresh.

An exchange is known by its name and how many of that name came before, as the transport knows it.

Called by `collectives`, every few seconds of a long wait.

Source of the idea: wait-for graphs; torch's flight recorder compares sequences after the fact.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Protocol

_log = logging.getLogger(__name__)

_NOTHING = "null"
"""In the place of a standing: this rank waits no more."""


class Board(Protocol):
    """What is needed of a torch.distributed Store."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read."""

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A rank that has been waiting for long."""

    awaits: str
    """The exchange it waits for,"""
    turn: int
    """and how many of that name it had begun before."""
    begun: Mapping[str, int]
    """How many of each name it has begun."""

    def lacks(self, other: Standing) -> bool:
        """Whether this rank has not begun what `other` waits for."""
        return self.begun.get(other.awaits, 0) <= other.turn


def circle(standings: Mapping[int, Standing], rank: int) -> list[int]:
    """A circle of ranks through `rank`, each waiting for the next; empty if there is none.

    Args:
        standings: The ranks that have been waiting for long; a rank that is not here may still
            begin what is waited for.
        rank: Where to begin.
    """
    paths, seen = [[rank]], set()
    while paths:
        path = paths.pop(0)
        waiting = standings[path[-1]]
        for other, standing in standings.items():
            if other == path[-1] or not standing.lacks(waiting):
                continue
            if other == rank:
                return path
            if other not in seen:
                seen.add(other)
                paths.append([*path, other])
    return []


def describe(standings: Mapping[int, Standing], ranks: Sequence[int]) -> str:
    """The circle in words."""
    following = [*ranks[1:], ranks[0]]
    parts = [
        f"rank {rank} waits for {standings[rank].awaits}, which rank {other} has not begun"
        for rank, other in zip(ranks, following, strict=True)
    ]
    return (
        f"the ranks do not do the same, and wait for each other: {'; '.join(parts)}. Run the same "
        "modules in the same order on every rank, and call collective methods of the engine "
        "(saving, loading, hashes, state dicts) on all of them"
    )


class DeadlockDetector:
    """One rank's view of a group that may have come to a deadlock."""

    def __init__(self, board: Board, rank: int, world: int) -> None:
        self.begun: Counter[str] = Counter()
        self._board = board
        self._rank = rank
        self._world = world
        self._posted = False
        self._warned = False

    def begin(self, what: str) -> int:
        """Note that an exchange begins; how many of its name came before."""
        self.begun[what] += 1
        return self.begun[what] - 1

    def look(self, what: str, turn: int) -> str:
        """Tell the others what this rank has been waiting for; a sentence if that is hopeless."""
        own = Standing(awaits=what, turn=turn, begun=dict(self.begun))
        try:
            standings = self._exchange(own)
        except RuntimeError as error:  # who held the store is gone: the wait will end by itself
            _log.debug("cannot look at the other ranks: %s", error)
            return ""
        found = circle(standings, self._rank)
        if not found:
            self._warn(own, standings)
        return describe(standings, found) if found else ""

    def go_on(self) -> None:
        """The wait is over: take back what was told."""
        if self._posted:
            with suppress(RuntimeError):
                # Not deleted: who has seen the key would wait for it to come again.
                self._board.set(str(self._rank), _NOTHING)
        self._posted = self._warned = False

    def _exchange(self, own: Standing) -> dict[int, Standing]:
        self._board.set(str(self._rank), json.dumps(asdict(own)))
        self._posted = True
        others = [rank for rank in range(self._world) if rank != self._rank]
        told = {
            rank: json.loads(self._board.get(str(rank)))
            for rank in others
            if self._board.check([str(rank)])
        }
        return {self._rank: own} | {
            rank: Standing(**standing) for rank, standing in told.items() if standing is not None
        }

    def _warn(self, own: Standing, standings: Mapping[int, Standing]) -> None:
        """Say once in a wait whom this rank is waiting for."""
        busy = [str(rank) for rank in range(self._world) if rank not in standings]
        if busy and not self._warned:
            _log.warning(
                "rank %d waits for %s; busy with something else: rank %s",
                self._rank,
                own.awaits,
                ", ".join(busy),
            )
        self._warned = True
