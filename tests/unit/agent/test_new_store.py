"""What a new store begins with, and the file by which one node alone begins it."""

from __future__ import annotations

import dataclasses
import os
import threading
import time

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.waiting import wait_for
from tests.unit.orchestrator.test_rendezvous import Cluster
from zero_agent.etcd import new_store, signs
from zero_agent.etcd.etcd_access import Access, Joining
from zero_agent.etcd.new_store import Successor, estate_of, fill
from zero_agent.etcd.own_etcd import Seat
from zero_agent.etcd.own_members import REST_S, MemberKeeper
from zero_contract import beside
from zero_contract.worker import CommitRequest
from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.membership.job_state import Failure, Published, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.parse import parse
from zero_orchestrator.membership.runs import current_run, run_key
from zero_orchestrator.store.succession import Checkpoint, Heir

KEYS = Keys(Cluster.job)


@pytest.fixture
def lost():
    """A job of three nodes in its second round, with a restart charged and a checkpoint."""
    cluster = Cluster()
    for name in "abc":
        cluster.join(name)
    cluster.settle()
    cluster.agents["b"].report_failure(1, Failure(node="b", symptom=False, summary="broke"))
    cluster.settle()
    agent = cluster.agents["a"]
    facts = {"step": 20, "tag": "t", "digest": "d", "samples": 640, "root": "/shared"}
    assert agent.commit(agent.snapshot.fence, CommitRequest(request=1, **facts))
    return cluster


def test_job_budget_and_step_go_on_in_a_new_store_and_the_ranks_keep_their_order(lost):
    before = lost.view
    estate = estate_of(lost.store.client(), KEYS, None)
    lost.store = MemoryStore(lost.clock)
    old = lost.agents
    fill(lost.store.client(), KEYS, estate, lost=["1a"], last_round=7, cause="it was lost")
    found = parse(KEYS, lost.store.client().range(KEYS.prefix), lost.spec)
    assert (found.n, found.state, found.committed) == (7, State.FORMING, 20)
    assert found.charged == before.charged
    lost.agents = {}
    for name in "ca":
        lost.join(name, incarnation="2")
    lost.settle()
    assert (lost.view.n, lost.view.state, lost.view.charges) == (8, State.ACTIVE, 1)
    assert lost.order() == "".join(each.id for each in before.members.nodes if each.id in "ac")
    assert lost.agents["a"].secret == old["a"].secret, "checkpoints are of the same run"


def test_whoever_types_the_command_of_a_job_in_a_new_store_joins_it_until_all_have_left(lost):
    old = lost.store.client()
    old.put(run_key("train"), "7")
    keys = Keys("train.7")
    for item in old.range(KEYS.prefix).items:
        old.put(keys.prefix + item.key.removeprefix(KEYS.prefix), item.value)
    new = MemoryStore(lost.clock).client()
    estate = estate_of(old, keys, None)
    fill(new, keys, estate, lost=["1a"], last_round=2, cause="it was lost")
    assert [current_run(new, "train") for _ in range(2)] == ["train.7", "train.7"]
    new.put(keys.round, dataclasses.replace(estate.head, state=State.ACTIVE).to_json())
    assert current_run(new, "train") == "train.8"


def test_a_store_that_follows_refuses_whoever_knows_the_fence_of_the_old_one(lost):
    agent = lost.agents["a"]
    fence = agent.snapshot.fence
    facts = {"tag": "t", "digest": "d", "samples": 8}
    assert agent.commit(fence, CommitRequest(request=1, step=21, **facts))
    lost.store.client().put(KEYS.heir("0"), "as if the revisions of both were the same")
    assert not agent.commit(fence, CommitRequest(request=1, step=22, **facts))


def test_without_a_publication_there_is_nothing_to_go_on_from():
    cluster = Cluster()
    assert estate_of(cluster.store.client(), KEYS, None) is None
    cluster.join("a")
    cluster.settle()
    assert estate_of(cluster.store.client(), KEYS, None) is None
    cluster.store.client().put(KEYS.latest, Published(step=1).to_json())
    assert estate_of(cluster.store.client(), KEYS, None).published.step == 1


def test_a_host_that_is_excluded_for_a_while_stays_so_for_a_while():
    clock = ManualClock()
    store = MemoryStore(clock).client()
    cluster = Cluster()
    cluster.join("a")
    cluster.settle()
    here = cluster.store.client()
    here.put(KEYS.latest, Published(step=1).to_json())
    here.put(KEYS.excluded("bad"), '{"host":"bad","why":"it fails","for_s":60}')
    here.put(KEYS.excluded("worse"), '{"host":"worse","why":"it burns","for_s":0}')
    fill(store, KEYS, estate_of(here, KEYS, None), lost=["0"], last_round=1, cause="")
    hosts = lambda: [item.key for item in store.range(KEYS.excluded("")).items]  # noqa: E731
    assert hosts() == [KEYS.excluded("bad"), KEYS.excluded("worse")]
    clock.advance(61)
    assert hosts() == [KEYS.excluded("worse")]


def test_of_many_who_create_the_file_at_once_one_has(tmp_path):
    heirs = [Heir(store=f"{n:x}", endpoint=f"h{n}:29400", node=f"n{n}") for n in range(16)]
    gate, won = threading.Barrier(len(heirs)), []

    def claim(heir):
        gate.wait()
        if signs.claim(str(tmp_path), "old", heir):
            won.append(heir)

    threads = [threading.Thread(target=claim, args=(heir,)) for heir in heirs]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert won == [signs.heir_of(str(tmp_path), "old")]
    assert [path.name for path in tmp_path.iterdir()] == [beside.heir_of("old")]


