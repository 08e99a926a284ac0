"""Dead links: nodes of a round that do not reach each other, and which of them is set aside.

When workers make no progress, each agent looks whether it reaches the other members, and reports
the links that are dead (`LinkReport`). The next round goes on without enough nodes that no dead
link is left: they are *set aside* (`SetAside`), in the transaction that ends the round, until they
reach the others.

Source of the idea: a vertex cover by the greedy rule, as network engineers blame the host that most
failing pairs have in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zero_orchestrator.membership.records import Record

Pair = frozenset[str]
"""The two nodes of a link."""


@dataclass(frozen=True, kw_only=True)
class DeadLink:
    """A link as the agent of one of its nodes sees it."""

    to: str
    """The node that it does not reach."""
    why: str = ""
    """The error, with the address."""


@dataclass(frozen=True, kw_only=True)
class LinkReport(Record):
    """The findings of one node's agent about its links to the other members."""

    node: str
    dead: tuple[DeadLink, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SetAside(Record):
    """A live node that no round begins with until it reaches the others again."""

    node: str
    why: str
    others: tuple[str, ...]
    """The nodes that it has a dead link to."""

    def __str__(self) -> str:
        return f"{self.node} is set aside: {self.why}"


def unreached(dead: Iterable[Pair]) -> dict[str, set[str]]:
    """Each node that has a dead link, and the nodes at the other ends."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for pair in dead:
        for node in pair:
            found[node] |= pair - {node}
    return found


def who_goes(order: Sequence[str], dead: Iterable[Pair]) -> dict[str, str]:
    """The nodes without which no dead link is left, and why each of them.

    The one goes that most dead links have as an end, at a tie the later one in the order of ranks;
    again, until none is left.
    """
    left, goes = unreached(dead), dict[str, str]()
    place = {node: index for index, node in enumerate(order)}
    while left:
        # At a tie the later rank goes: rank 0 coordinates checkpoints, and stays if it can.
        node = max(left, key=lambda one: (len(left[one]), place[one]))
        others = left.pop(node)
        tied = any(len(each) == len(others) for each in left.values())
        links = f"{len(others)} dead link{'s' if len(others) > 1 else ''}"
        goes[node] = f"it has {links}" + (", and the last rank of those" if tied else "")
        # Not counted anew for each: a switch in a job of a thousand nodes leaves 30,000 dead links.
        for other in others:
            left[other].discard(node)
            if not left[other]:
                del left[other]
    return goes
