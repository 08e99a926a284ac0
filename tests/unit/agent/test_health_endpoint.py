"""What a supervisor is told about an agent that it asks over HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import socket

import pytest

from zero_agent.node.health_endpoint import STALLED_S, STARTING, Health, Status, healthy, ready
from zero_agent.node.state import Workers
from zero_orchestrator.errors import SpecError

RUNS = Status(
    job="j",
    node="a",
    round=3,
    state="ACTIVE",
    reason="round 3 runs on 2 nodes",
    workers=Workers.RUNNING,
    workers_round=3,
    turned_s=0.1,
    store_silent_s=None,
)


def but(**facts: object) -> Status:
    return dataclasses.replace(RUNS, **facts)


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (RUNS, (True, "round 3 runs on 2 nodes")),
        (but(store_silent_s=20.0), (True, "round 3 runs on 2 nodes")),
        (
            but(workers=Workers.LEFT, reason="round 4 is forming"),
            (False, "no workers run here in round 3 (left): round 4 is forming"),
        ),
        (
            but(round=4, reason="round 4 runs"),
            (False, "no workers run here in round 4 (running): round 4 runs"),
        ),
        (
            but(workers=Workers.NONE, store_silent_s=20.4),
            (False, "etcd has not answered for 20 s"),
        ),
        (
            but(preparing="meeting the other ranks; rank 1 cannot reach b: 10.0.0.2:7 is silent"),
            (
                False,
                "no step of round 3 has ended here yet: meeting the other ranks; rank 1 cannot "
                "reach b: 10.0.0.2:7 is silent",
            ),
        ),
        (but(turned_s=STALLED_S + 1), (False, "the agent's loop has not turned for 31 s")),
    ],
)
def test_an_agent_is_ready_while_its_workers_run_in_the_current_round(status, answer):
    assert ready(status) == answer


def test_an_agent_is_healthy_while_its_loop_turns_whatever_the_job_does():
    assert healthy(but(workers=Workers.NONE, store_silent_s=99.0))[0]
    assert healthy(STARTING) == (True, "the agent is starting")
    assert not healthy(but(turned_s=STALLED_S + 1))[0]


def ask(health: Health, path: str, method: str = "GET") -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", health.port, timeout=120)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
        return answer.status, json.loads(body) if body.startswith(b"{") else {}


@pytest.fixture
def health():
    with contextlib.closing(Health("127.0.0.1", 0)) as running:
        yield running


def test_answers_are_json_with_state_and_reason(health):
    assert ask(health, "/healthz")[0] == 200
    assert ask(health, "/readyz")[0] == 503
    health.watch(lambda: RUNS)
    code, record = ask(health, "/readyz?verbose")
    assert code == 200
    assert record == {**dataclasses.asdict(RUNS), "ok": True}
    health.watch(lambda: but(workers=Workers.FAILED))
    code, record = ask(health, "/readyz")
    assert (code, record["ok"], record["workers"]) == (503, False, "failed")


def test_a_node_that_is_not_fit_to_join_says_so_and_why(health):
    health.waits("/tmp is full")
    code, record = ask(health, "/healthz")
    assert (code, record["reason"]) == (200, "this node does not join yet: /tmp is full")
    assert ask(health, "/readyz")[0] == 503


def test_nothing_can_be_changed_and_nothing_else_is_served(health):
    assert ask(health, "/")[0] == 404
    assert ask(health, "/healthz", "POST")[0] == 501
    assert ask(health, "/healthz", "DELETE")[0] == 501


def test_metrics_are_those_of_the_agent_as_soon_as_there_is_one(health):
    assert get(health, "/metrics") == (200, "text/plain; version=0.0.4; charset=utf-8", b"")
    health.watch(lambda: RUNS, lambda: b"zero_node_step 7\n")
    assert get(health, "/metrics?x")[2] == b"zero_node_step 7\n"


def get(health: Health, path: str) -> tuple[int, str | None, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", health.port, timeout=120)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type"), answer.read()


def test_a_client_that_says_nothing_holds_nobody_up(health):
    with socket.create_connection(("127.0.0.1", health.port)):
        assert ask(health, "/healthz")[0] == 200


def test_a_port_that_is_taken_is_named_with_the_remedy(health):
    with pytest.raises(SpecError, match=f"--health-port={health.port}: cannot listen") as refused:
        Health("127.0.0.1", health.port)
    assert "0 for any free one" in str(refused.value)
