"""What a user of etcd must be allowed for its job to run, and no more."""

from __future__ import annotations

import base64
import contextlib
from pathlib import Path

import pytest

from tests.support.etcd_server import EtcdServer
from tests.support.waiting import wait_for
from zero_orchestrator.clock import SystemClock
from zero_orchestrator.errors import StoreRefused
from zero_orchestrator.events import events_prefix, progress_prefix
from zero_orchestrator.journal import Journal
from zero_orchestrator.membership.job_state import Failure, Node, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.store.etcd import Credentials, EtcdStore
from zero_orchestrator.store.etcd_watch import key_range

pytestmark = pytest.mark.etcd

SOON_S = 60.0


def allow(etcd: EtcdServer, role: str, prefix: str) -> None:
    """Let a role read and write all keys that start with a prefix."""
    key, end = (base64.b64encode(part).decode() for part in key_range(prefix))
    permission = {"permType": "READWRITE", "key": key, "range_end": end}
    etcd.call("auth/role/grant", name=role, perm=permission)


def test_a_role_that_may_use_one_jobs_keys_is_enough_for_its_agents_and_for_no_other_job(
    tmp_path: Path,
) -> None:
    with contextlib.closing(EtcdServer(tmp_path).start()) as etcd:
        etcd.call("auth/role/add", name="job-a")
        for prefix in Keys("a").prefix, events_prefix("a"), progress_prefix("a"):
            allow(etcd, "job-a", prefix)
        etcd.call("auth/role/add", name="root")
        for user, role in (("root", "root"), ("alice", "job-a")):
            etcd.call("auth/user/add", name=user, password="secret")
            etcd.call("auth/user/grant", user=user, role=role)
        etcd.call("auth/enable")
        who = Credentials(user="alice", password="secret")
        with contextlib.closing(EtcdStore(etcd.endpoint, credentials=who)) as store:
            agent = member_of("a", store)
            agent.register()
            wait_for(lambda: agent.poll().state is State.ACTIVE, SOON_S, "its round")
            assert agent.commit(agent.snapshot.fence, step=1, tag="t", digest="d", samples=8)
            agent.report_failure(1, Failure(node="n", symptom=False, summary="broke"))
            wait_for(lambda: agent.poll().state is State.FORMING, SOON_S, "its end")
            agent.close()
            assert store.range(Keys("a").nodes).items == ()
            with pytest.raises(StoreRefused, match="permission"):
                member_of("b", store).register()


def member_of(job: str, store: EtcdStore) -> Rendezvous:
    node = Node(id="n", incarnation="1", address="here", slots=1)
    spec = JobSpec(min_nodes=1, max_nodes=1, max_restarts=1)
    return Rendezvous(store, job, spec, node, clock=SystemClock(), journal=Journal("n"))
