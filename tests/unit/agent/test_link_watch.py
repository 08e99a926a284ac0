"""Which links an agent takes for dead, and how soon."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import pytest

from tests.support.manual_clock import ManualClock
from zero_agent.loop import link_watch
from zero_agent.loop.link_watch import LONGEST_PAUSE_S, PAUSE_S, LinkWatch, reach_by, verdict
from zero_agent.node.ring import AnotherProcess, Ring
from zero_agent.workers.exits import is_symptom
from zero_agent.workers.progress import (
    LATE_S,
    MEETING_S,
    SECOND_STEP_S,
    HangPolicy,
    Steps,
)
from zero_contract.worker import Preparing, Progress
from zero_orchestrator.addresses import split_host_port
from zero_orchestrator.membership.dead_links import DeadLink
from zero_orchestrator.membership.job_state import Node
from zero_orchestrator.observe.pace import STALL_S, stall_s

NODES = tuple(Node(id=name, incarnation="1", address=name, slots=1, ring="x:1") for name in "bc")


class Watched:
    """A watch of the links to b and c, of which some are dead."""

    def __init__(self, growth=1.0):
        self.clock, self.dead = ManualClock(), ""
        self.error: Exception | None = None
        self.posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.watch = LinkWatch(self.clock, self.post, self.reach, growth)

    def post(self, handler):
        """As an agent's: what a thread posts runs on the thread of the watch."""
        return lambda *news: self.posted.put(partial(handler, *news))

    def reach(self, nodes):
        if self.error is not None:
            raise self.error
        return [DeadLink(to=node.id, why="silent") for node in nodes if node.id in self.dead]

    def look(self, dead=""):
        """Look once more, and wait for what is found."""
        self.dead = dead
        self.clock.advance(LONGEST_PAUSE_S)
        self.watch.look(NODES)
        self.posted.get(timeout=10)()
        found = self.watch.dead
        return None if found is None else "".join(link.to for link in found)


def test_a_link_is_dead_as_long_as_the_last_look_does_not_reach_the_other_end():
    watched = Watched()
    assert [watched.look(dead) for dead in ("b", "bc", "", "c")] == ["b", "bc", "", "c"]


def test_what_was_found_before_workers_made_progress_again_does_not_count():
    watched = Watched()
    watched.look("b")
    watched.watch.forget()
    assert watched.watch.dead is None


def test_looks_that_find_nothing_become_rare_and_one_that_does_is_soon_repeated():
    watched = Watched(growth=1.5)
    for _ in range(20):
        watched.look()
    assert watched.watch._pause_s == LONGEST_PAUSE_S
    watched.look("b")
    assert watched.watch._pause_s == PAUSE_S


def test_a_look_that_fails_says_nothing_of_a_link_and_is_not_the_last(caplog):
    watched = Watched()
    assert watched.look("b") == "b"
    watched.error = RuntimeError("can't start new thread")
    assert watched.look("c") == "b"
    watched.error = None
    assert watched.look("c") == "c"
    assert caplog.messages == [
        "the links to other nodes cannot be looked at: can't start new thread"
    ]


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


SILENT, REFUSED, ANSWERED, LASTS = "does not answer", "refuses", "", None


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ([], None),
        ([LASTS], None),
        ([ANSWERED], ""),
        ([REFUSED], None),
        ([REFUSED, LASTS], None),
        ([REFUSED, REFUSED], REFUSED),
        ([REFUSED, ANSWERED], ""),
        ([LASTS, REFUSED, REFUSED], None),
        ([LASTS, LASTS, ANSWERED], ""),
        ([ANSWERED, LASTS, SILENT], ""),
        ([SILENT, SILENT, LASTS], None),
        ([SILENT, SILENT, ANSWERED], ""),
        ([SILENT, SILENT, SILENT], SILENT),
        ([SILENT, REFUSED, REFUSED], REFUSED),
    ],
)
def test_a_node_is_reached_by_any_answer_and_not_reached_if_every_attempt_has_failed(ends, why):
    assert verdict(ends) == why


