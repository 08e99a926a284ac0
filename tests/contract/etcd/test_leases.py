"""What becomes of a lease when etcd is in trouble."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path

import pytest

from tests.contract.etcd.client import ROOT, connect
from tests.support.etcd_server import EtcdServer, cluster
from tests.support.waiting import wait_for
from tests.support.watching import SOON_S
from zero_orchestrator.store.etcd.client import EtcdStore
from zero_orchestrator.store.lease import LeaseKeeper, LeaseState

pytestmark = pytest.mark.etcd


def is_over(told: list[str], end_s: float) -> bool:
    return bool(told) or time.monotonic() > end_s


def leads(member: EtcdServer) -> bool:
    status = member.call("maintenance/status")
    return bool(status["leader"] == status["header"]["member_id"])  # type: ignore[index]


def test_a_lease_outlives_a_restart_of_the_server_and_the_node_knows_of_the_silence(
    own: EtcdServer,
) -> None:
    told: list[str] = []
    with connect(own.endpoint) as store:
        keeper = LeaseKeeper(
            store,
            9,  # seconds, more than a busy machine keeps a thread waiting
            on_lost=lambda reason: told.append("lost"),
            on_silent=lambda reason: told.append("silent"),
            on_heard=lambda reason: told.append("heard"),
        )
        store.put(f"{ROOT}node", "here", lease=keeper.lease)
        own.kill()
        wait_for(lambda: keeper.state is LeaseState.SILENT, SOON_S, "the keeper is silent")
        own.start()
        wait_for(lambda: keeper.state is LeaseState.HELD, SOON_S, "the lease is held again")
        assert told == ["silent", "heard"]
        assert store.get(f"{ROOT}node") is not None
        keeper.close()
        assert store.get(f"{ROOT}node") is None
        assert told == ["silent", "heard"]


def test_the_loss_of_a_lease_is_told_once_with_the_reason(own: EtcdServer) -> None:
    reasons: list[str] = []
    with connect(own.endpoint) as store:
        keeper = LeaseKeeper(store, 3, on_lost=reasons.append)
        store.revoke(keeper.lease)
        wait_for(lambda: reasons, SOON_S, "the loss")
        assert reasons == [f"lease {keeper.lease:x} has ended"]
        assert keeper.state is LeaseState.LOST
        keeper.close()


@pytest.mark.full
def test_a_stopped_member_does_not_cost_the_lease(tmp_path: Path, binary: Path) -> None:
    """It is refreshed at another one within the same call, patient as the store is."""
    told: list[str] = []
    with cluster(tmp_path, binary=binary) as members:
        # Only the end of a leader would prolong the leases.
        two = [member for member in members if not leads(member)]
        endpoints = ",".join(member.endpoint for member in two)
        with contextlib.closing(EtcdStore(endpoints, timeout_s=10.0)) as store:
            keeper = LeaseKeeper(store, 3, on_lost=told.append, on_silent=told.append)
            for member in two:  # one of them is where keep-alives are sent
                with member.suspended():
                    end_s = time.monotonic() + 2 * 3
                    wait_for(partial(is_over, told, end_s), SOON_S, "two leases")
            assert (keeper.state, told) == (LeaseState.HELD, [])
            assert keeper.unconfirmed_s < 3
            keeper.close()
