"""The rank order of a round: which node has rank 0, and which follow it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

Path = tuple[str, ...]
"""The parts of the network that a node is in, the widest first, such as a block and a rack."""

SEPARATOR = "."
"""Separates the parts, as in Slurm's SLURM_TOPOLOGY_ADDR; values of labels may contain it, too."""


def path_of(topology: str) -> Path:
    """The parts that a topology names: `block-1.rack-7`."""
    return tuple(filter(None, topology.split(SEPARATOR)))


def arrange(
    former: Sequence[str], candidates: Sequence[str], limit: int, paths: Mapping[str, Path]
) -> list[str]:
    """The rank order of the next round.

    Survivors keep their relative order, and go before newcomers when `limit` is short; one of them
    is first. Newcomers fill the places of those that left, and further ones come last: in order of
    arrival, but neighbours in the network become neighbours in rank.

    Args:
        former: Nodes of the last round, in order; empty in the first.
        candidates: Live nodes that may take part, in order of arrival.
        limit: At most so many nodes.
        paths: Where the nodes are in the network, also those that left; () or none: unknown.

    Returns:
        Node ids, first one first; `min(limit, len(candidates))` of them.
    """
    # A node that stays keeps its place: its shard of the state moves as little as possible.
    here, known = set(candidates), set(former)
    survivors = [node for node in former if node in here][:limit]
    room = limit - len(survivors)
    newcomers = [node for node in candidates if node not in known][:room]
    if not survivors:
        return _grouped(newcomers, paths)
    staying = set(survivors)
    # The places before the first survivor stay empty: a newcomer in them would be rank 0, which
    # coordinates checkpoints, of a job that has state.
    places = former[former.index(survivors[0]) :]
    fills = _fills([node for node in places if node not in staying], newcomers, paths)
    order = [fills.get(node, node) for node in places if node in staying or node in fills]
    filling = set(fills.values())
    # A further newcomer follows the last node of its rack, or else of its block.
    last = {prefix: node for node in order for prefix in _prefixes(node, paths)}
    after: defaultdict[str | None, list[str]] = defaultdict(list)
    for node in _grouped([node for node in newcomers if node not in filling], paths):
        neighbours = [last[prefix] for prefix in _prefixes(node, paths) if prefix in last]
        after[neighbours[-1] if neighbours else None].append(node)
    return [one for node in order for one in (node, *after[node])] + after[None]


def _prefixes(node: str, paths: Mapping[str, Path]) -> Iterator[Path]:
    """The widest part of the network that a node is in, and each narrower one."""
    path = paths.get(node, ())
    return (path[: depth + 1] for depth in range(len(path)))


def _grouped(nodes: Sequence[str], paths: Mapping[str, Path]) -> list[str]:
    """The nodes of each part of the network together; parts are in order of their first node."""
    first: dict[Path, int] = {}
    for index, node in enumerate(nodes):
        for prefix in _prefixes(node, paths):
            first.setdefault(prefix, index)
    # A node whose place in the network is unknown comes where it arrived.
    keys = {
        node: [first[prefix] for prefix in _prefixes(node, paths)] or [index]
        for index, node in enumerate(nodes)
    }
    return sorted(nodes, key=lambda node: keys[node])


def _fills(
    left: Sequence[str], newcomers: Iterable[str], paths: Mapping[str, Path]
) -> dict[str, str]:
    """Which newcomer gets the place of which node that left: the nearest in the network."""
    waiting, fills = dict.fromkeys(newcomers), dict[str, str]()
    deepest = max((len(paths.get(node, ())) for node in left), default=0)
    # The same rack first, then the same block, and at depth 0 the rest, wherever it is.
    for depth in range(deepest, -1, -1):
        near: defaultdict[Path, deque[str]] = defaultdict(deque)
        for node in waiting:
            if len(path := paths.get(node, ())) >= depth:
                near[path[:depth]].append(node)
        for node in left:
            path = paths.get(node, ())
            if node not in fills and len(path) >= depth and near[path[:depth]]:
                fills[node] = near[path[:depth]].popleft()
                del waiting[fills[node]]
    return fills
