"""Which ranks share a node, and what each adds up for its node.

Every rank concludes the same from what all of them know, and the conclusion changes no bit of a
sum, only where sums are formed. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import lcm

from zero_contract.errors import ConfigError

ENV_NODE_RANKS = "ZERO_NODE_RANKS"
"""The environment variable that says it in the place of the launcher's."""

UNKNOWN = -1
"""The node of a rank that nobody has told."""

Place = tuple[int, int]
"""The number of a rank's node, or UNKNOWN, and the rank's number there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The division of the ranks into nodes."""

    nodes: tuple[int, ...]
    """Ranks of each node; the ranks of a node are consecutive."""
    reason: str = ""
    """Why each rank counts as a node by itself, if that is a guess."""

    @property
    def world(self) -> int:
        """Ranks."""
        return sum(self.nodes)

    @property
    def divides(self) -> bool:
        """Whether there are several nodes, and one of several ranks: sums begin inside of nodes."""
        return len(self.nodes) > 1 and max(self.nodes) > 1

    def place(self, rank: int) -> Place:
        """The node of a rank, and the rank's number there."""
        for node, stop in enumerate(accumulate(self.nodes)):
            if rank < stop:
                return node, rank - (stop - self.nodes[node])
        raise ValueError(f"rank {rank} of {self.world}")

    def ranks(self, node: int) -> range:
        """The ranks of a node."""
        first = sum(self.nodes[:node])
        return range(first, first + self.nodes[node])


def alone(world: int, reason: str = "") -> Topology:
    """Each rank on a node by itself."""
    return Topology(nodes=(1,) * world, reason=reason)


def place_of(environ: Mapping[str, str], rank: int, world: int) -> Place:
    """The place of a rank, from its environment.

    Raises:
        ConfigError: ZERO_NODE_RANKS does not describe this world.
    """
    if given := environ.get(ENV_NODE_RANKS):
        return described(given, world).place(rank)
    local = environ.get("LOCAL_RANK", "")
    if not local.isdecimal():
        return UNKNOWN, 0
    group = environ.get("GROUP_RANK", "")
    if group.isdecimal():
        return int(group), int(local)
    return rank - int(local), int(local)  # its first rank: as good a name as any


def described(text: str, world: int) -> Topology:
    """The topology that ZERO_NODE_RANKS describes, such as "4,4,2".

    One number is that of every node, of which the last may have fewer.

    Raises:
        ConfigError: It describes no world, or another one.
    """
    try:
        nodes = tuple(int(number) for number in text.split(","))
    except ValueError:
        nodes = ()
    if not nodes or min(nodes) < 1:
        raise ConfigError(f"{ENV_NODE_RANKS}={text}: give the ranks of each node, such as 4,4")
    if len(nodes) == 1:
        full, rest = divmod(world, nodes[0])
        nodes = nodes * full + (rest,) * bool(rest)
    if sum(nodes) != world:
        raise ConfigError(
            f"{ENV_NODE_RANKS}={text}: these are {sum(nodes)} ranks, and there are {world}; give "
            "the ranks of each node, or one number if every node has as many"
        )
    return Topology(nodes=nodes)


def concluded(places: Sequence[Place]) -> Topology:
    """The topology, from the places of all ranks, by rank."""
    world = len(places)
    unknown = [rank for rank, (node, _) in enumerate(places) if node == UNKNOWN]
    # One unknown place makes all nodes of one rank: that is slower, and right for any cluster.
    if unknown:
        return alone(world, f"the node of rank {unknown[0]} is unknown: LOCAL_RANK is not set")
    members = [(node, list(run)) for node, run in groupby(places, key=lambda place: place[0])]
    numbers = [node for node, _ in members]
    for node, run in members:
        # As where a launcher deals ranks out to the nodes in turn; if it does not number the nodes,
        # a run of ranks then has no first one.
        if numbers.count(node) > 1 or min(local for _, local in run) > 0:
            return alone(world, f"the ranks of node {node} are not consecutive")
    return Topology(nodes=tuple(len(run) for _, run in members))


# ---- slices and shards ----


