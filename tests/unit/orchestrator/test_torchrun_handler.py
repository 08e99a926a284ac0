"""The plug-in for torchrun in one process: what it does when others are lost, or the store is."""

from __future__ import annotations

import socket
import threading
from unittest.mock import Mock

import pytest

pytest.importorskip("torch")
from tests.support.memory_store import MemoryStore
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_contract.clock import SystemClock
from zero_contract.journal import Journal
from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.membership.job_state import DrainOrder, Node, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.membership.rounds import Timing
from zero_orchestrator.membership.spec import JobSpec
from zero_torchrun.etcd_handler import EtcdV3Handler, _host_store

SPEC = JobSpec(min_nodes=1, max_nodes=2, max_restarts=9, command=("torchrun",))
HASTY = Timing(settle_s=0.0, return_within_s=0.0)


def node(name: str) -> Node:
    return Node(id=name, incarnation=name, address="127.0.0.1", slots=1)


@pytest.fixture
def store():
    memory = MemoryStore()
    yield memory
    memory.close()


@pytest.fixture
def handler(store):
    made = EtcdV3Handler(store.client(), "job", SPEC, node("b"), timing=HASTY, join_timeout_s=60.0)
    yield made
    made.shutdown()


@pytest.mark.parametrize("has_store", [False, True])
def test_a_round_whose_first_node_is_lost_at_its_beginning_is_left_by_the_others(
    store, handler, has_store
):
    first = Rendezvous(
        store.client(), "job", SPEC, node("a"), clock=SystemClock(), journal=Journal("a")
    )
    first.register()
    found = []
    joins = threading.Thread(target=lambda: found.append(handler.next_rendezvous()), daemon=True)
    joins.start()
    wait_for(lambda: len(first.poll().members.nodes) == 2, 20, "a round of both")
    if has_store:
        first.publish_master(first.snapshot, f"127.0.0.1:{free_port()}")
        wait_for(lambda: handler._rdzv.snapshot.master, 20, "the other knows where")
    first.close()
    joins.join(60)
    assert [(info.rank, info.world_size) for info in found] == [(0, 1)]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_store_of_a_host_that_is_known_by_name_is_found_at_each_of_its_addresses(address):
    store = _host_store("localhost")
    socket.create_connection((address, store.port), timeout=20).close()


def test_a_drain_that_the_store_did_not_take_at_first_is_carried_out(store, handler, monkeypatch):
    handler.next_rendezvous()
    order = DrainOrder("b", "b", "alice").to_json()
    store.put(Keys("job").drain("b"), order)
    with monkeypatch.context() as silent:
        silent.setattr(handler._store, "put", Mock(side_effect=StoreUnavailable("no answer")))
        assert handler.num_nodes_waiting() == 0
    wait_for(handler.num_nodes_waiting, 20, "torchrun is told to end its workers")
    assert handler._rdzv.snapshot.state is State.FORMING or handler._rdzv.snapshot.yielding
