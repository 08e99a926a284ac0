"""Which ranks share a node: every launcher's environment, the override, and what is no topology."""

from __future__ import annotations

import itertools

import pytest

from zero_comm.topology import (
    Slices,
    Topology,
    concluded,
    described,
    place_of,
    rail_order,
    relay,
)
from zero_contract.errors import ConfigError

AGENT = [
    {"GROUP_RANK": str(node), "LOCAL_RANK": str(local)} for node, local in ((0, 0), (0, 1), (1, 0))
]
ONE_DEVICE_EACH = [{"GROUP_RANK": node, "LOCAL_RANK": "0"} for node in "001"]
SRUN = [{"LOCAL_RANK": local} for local in "010"]


@pytest.mark.parametrize("environs", [AGENT, ONE_DEVICE_EACH, SRUN])
def test_ranks_of_one_node_are_found_by_the_variables_of_any_launcher(
    environs: list[dict[str, str]],
) -> None:
    topology = concluded([place_of(each, rank, 3) for rank, each in enumerate(environs)])
    assert topology == Topology(nodes=(2, 1))
    assert [topology.place(rank) for rank in range(3)] == [(0, 0), (0, 1), (1, 0)]
    assert [topology.ranks(node) for node in range(2)] == [range(2), range(2, 3)]


@pytest.mark.parametrize(
    ("environs", "reason"),
    [
        ([{}, {}], "the node of rank 0 is unknown: LOCAL_RANK is not set"),
        ([*AGENT, {}], "the node of rank 3 is unknown: LOCAL_RANK is not set"),
        (
            [{"GROUP_RANK": node, "LOCAL_RANK": "0"} for node in "0101"],
            "the ranks of node 0 are not consecutive",
        ),
        # Two hosts of two, dealt out in turn by a launcher that does not number the hosts.
        (
            [{"LOCAL_RANK": local} for local in "0011"],
            "the ranks of node 2 are not consecutive",
        ),
    ],
)
def test_each_rank_counts_as_a_node_where_the_ranks_do_not_know_or_nodes_are_scattered(
    environs: list[dict[str, str]], reason: str
) -> None:
    world = len(environs)
    topology = concluded([place_of(each, rank, world) for rank, each in enumerate(environs)])
    assert topology == Topology(nodes=(1,) * world, reason=reason)
    assert not topology.divides


def test_an_override_wins_and_one_number_is_that_of_every_node() -> None:
    environ = AGENT[0] | {"ZERO_NODE_RANKS": "1,2"}
    assert concluded([place_of(environ, rank, 3) for rank in range(3)]).nodes == (1, 2)
    assert described("4", 10).nodes == (4, 4, 2)
    assert described("4", 3).nodes == (3,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("two", "ZERO_NODE_RANKS=two: give the ranks of each node, such as 4,4"),
        ("2,0", "ZERO_NODE_RANKS=2,0: give the ranks of each node, such as 4,4"),
        ("2,2", "ZERO_NODE_RANKS=2,2: these are 4 ranks, and there are 5; give"),
    ],
)
def test_an_override_that_describes_another_world_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        described(text, 5)
    assert str(error.value).startswith(said)


def test_sums_begin_inside_of_nodes_only_where_there_are_several_and_one_has_several_ranks() -> (
    None
):
    divides = {nodes: Topology(nodes=nodes).divides for nodes in ((4,), (1, 1), (2, 2), (1, 3))}
    assert divides == {(4,): False, (1, 1): False, (2, 2): True, (1, 3): True}


@pytest.mark.parametrize("nodes", [(2, 2), (3, 1), (1, 2, 3), (4,), (1, 1)])
def test_what_is_sent_to_an_owner_is_what_it_expects_and_together_its_shard(
    nodes: tuple[int, ...],
) -> None:
    topology, world = Topology(nodes=nodes), sum(nodes)
    slices = Slices(topology=topology, owners=rail_order(nodes), elements=1024 * world)
    sent = {(rank, *route) for rank in range(world) for route in slices.routes(rank)}
    expected = set()
    for rank in range(world):
        for node, sources in enumerate(slices.sources(rank)):
            assert {source for source, _, _ in sources} <= set(topology.ranks(node))
            pieces = [range(start, stop) for _, start, stop in sources]
            assert [n for piece in pieces for n in piece] == list(slices.shard_of(rank))
            expected |= {(source, rank, start, stop) for source, start, stop in sources}
    assert sent == expected


LAYOUTS = [
    nodes
    for count in (1, 2, 3, 4)
    for nodes in itertools.product(range(1, 6), repeat=count)
    if sum(nodes) < 9
]


def test_a_gather_sends_each_shard_to_each_other_node_once_and_fills_every_rank() -> None:
    """Every layout of up to eight ranks; where nodes are equal, ranks pass on one run each."""
    for nodes in LAYOUTS:
        topology, owners = Topology(nodes=nodes), rail_order(nodes)
        world = range(topology.world)
        routes = [relay(topology, owners, rank) for rank in world]
        has = [{owners.index(rank)} for rank in world]
        crossed = [(source, rank) for rank in world for source, _ in routes[rank].wanted]
        assert sorted(crossed) == sorted((rank, to) for rank in world for to in routes[rank].to)
        assert len(crossed) == topology.world * (len(nodes) - 1)
        for rank in world:
            has[rank] |= {shard for _, shard in routes[rank].wanted}
        for route in routes:
            if len(set(nodes)) == 1:
                assert {len(runs) for _, runs in route.passes_on} == {1}
            for rank, runs in route.passes_on:
                assert {n for run in runs for n in range(*run)} <= has[rank]
            runs = [range(*run) for _, runs in route.passes_on for run in runs]
            assert sorted(shard for run in runs for shard in run) == list(world)