class Wire:
    """A ring whose attempts to connect end as a test says, after so many turns; then as the last.

    None: there is no answer as long as the attempt may last.
    """

    def __init__(self, *ends):
        self.ends, self.begun = ends, 0
        self.may_last_s = []

    def dial(self, node, connect_s, answer_s):
        after_turns, error = self.ends[min(self.begun, len(self.ends) - 1)]
        self.begun += 1
        self.may_last_s.append(connect_s)
        late = after_turns is None or after_turns * link_watch.TURN_S >= connect_s
        threading.Event().wait(connect_s if late else after_turns * link_watch.TURN_S)
        if late:
            raise TimeoutError
        if error is not None:
            raise error
        return socket.socket()


LOST, REJECTED = (None, None), (0, ConnectionRefusedError())


@pytest.mark.parametrize(
    ("ends", "why", "begun"),
    [
        ([(0, None)], "", 1),
        ([LOST, LOST, (0, None)], "", 3),
        ([(2.5, None), LOST], "", 3),
        ([LOST], "x:1 does not answer", 3),
        ([REJECTED], "x:1 refuses connections", 2),
        ([REJECTED, (0, None)], "", 2),
        ([LOST, REJECTED], "x:1 refuses connections", 3),
        ([LOST, (0.5, AnotherProcess("b"))], "", 2),
    ],
    ids=["answers", "packets lost", "slow", "dead", "refuses", "refused once", "both", "successor"],
)
def test_a_look_connects_again_and_again_and_takes_any_answer(monkeypatch, ends, why, begun):
    monkeypatch.setattr(link_watch, "TURN_S", 0.2)
    wire = Wire(*ends)
    found = reach_by(wire)(NODES[:1])
    assert [link.why for link in found] == ([why] if why else [])
    assert wire.may_last_s == pytest.approx([0.6, 0.4, 0.2][:begun])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("breaks", [False, True])
def test_an_attempt_that_never_ends_says_nothing_of_a_link_and_does_not_keep_a_look(
    monkeypatch, breaks
):
    monkeypatch.setattr(link_watch, "TURN_S", 0.05)
    monkeypatch.setattr(link_watch, "LONGEST_LOOK_S", 0.05)
    end = threading.Event()

    class Endless:
        def dial(self, *where):
            raise ZeroDivisionError if breaks or end.wait(60) else TimeoutError

    assert reach_by(Endless())(NODES) == []
    end.set()


def test_as_many_nodes_as_look_at_once_are_accepted_while_an_agent_is_held_up():
    with contextlib.ExitStack() as stack:
        ring = Ring("127.0.0.1", lambda node, certain: None)  # which nobody serves
        stack.callback(ring.close)
        where = split_host_port(ring.address)
        for _ in range(link_watch.MOST):
            stack.enter_context(socket.create_connection(where, 0.5))


def test_a_step_is_late_after_a_second_or_a_long_step_and_missing_some_times_later():
    clock = ManualClock()
    steps = Steps(HangPolicy(), clock)
    steps.begin({})
    clock.advance(1e6)
    assert not steps.is_late, "of a script that says nothing"
    assert not steps.is_missing(), "of a script that says nothing"
    steps.begin({})
    steps.prepares(0, Preparing(what="meeting the other ranks"))
    clock.advance(LATE_S + 0.1)
    assert (steps.is_late, steps.is_missing(0.5)) == (True, False)
    clock.advance(MEETING_S / 2)
    assert (steps.is_missing(0.5), steps.is_missing()) == (True, False)
    clock.advance(MEETING_S / 2)
    assert steps.is_missing()
    steps.beat(0, Progress(step=1))
    clock.advance(LATE_S)
    assert not steps.is_late
    clock.advance(0.1)
    assert (steps.is_late, steps.is_missing(0.5)) == (True, False)
    clock.advance(STALL_S)
    assert (steps.is_missing(), steps.may_be_warming_up) == (True, True), "only links are looked at"
    clock.advance(stall_s(SECOND_STEP_S))
    assert not steps.may_be_warming_up
    steps.begin({})
    steps.beat(0, Progress(step=1))
    for _ in range(3):
        clock.advance(10.0)
        steps.beat(0, Progress(step=2))
    clock.advance(9.9)
    assert not steps.is_late, "steps take ten seconds"
    clock.advance(STALL_S - 8.9)
    assert (steps.is_late, steps.is_missing()) == (True, False)
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
