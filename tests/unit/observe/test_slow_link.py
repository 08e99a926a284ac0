"""Which link is called slow, and when the network is probed at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_contract.worker import RankTimes
from zero_orchestrator.ctl.probe_command import conclusions
from zero_orchestrator.membership.job_state import Members, Node
from zero_orchestrator.observe.detectors.detector import Probed
from zero_orchestrator.observe.detectors.slow_link import (
    CONFIRM_S,
    FAST_BYTES_PER_S,
    FIRST_S,
    RECHECK_S,
    Network,
    SlowLinks,
    slow_links,
)
from zero_orchestrator.observe.detectors.slowdown import Slowdown
from zero_orchestrator.observe.links import TURNS, Link, turns

MB = 1e6


def probed(nodes, slow=None, latencies_s=None, usual=1000 * MB):
    """The links between some nodes, named by two letters; `slow` has the rates of slow ones."""
    slow, latencies_s = slow or {}, latencies_s or {}
    return [
        Link(
            source=one,
            target=other,
            latency_s=latencies_s.get(one + other, 0.0002),
            bytes_per_s=slow.get(one + other, usual),
        )
        for one in nodes
        for other in nodes
        if one != other
    ]


def named(links, earlier=None):
    """The slow links and the nodes that are named."""
    return [("".join(one.link.way), one.node) for one in slow_links(links, earlier or {})]


@pytest.mark.parametrize(
    ("nodes", "slow", "expected"),
    [
        ("abc", {"ca": 5 * MB, "cb": 6 * MB}, [("ca", "c"), ("cb", "c")]),
        ("abc", {"ac": 5 * MB, "bc": 6 * MB}, [("ac", "c"), ("bc", "c")]),
        ("abcd", {"ab": 5 * MB, "ba": 6 * MB}, [("ab", ""), ("ba", "")]),
        ("abc", {"ab": 5 * MB}, [("ab", "")]),
        ("ab", {"ba": 5 * MB}, [("ba", "")]),
        ("ab", {"ab": 5 * MB, "ba": 5 * MB}, []),  # two slow links look like a slow network
        ("abcd", {}, []),
        ("abcd", {"ab": FAST_BYTES_PER_S}, []),
    ],
)
def test_the_slow_links_are_named_and_the_node_whose_network_it_is(nodes, slow, expected):
    assert named(probed(nodes, slow)) == expected


def test_a_node_whose_network_is_slow_both_ways_is_named_and_no_other():
    ways = dict.fromkeys(("ac", "bc", "dc", "ca", "cb", "cd"), 5 * MB)
    assert {node for _, node in named(probed("abcd", ways))} == {"c"}


def test_the_link_of_two_nodes_is_compared_with_its_earlier_rate():
    slow = probed("ab", {"ab": 5 * MB, "ba": 5 * MB})
    network = Network().add(probed("ab")).add(slow).add(slow)
    assert network.verdict is None
    found = network.add(slow).verdict
    assert found is not None
    assert found.text == ("the link from a to b is slow: 5 MB/s, 0.2 ms; usual: 1,000 MB/s, 0.2 ms")


def test_a_link_with_a_long_latency_is_slow_and_one_of_a_few_milliseconds_is_not():
    assert named(probed("abc", latencies_s={"ab": 0.030})) == [("ab", "")]
    assert named(probed("abc", latencies_s={"ab": 0.005})) == []


def test_a_verdict_needs_three_probes_in_a_row_and_holds_until_one_that_finds_nothing():
    slow = probed("abc", {"ca": 5 * MB, "cb": 6 * MB})
    network = Network().add(slow).add(slow)
    assert network.verdict is None
    network = network.add(slow).add([]).add([Link(source="a", target="b", problem="no answer")])
    assert network.verdict is not None
    assert network.verdict.text.endswith("; all links from c are slow: look at its network")
    assert network.add(probed("abc")).verdict is None


@given(st.lists(st.floats(FAST_BYTES_PER_S, 100e9), min_size=12, max_size=12))
def test_no_link_is_slow_in_the_noise_of_a_fast_network(rates):
    ways = (link.source + link.target for link in probed("abcd"))
    assert named(probed("abcd", dict(zip(ways, rates, strict=True)))) == []


@given(
    rate=st.floats(500 * MB, 100e9),
    waits=st.lists(st.tuples(st.floats(0.0, 0.98), st.floats(0.95, 1.0)), min_size=12, max_size=12),
)
def test_no_link_is_slow_between_machines_whose_cpus_are_busy(rate, waits):
    """Each end waits for a CPU for some part of the time, of which the kernel counts most."""
    links = [
        replace(link, bytes_per_s=rate * (1 - wait), cpu_wait=wait * counted)
        for link, (wait, counted) in zip(probed("abcd"), waits, strict=True)
    ]
    assert named(links) == []


@given(waits=st.lists(st.floats(0.0, 0.9), min_size=6, max_size=6))
def test_a_slow_link_is_found_between_busy_machines_as_well(waits):
    """Its rate is that of the network: threads sleep while it is slow, and wait for no CPU."""
    links = [
        replace(link, cpu_wait=wait)
        for link, wait in zip(probed("abc", {"ca": 5 * MB, "cb": 6 * MB}), waits, strict=True)
    ]
    assert {node for _, node in named(links)} == {"c"}


@pytest.mark.parametrize("count", [2, 3, 5, 6, 1000])
def test_in_a_turn_each_node_sends_to_one_other_and_receives_from_one(count):
    nodes = [f"n{number}" for number in range(count)]
    found = turns(nodes)
    for turn in found:
        assert set(turn) == set(turn.values()) == set(nodes)
    pairs = {pair for turn in found for pair in turn.items()}
    assert len(pairs) == count * min(TURNS, count - 1)
    assert all(one != other for one, other in pairs)


def test_a_probe_ends_with_what_is_not_reached():
    """And a slow link before it."""
    (slow, *_) = slow_links(probed("abc", {"ab": 5 * MB}), {})
    silent = [Link(source="b", target="d", problem="10.0.0.4:7 cannot be probed: timed out")]
    assert conclusions([slow], silent, 12) == [slow.text, "1 of 12 links was not measured: b -> d"]
    assert conclusions([], [], 12) == ["all links answer, and none is much slower than the others"]


def reports(*phases, ranks=3):
    """A report a second of a job; each phase has its seconds, and computing and wait in a step."""
    compute_s, wait_s, steps = [0.0] * ranks, [0.0] * ranks, 0
    for seconds, own_s, waits_s in phases:
        for _ in range(seconds):
            times = 1 / (own_s[0] + waits_s[0])
            steps += max(1, round(times))
            for rank in range(ranks):
                compute_s[rank] += own_s[rank] * times
                wait_s[rank] += waits_s[rank] * times
            yield RankTimes(
                step=steps,
                steps=steps,
                compute_s=tuple(compute_s),
                wait_s=tuple(wait_s),
                slow_steps=(),
            )


EVEN = (40, [0.1] * 3, [0.02] * 3)


@pytest.mark.parametrize(
    ("then", "slower"),
    [
        ((40, [0.1] * 3, [0.2] * 3), True),
        ((40, [0.1, 0.1, 0.3], [0.22, 0.22, 0.02]), False),  # the others wait for a slow rank
        ((40, [0.3] * 3, [0.02] * 3), False),
        (EVEN, False),
    ],
)
def test_a_job_is_slower_if_all_of_its_ranks_wait_longer(then, slower):
    found = Slowdown()
    for report in reports(EVEN, then):
        found = found.add(report)
    assert found.is_slower is slower


def test_the_network_is_probed_once_after_a_minute_and_again_when_all_ranks_wait():
    nodes = tuple(Node(id=name, incarnation="1", address="x", slots=1) for name in "abc")
    now_s, results, probes, told = 0, [probed("abc")], [], [()]
    detector = SlowLinks(Members(nodes))
    steps = reports((230, *EVEN[1:]), (200, [0.1] * 3, [0.2] * 3))

    def train(seconds):
        nonlocal now_s
        for _, report in zip(range(seconds), steps, strict=False):
            now_s += 1
            found = detector.add(report, now_s)
            if detector.asks is not None:
                probes.append(now_s)
                found = detector.add(Probed(links=results[-1]), now_s)
            about = tuple((one.about["source"], one.about["target"]) for one in found)
            if about != told[-1]:
                told.append(about)

    train(230)
    assert probes == [FIRST_S + 1]
    results.append(probed("abc", {"ca": 5 * MB, "cb": 6 * MB}))
    train(50)
    assert told[1:] == [(("c", "a"),)]
    assert probes[1] - 230 <= 25, "seconds until a slower job is probed"
    assert probes[2:] == [probes[1] + CONFIRM_S, probes[1] + 2 * CONFIRM_S]
    results.append(probed("abc"))
    train(int(RECHECK_S))
    assert told[2:] == [()]