def rail_order(nodes: Sequence[int]) -> tuple[int, ...]:
    """Owners by shard, such that a rank's slice goes to the ranks of the same number elsewhere."""
    # Where all nodes are equal it is local rank * nodes + node: a slice is whole shards.
    places = [(node, local) for node, size in enumerate(nodes) for local in range(size)]
    turn = lcm(*nodes)
    # The middle of each rank's slice, in a unit in which all are whole.
    middles = [((2 * local + 1) * (turn // nodes[node]), node) for node, local in places]
    return tuple(sorted(range(len(places)), key=lambda rank: middles[rank]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Relay:
    """One rank's part in an all-gather of shards in which each goes to each other node once."""

    to: tuple[int, ...]
    """The ranks of other nodes, one in each, that this rank sends its shard to."""
    wanted: tuple[tuple[int, int], ...]
    """(source, shard) of the shards that this rank receives for its node."""
    passes_on: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """(rank, runs of shards [start, stop)): what each rank of the node then sends to the others."""


def relay(topology: Topology, owners: Sequence[int], rank: int) -> Relay:
    """How a rank takes part in such an all-gather; `owners`: by shard, the rank that has it."""
    own_node, _ = topology.place(rank)

    def first(node: int, shard: int) -> int:
        """The rank of a node that has a shard first."""
        owner = owners[shard]
        if topology.place(owner)[0] == node:
            return owner
        # The rank whose slice has the middle of the shard: so what it passes on is as long as what
        # others do, and mostly in one run.
        ranks = topology.ranks(node)
        return ranks[(2 * shard + 1) * len(ranks) // (2 * len(owners))]

    shards = range(len(owners))
    receivers = [first(own_node, shard) for shard in shards]
    held = {each: [s for s in shards if receivers[s] == each] for each in topology.ranks(own_node)}
    return Relay(
        to=tuple(
            first(node, owners.index(rank))
            for node in range(len(topology.nodes))
            if node != own_node
        ),
        wanted=tuple((owners[shard], shard) for shard in held[rank] if owners[shard] != rank),
        passes_on=tuple((each, tuple(runs(numbers))) for each, numbers in held.items()),
    )


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The runs of consecutive numbers, [start, stop), of an ascending sequence."""
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1] + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices:
    """Which elements of a gradient each rank adds up for its node, and which it owns.

    The slices of a node's ranks are nearly equal; shards, one for each rank, are equal.
    """

    topology: Topology
    owners: tuple[int, ...]
    """By shard, the rank that owns it."""
    elements: int
    """Of the gradient; a multiple of the ranks."""
    grain: int = 1
    """Slices are cut at its multiples; a divisor of a shard."""

    def slice_of(self, rank: int) -> range:
        """The elements that a rank adds up for its node."""
        node, local = self.topology.place(rank)
        size, grains = self.topology.nodes[node], self.elements // self.grain
        start, stop = local * grains // size, (local + 1) * grains // size
        return range(start * self.grain, stop * self.grain)

    def shard_of(self, rank: int) -> range:
        """The elements that a rank owns."""
        size, shard = self.elements // len(self.owners), self.owners.index(rank)
        return range(shard * size, (shard + 1) * size)

    def routes(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """To whom a rank's slice goes: (owner, start, stop), itself included."""
        own, size = self.slice_of(rank), self.elements // len(self.owners)
        for shard in range(own.start // size, -(-own.stop // size)):
            start, stop = max(own.start, shard * size), min(own.stop, (shard + 1) * size)
            yield self.owners[shard], start, stop

    def sources(self, rank: int) -> list[list[tuple[int, int, int]]]:
        """By node, who sends a rank its shard: (source, start, stop), itself included."""
        shard = self.shard_of(rank)
        found: list[list[tuple[int, int, int]]] = []
        for node in range(len(self.topology.nodes)):
            slices = ((source, self.slice_of(source)) for source in self.topology.ranks(node))
            parts = (
                (source, max(own.start, shard.start), min(own.stop, shard.stop))
                for source, own in slices
            )
            found.append([part for part in parts if part[1] < part[2]])
        return found
