"""Deadlock detection: finds ranks that wait for each other in a circle, and names them.

A slow rank is no error: only a circle is, in which each rank waits for an exchange that the next
rank has not begun. It cannot end by itself, however slow the network is.

Source of the idea: wait-for graphs; torch's flight recorder compares sequences after the fact.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Protocol
from weakref import WeakSet

from zero_contract.decoding import MalformedError, decode
from zero_contract.user_files import is_own
from zero_contract.worker import ENV_NODE

_log = logging.getLogger(__name__)

_LOOK_AT_ONCE = 64
"""Ranks of a world in which each that waits looks at all others every time. In one that is n times
as large one look in n does: one thread answers all of them."""
_NOTHING = "null"
"""Posted in the place of a standing when the wait has ended."""


class Board(Protocol):
    """The methods of a torch.distributed Store that are needed."""

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""

    def get(self, key: str) -> bytes:
        """The value of a key."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The wait of a rank that has been waiting for long."""

    awaits: str
    """The exchange that it waits for."""
    turn: int
    """The number of exchanges of that name that it had begun before."""
    begun: Mapping[str, int]
    """The number of exchanges that it has begun, by name."""
    at: str = ""
    """Its node, and the line of the script that has led to the wait."""

    def lacks(self, other: Standing) -> bool:
        """Whether this rank has not begun the exchange that `other` waits for."""
        return self.begun.get(other.awaits, 0) <= other.turn


def circle(standings: Mapping[int, Standing], rank: int) -> list[int]:
    """A circle of ranks through `rank`, each waiting for the next; empty if there is none.

    `standings` has the ranks that have been waiting for long; any other may still begin the
    exchange.
    """
    # Breadth first: the shortest circle is the one to read.
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
    """The deadlock in words."""
    following = [*ranks[1:], ranks[0]]
    places = {rank: f" ({standings[rank].at})" if standings[rank].at else "" for rank in ranks}
    parts = [
        f"rank {rank} waits for {standings[rank].awaits}, which rank {other} has not begun"
        f"{places[rank]}"
        for rank, other in zip(ranks, following, strict=True)
    ]
    return (
        f"the ranks do not do the same, and wait for each other: {'; '.join(parts)}. Run the same "
        "modules in the same order on every rank, and call collective methods of the engine "
        "(saving, loading, hashes, state dicts) on all of them"
    )


def here() -> str:
    """This node, if an agent has started the process, and the innermost line of the script."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    node = os.environ.get(ENV_NODE)
    words = [f"node {node}"] if node else []
    if frame is not None:
        words.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
    return ", ".join(words)


class DeadlockDetector:
    """One rank's detector of deadlocks in its group."""

    def __init__(self, board: Board, rank: int, world: int) -> None:
        self.begun: Counter[str] = Counter()
        self._board = board
        self._rank = rank
        self._world = world
        self._posted = False
        self._warned = False
        self._looks = rank  # so that ranks take turns
        self._seen: set[int] = set()
        """Ranks that have posted something: their keys exist."""
        _OPEN.add(self)

    def begin(self, what: str) -> int:
        """Note that an exchange begins; returns the number of earlier ones of its name."""
        self.begun[what] += 1
        return self.begun[what] - 1

    def look(self, what: str, turn: int) -> str:
        """Post what this rank waits for; returns a sentence if that is a deadlock, else nothing."""
        try:
            own = self._post(what, turn)
            self._looks += 1
            if self._looks % max(1, self._world // _LOOK_AT_ONCE):
                return ""
            others = [rank for rank in range(self._world) if rank != self._rank]
            # Checked first: `get` waits for a key that does not exist.
            self._seen.update(
                each for each in others if each not in self._seen and self._board.check([str(each)])
            )
            posted = {
                rank: decode(
                    Standing | None, self._board.get(str(rank)), f"what rank {rank} awaits"
                )
                for rank in sorted(self._seen)
            }
        except (RuntimeError, MalformedError) as error:  # a lost host: the wait will end by itself
            _log.debug("cannot look at the other ranks: %s", error)
            return ""
        standings = {self._rank: own} | {
            rank: standing for rank, standing in posted.items() if standing is not None
        }
        # Through this rank, which waits now: so a rank that waits for it still does, and so on
        # around. What others have posted long ago does no harm.
        found = circle(standings, self._rank)
        if found:
            return describe(standings, found)
        busy = [str(rank) for rank in others if rank not in standings]
        if busy and not self._warned:
            _log.warning(
                "rank %d waits for %s; busy with something else: rank %s",
                self._rank,
                own.awaits,
                ", ".join(busy),
            )
        self._warned = True  # once in a wait
        return ""

    def end(self, what: str) -> None:
        """Note that this rank begins nothing any more: it waits for all others to do the same."""
        _OPEN.discard(self)  # once: the host of the store may end after that
        if self._world > 1:
            turn = self.begin(what)
            with suppress(RuntimeError):
                self._post(what, turn)

    def _post(self, what: str, turn: int) -> Standing:
        own = Standing(awaits=what, turn=turn, begun=dict(self.begun), at=here())
        self._board.set(str(self._rank), json.dumps(asdict(own)))
        self._posted = True
        return own

    def end_wait(self) -> None:
        """Note that the wait has ended, and withdraw the post."""
        if self._posted:
            with suppress(RuntimeError):
                # Not deleted: a rank that has seen the key would wait until it exists again.
                self._board.set(str(self._rank), _NOTHING)
        self._posted = self._warned = False


_OPEN: WeakSet[DeadlockDetector] = WeakSet()


def _end_all() -> None:
    # The script has ended: whoever still waits for this rank waits for ever.
    for each in list(_OPEN):
        each.end("the end of the process")


atexit.register(_end_all)
os.register_at_fork(after_in_child=_OPEN.clear)  # the connection to the store is its parent's
