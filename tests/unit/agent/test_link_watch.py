"""Which links an agent takes for dead, and how soon."""

from __future__ import annotations

import socket

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.waiting import wait_for
from zero_agent.loop.link_watch import LONGEST_PAUSE_S, PAUSE_S, LinkWatch, reach_by
from zero_agent.node.ring import Ring
from zero_agent.workers.exits import is_symptom
from zero_agent.workers.progress import (
    MEETING_S,
    SECOND_STEP_S,
    HangPolicy,
    Steps,
)
from zero_contract.worker import Preparing, Progress
from zero_orchestrator.membership.dead_links import DeadLink
from zero_orchestrator.membership.job_state import Node
from zero_orchestrator.observe.pace import STALL_S, stall_s

NODES = tuple(Node(id=name, incarnation="1", address=name, slots=1, ring="x:1") for name in "bc")


class Watched:
    """A watch of the links to b and c, of which some are dead."""

    def __init__(self, growth=1.0):
        self.clock, self.dead, self.looks = ManualClock(), "", 0
        self.watch = LinkWatch(self.clock, lambda handler: handler, self.reach, growth)

    def reach(self, nodes):
        self.looks += 1
        return [DeadLink(to=node.id, why="silent") for node in nodes if node.id in self.dead]

    def look(self, dead=""):
        """Look once more, and wait for what is found."""
        self.dead = dead
        before = self.looks
        self.clock.advance(LONGEST_PAUSE_S)
        self.watch.look(NODES)
        wait_for(lambda: self.looks > before and not self.watch._looking, 10, "a look")
        found = self.watch.dead
        return None if found is None else "".join(link.to for link in found)


def test_a_link_is_dead_when_two_looks_in_a_row_do_not_reach_the_other_end():
    watched = Watched()
    assert [watched.look(dead) for dead in ("b", "bc", "bc", "c", "", "b", "c")] == [
        *(None, "b", "bc", "c", "", "", ""),
    ]


def test_what_was_found_before_workers_made_progress_again_does_not_count():
    watched = Watched()
    watched.look("b")
    watched.watch.forget()
    assert watched.watch.dead is None
    assert watched.look("b") is None


def test_looks_that_find_nothing_become_rare_and_one_that_does_is_soon_repeated():
    watched = Watched(growth=1.5)
    for _ in range(20):
        watched.look()
    assert watched.watch._pause_s == LONGEST_PAUSE_S
    watched.look("b")
    assert watched.watch._pause_s == PAUSE_S


def test_a_port_that_refuses_is_named_and_one_that_answers_is_reached():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        refuses = f"127.0.0.1:{taken.getsockname()[1]}"
        rings = {name: Ring("127.0.0.1", lambda node, certain: None) for name in "ab"}
        nodes = {
            name: Node(id=name, incarnation="1", address="x", slots=1, ring=ring.address)
            for name, ring in rings.items()
        }
        for name, ring in rings.items():
            ring.start(nodes[name], "secret")
        gone = Node(id="c", incarnation="1", address="x", slots=1, ring=refuses)
        again = Node(id="b", incarnation="0", address="x", slots=1, ring=nodes["b"].ring)
        found = reach_by(rings["a"])([nodes["b"], gone, again])
        for ring in rings.values():
            ring.close()
    assert found == [DeadLink(to="c", why=f"{refuses} refuses connections")]


def test_a_step_is_missing_after_some_seconds_or_some_times_as_long_as_usual():
    clock = ManualClock()
    steps = Steps(HangPolicy(), clock)
    steps.begin({})
    clock.advance(1e6)
    assert not steps.is_missing(), "of a script that says nothing"
    steps.begin({})
    steps.prepares(0, Preparing(what="meeting the other ranks"))
    clock.advance(MEETING_S / 2 + 0.1)
    assert (steps.is_missing(0.5), steps.is_missing()) == (True, False)
    clock.advance(MEETING_S / 2)
    assert steps.is_missing()
    steps.beat(0, Progress(step=1))
    assert not steps.is_missing(0.5)
    clock.advance(STALL_S + 1)
    assert (steps.is_missing(), steps.may_be_warming_up) == (True, True), "only links are looked at"
    clock.advance(stall_s(SECOND_STEP_S))
    assert not steps.may_be_warming_up
    steps.begin({})
    steps.beat(0, Progress(step=1))
    for _ in range(3):
        clock.advance(10.0)
        steps.beat(0, Progress(step=2))
    clock.advance(STALL_S + 1)
    assert not steps.is_missing(), "steps take ten seconds"
    clock.advance(50.0)
    assert steps.is_missing()


@pytest.mark.parametrize(
    ("message", "symptom"),
    [
        (
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection "
            "closed by peer [10.77.0.2]:31412",
            True,
        ),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("ValueError: no", False),
    ],
)
def test_a_script_that_ends_with_gloos_error_has_lost_a_peer(message, symptom):
    assert is_symptom(1, message, gpus=False) is symptom
