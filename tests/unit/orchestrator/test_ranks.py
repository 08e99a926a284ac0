"""The order of nodes from round to round."""

import random

import pytest

from zero_agent.command.resolve import topology_of
from zero_orchestrator.membership.ranks import arrange, path_of


@pytest.mark.parametrize(
    ("former", "candidates", "limit", "expected", "why"),
    [
        ("", "abc", 4, "abc", "the first round is in order of arrival"),
        ("abcd", "abd", 4, "abd", "survivors keep their order"),
        ("abcd", "bcd", 4, "bcd", "without rank 0 the next survivor takes its place"),
        ("abcd", "abde", 4, "abed", "a newcomer fills the hole"),
        ("abcd", "bcde", 4, "bcde", "a newcomer is never rank 0 beside survivors"),
        ("ab", "abcd", 4, "abcd", "further newcomers come last"),
        ("ab", "cab", 2, "ab", "survivors go before newcomers when places are short"),
        ("ab", "cd", 4, "cd", "newcomers alone start over"),
        ("abcd", "abcdef", 4, "abcd", "a full round keeps its nodes"),
        ("abc", "", 4, "", "nobody is left"),
    ],
)
def test_the_order_of_nodes(former, candidates, limit, expected, why):
    assert "".join(arrange(former, candidates, limit, {})) == expected, why


RACKS = {"a": "x.1", "b": "y.1", "c": "x.2", "d": "y.1", "e": "x.1", "f": "x.2", "g": "y.2"}
"""Two blocks, x and y, with two racks each; what else there is says nothing."""


@pytest.mark.parametrize(
    ("former", "candidates", "limit", "expected", "why"),
    [
        ("", "abcdefg", 9, "aecfbdg", "the first round is in blocks, and these in racks"),
        ("", "hbaid", 9, "hbdai", "nodes of which nobody knows keep their place"),
        ("", "abcdefg", 3, "acb", "who comes first takes part, wherever it is"),
        ("abcd", "abcd", 9, "abcd", "survivors keep their order, whatever racks they are in"),
        ("abc", "bca", 9, "abc", "also if they come in another order"),
        ("acbd", "abef", 9, "afbe", "a hole is for a node of the same rack"),
        ("acbd", "abgf", 9, "afbg", "or of the same block"),
        ("acb", "abg", 9, "agb", "or for any"),
        ("ac", "acgfe", 9, "aecfg", "further newcomers follow their rack, or come last"),
        ("ab", "abdc", 9, "acbd", "or their block"),
        ("abc", "bced", 9, "bdce", "a newcomer is never rank 0 beside survivors"),
        ("abc", "gfe", 9, "gfe", "newcomers alone start over"),
    ],
)
def test_neighbours_in_the_network_become_neighbours_in_rank(
    former, candidates, limit, expected, why
):
    paths = {node: path_of(topology) for node, topology in RACKS.items()}
    assert "".join(arrange(former, candidates, limit, paths)) == expected, why


@pytest.mark.parametrize("seed", range(50))
def test_in_any_history_survivors_keep_their_order_and_places_and_nobody_is_lost(seed):
    draw = random.Random(seed)
    former: list[str] = []
    for _ in range(20):
        paths = {f"{n}": tuple(draw.choices("xyz", k=draw.randrange(4))) for n in range(30)}
        candidates = draw.sample(list(paths), draw.randrange(1, 20))
        limit = draw.randrange(1, 20)
        order = arrange(former, candidates, limit, paths)
        stay = [node for node in former if node in candidates][:limit]
        assert [node for node in order if node in stay] == stay
        assert order[: len(stay[:1])] == stay[:1]
        assert len(order) == len(set(order)) == min(limit, len(candidates))
        assert set(order) <= set(candidates)
        if not stay:  # each part of the network is one piece
            for depth in (1, 2, 3):
                parts = [paths[node][:depth] for node in order if len(paths[node]) >= depth]
                pieces = [
                    p for p, before in zip(parts, [None, *parts], strict=False) if p != before
                ]
                assert len(pieces) == len(set(pieces))
        former = order


A, PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"


@pytest.mark.parametrize(
    ("environ", "topology"),
    [
        ({}, ""),
        ({A: "s0.s4.n1", PATTERN: "switch.switch.node"}, "s0.s4"),
        ({A: "b1.n1.local", PATTERN: "block.node"}, "b1"),
        ({A: "n1.local", PATTERN: "node"}, ""),
        ({"ZERO_TOPOLOGY": "zone-a", A: "s0.n1", PATTERN: "switch.node"}, "zone-a"),
    ],
)
def test_an_agent_knows_where_it_is_from_its_environment(environ, topology):
    assert topology_of(environ) == topology
