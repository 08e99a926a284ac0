"""Who is rank 0, and who comes next: the stable order of nodes from one round to the next.

A node that stays keeps its place, so that its shard of the state moves as little as possible
and rank 0, which coordinates checkpoints, stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice


def arrange(former: Sequence[str], candidates: Sequence[str], limit: int) -> list[str]:
    """The order of nodes in the next round.

    Survivors keep their relative order; newcomers fill the places of those that left, in order
    of arrival, and then the end. A survivor, if there is one, is first: a newcomer never is
    rank 0 of a job that has state. Survivors go before newcomers when `limit` is short.

    Args:
        former: Nodes of the last round, in order; empty in the first.
        candidates: Live nodes that may take part, in order of arrival.
        limit: At most so many nodes.

    Returns:
        Node ids, first one first; `min(limit, len(candidates))` of them.
    """
    here = set(candidates)
    survivors = [node for node in former if node in here][:limit]
    known = set(former)
    room = limit - len(survivors)
    newcomers = iter([node for node in candidates if node not in known][:room])
    staying = set(survivors)
    order: list[str] = []
    for node in former:
        if node in staying:
            order.append(node)
        elif order:
            order.extend(islice(newcomers, 1))
    return [*order, *newcomers]