def test_a_claim_is_made_although_the_file_server_repeats_the_removal_of_its_draft(
    tmp_path, monkeypatch
):
    link = os.link

    def link_and_remove(source, target):
        link(source, target)
        source.unlink()

    monkeypatch.setattr(os, "link", link_and_remove)
    heir = Heir(store="b", endpoint="h1:1", node="n1")
    assert signs.claim(str(tmp_path), "a", heir)
    assert signs.heir_of(str(tmp_path), "a") == heir


def test_the_heir_of_an_heir_is_found_where_it_serves_now(tmp_path):
    root = str(tmp_path)
    assert signs.newest_heir(root, "a") is None
    assert signs.claim(root, "a", Heir(store="b", endpoint="h1:1", node="n1"))
    assert signs.claim(root, "b", Heir(store="c", endpoint="h2:1", node="n2"))
    assert signs.newest_heir(root, "a") == Heir(store="c", endpoint="h2:1", node="n2")
    signs.show_life(root, "c", ("h3:1", "h4:1"))
    assert signs.newest_heir(root, "a").endpoint == "h3:1,h4:1"
    (tmp_path / beside.sign_of("c")).write_bytes(b"\xff rubbish")
    assert signs.newest_heir(root, "a").endpoint == "h2:1"


def test_each_sign_of_life_is_another_one_and_a_full_disk_costs_nothing(tmp_path):
    root = str(tmp_path)
    assert signs.stamp(root, "a") is None
    seen = set()
    for _ in range(3):
        signs.show_life(root, "a", ("h1:1",))
        seen.add(signs.stamp(root, "a"))
    assert len(seen) == 3
    signs.show_life(f"{root}/gone", "a", ("h1:1",))


def test_the_newest_checkpoint_is_that_of_the_newest_round_that_has_its_manifest(tmp_path):
    assert signs.newest(str(tmp_path)) is None
    for name in ("step-000000030.g2.aaaa", "step-000000025.g3.bbbb", "step-000000040.g9.cccc"):
        (tmp_path / name).mkdir()
        if "g9" not in name:
            (tmp_path / name / beside.MANIFEST).touch()
    assert signs.newest(str(tmp_path)) == Checkpoint(round=3, step=25)


def test_a_node_without_a_member_knows_the_first_publication_and_each_charge_at_once(tmp_path):
    cluster = Cluster()
    for name in "ab":
        cluster.join(name)
    cluster.settle()
    seat = Seat(tmp_path, ("h0:29400",), Joining(), range(0))
    keeper = MemberKeeper(seat, cluster.store.client(), "b")
    known = lambda: keeper._estate  # noqa: E731
    try:
        keeper.serve(Cluster.job, "h1", "10.0.0.2", lambda text: None)
        agent = cluster.agents["a"]
        facts = {"step": 20, "tag": "t", "digest": "d", "samples": 640, "root": "/shared"}
        assert agent.commit(agent.snapshot.fence, CommitRequest(request=1, **facts))
        wait_for(lambda: seat.root == "/shared", REST_S / 3, "the node knows the checkpoint")
        cluster.agents["b"].report_failure(1, Failure(node="b", symptom=False, summary="broke"))
        cluster.settle()
        charge = KEYS.charged(1)
        wait_for(lambda: charge in {item.key for item in known().items}, REST_S / 3, "the charge")
    finally:
        keeper.close()


# ---- a node whose store is lost, and no other node to go to ----


@pytest.fixture
def alone(lost, tmp_path, monkeypatch):
    """A node that looks for a moment only."""
    for module, name in ((new_store, "WATCH_S"), (signs, "WATCH_S"), (signs, "HUNG_S")):
        monkeypatch.setattr(module, name, 0.1)
    monkeypatch.setattr(new_store, "HEIR_S", 0.0)
    (tmp_path / "seat").mkdir()
    seat = Seat(tmp_path / "seat", ("h0:29400",), Joining(), range(0), store="s0")
    seat.root = str(tmp_path)
    return Successor(
        seat=seat,
        access=Access(endpoints="h0:29400", timeout_s=1.0),
        keys=KEYS,
        estate=estate_of(lost.store.client(), KEYS, None),
        node="a",
        host="h0",
        address="10.0.0.1",
        say=lambda text: None,
    )


def test_a_file_server_that_hangs_is_waited_for_with_a_limit(alone, tmp_path):
    hangs = tmp_path / beside.heir_of("s0")
    os.mkfifo(hangs)
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match=f"{tmp_path} cannot be read on this node: no answ"):
        alone.go_on()
    assert not alone.seat.follow_heir()
    (tmp_path / "seat" / "store").write_text(f'["s0","{tmp_path}"]')
    assert not alone.seat.follow_heir(), "as if there were none: the old store may live"
    assert time.monotonic() - began_s < 5.0
    os.close(os.open(hangs, os.O_RDWR))


def test_sixteen_stores_that_are_lost_one_after_the_other_are_the_end(alone, tmp_path):
    for n in range(16):
        heir = Heir(store=f"s{n + 1}", endpoint="127.0.0.1:1", node=f"n{n}")
        assert signs.claim(str(tmp_path), f"s{n}", heir)
    with pytest.raises(StoreUnavailable, match="16 that followed one another are lost as well"):
        alone.go_on()


def test_where_no_place_of_checkpoints_is_known_none_is_said_to_be_unpublished(alone):
    alone.seat.store = alone.seat.root = ""
    with pytest.raises(StoreUnavailable, match="this node knows of no checkpoint that was publish"):
        alone.go_on()
