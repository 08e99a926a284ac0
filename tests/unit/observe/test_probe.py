"""Agents measure the network between them: real connections, on machines that are namespaces."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import struct
from dataclasses import replace

import pytest

from tests.support.partition import network
from tests.support.waiting import wait_for
from zero_agent.loop.answers import prober
from zero_agent.node.probe import LARGEST_BYTES
from zero_agent.node.ring import Ring
from zero_orchestrator.membership.job_state import Node
from zero_orchestrator.observe.detectors.slow_link import Network, slow_links
from zero_orchestrator.observe.links import link_of, turns
from zero_orchestrator.observe.queries import Answer, Query

SECRET = "the job's secret"
RATE = 40e6 / 8
"""Bytes per second of a link of 40 Mbit/s."""
DELAY_S = 0.03


class Agents:
    """The rings of some agents, each on a machine of its own."""

    def __init__(self, stack, net, names):
        self.net, self.nodes, self.probers = net, [], {}
        for name in names:
            with net.inside(name):
                ring = Ring(net.address(name), lambda node, certain: None)
            stack.callback(ring.close)
            own = Node(id=name, incarnation="1", address=net.address(name), slots=1)
            ring.start(own, SECRET)
            self.nodes.append(replace(own, ring=ring.address))
            self.probers[name] = prober(ring, lambda: self.nodes)

    def verdict(self, known):
        """What probes find: on a busy machine some of them are excused, and do not count."""

        def probed():
            nonlocal known
            known = known.add(self.probe())
            return known.verdict

        return wait_for(probed, 300, "a verdict")

    def probe(self):
        """All links, turn by turn."""
        found = []
        for turn in turns(list(self.probers)):
            for source, target in turn.items():
                with self.net.inside(source):
                    query = Query(number=1, kind="probe", arguments={"to": target})
                    record = self.probers[source](query)
                found.append(link_of(source, target, Answer(node=source, number=1, record=record)))
        return found


@pytest.fixture
def agents():
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network("a", "b", "c"))
        yield Agents(stack, net, "abc")


@pytest.mark.netns
def test_a_node_whose_link_is_slow_is_named_with_its_figures_and_an_undisturbed_one_is_not(agents):
    before = Network().add(agents.probe()).add(agents.probe()).add(agents.probe())
    assert (before.verdict, [link.problem for link in agents.probe() if link.problem]) == (None, [])
    agents.net.slow_down("c", "rate 40mbit")
    found = agents.verdict(Network())
    assert (found.link.source, found.node) == ("c", "c")
    # A busy machine makes a link slower than it is, and none faster.
    assert found.link.bytes_per_s < 1.5 * RATE, found.text


@pytest.mark.netns
def test_a_node_that_is_far_away_is_named_with_its_latency(agents):
    agents.net.slow_down("c", f"delay {DELAY_S}s")
    found = agents.verdict(Network())
    assert found.node == "c"
    assert found.link.latency_s >= DELAY_S, found.text


def spin():
    while True:
        pass


@pytest.mark.netns
@pytest.mark.full
def test_no_link_of_machines_whose_cpus_are_busy_is_slow_and_a_slow_one_is_found(agents):
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(2 * os.cpu_count())]
    for process in busy:
        process.start()
    try:
        assert [slow_links(agents.probe(), {}) for _ in range(20)] == [[]] * 20
        agents.net.slow_down("c", "rate 40mbit")
        found = [slow_links(agents.probe(), {}) for _ in range(5)]
        assert all("c" in link.link.way for links in found for link in links)
        assert sum(map(bool, found)) >= 3, "of five probes"
    finally:
        for process in busy:
            process.kill()
            process.join()


def test_a_probe_of_a_node_that_is_gone_says_so(agents):
    with agents.net.inside("a"):
        ask = agents.probers["a"]
        gone = ask(Query(number=1, kind="probe", arguments={"to": "d"}))
        assert gone == {"problem": "node d does not take part any more"}
        agents.nodes[1] = replace(agents.nodes[1], incarnation="2")
        other = ask(Query(number=1, kind="probe", arguments={"to": "b"}))
    assert other["problem"].endswith("cannot be probed: node b answers")


def test_who_asks_for_more_than_a_probe_sends_is_hung_up_on(agents):
    with agents.net.inside("a"):
        ring = next(node for node in agents.nodes if node.id == "b")
        asker = Ring(agents.net.address("a"), lambda node, certain: None)
        asker.start(replace(ring, id="a"), SECRET)
        with contextlib.closing(asker), asker.dial(ring) as connection:
            connection.sendall(struct.pack("!Q", LARGEST_BYTES + 1))
            connection.settimeout(10)
            assert connection.recv(1) == b""
