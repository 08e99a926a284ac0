"""What a user of etcd must be allowed for its job to run, and no more."""

from __future__ import annotations

import base64
import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.etcd_server import EtcdServer
from tests.support.waiting import wait_for
from zero_agent.command import command_line
from zero_agent.command.preflight import preflight
from zero_agent.etcd import etcd_clock
from zero_agent.etcd.etcd_access import Access
from zero_agent.etcd.rdzv_conf import parse_rdzv_conf
from zero_contract.clock import SystemClock
from zero_contract.journal import Journal
from zero_contract.worker import Progress
from zero_orchestrator.ctl.cli import main
from zero_orchestrator.ctl.events import Publisher, seen_key
from zero_orchestrator.errors import StoreRefused
from zero_orchestrator.membership.job_state import Failure, Node, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.store.etcd.client import Credentials, EtcdStore
from zero_orchestrator.store.etcd.watch import key_range

pytestmark = pytest.mark.etcd

SOON_S = 60.0


def allow(etcd: EtcdServer, role: str, prefix: str) -> None:
    """Let a role read and write all keys that start with a prefix."""
    key, end = (base64.b64encode(part).decode() for part in key_range(prefix))
    permission = {"permType": "READWRITE", "key": key, "range_end": end}
    etcd.call("auth/role/grant", name=role, perm=permission)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Where `alice` may use what README names for the job `a`, and nothing else."""
    with contextlib.closing(EtcdServer(tmp_path_factory.mktemp("etcd")).start()) as etcd:
        etcd.call("auth/role/add", name="job-a")
        for prefix in "/zero/v1/a/", "/zero/events/a/", "/zero/progress/a/":
            allow(etcd, "job-a", prefix)
        etcd.call("auth/role/add", name="root")
        for user, role in (("root", "root"), ("alice", "job-a")):
            etcd.call("auth/user/add", name=user, password="secret")
            etcd.call("auth/user/grant", user=user, role=role)
        etcd.call("auth/enable")
        yield etcd


def test_a_role_that_may_use_one_jobs_keys_is_enough_for_its_agents_and_for_no_other_job(
    etcd: EtcdServer,
) -> None:
    who = Credentials(user="alice", password="secret")
    with contextlib.closing(EtcdStore(etcd.endpoint, credentials=who)) as store:
        agent = member_of("a", store)
        agent.register()
        wait_for(lambda: agent.poll().state is State.ACTIVE, SOON_S, "its round")
        facts = {"tag": "t", "digest": "d", "samples": 8}
        assert agent.commit(agent.snapshot.fence, step=1, **facts)
        assert agent.commit(agent.snapshot.fence, step=2, in_memory=True, **facts)
        agent.report_failure(1, Failure(node="n", symptom=False, summary="broke"))
        wait_for(lambda: agent.poll().state is State.FORMING, SOON_S, "its end")
        agent.close()
        assert store.range(Keys("a").nodes).items == ()
        with pytest.raises(StoreRefused, match="permission"):
            member_of("b", store).register()
        with pytest.raises(StoreRefused, match="permission"):
            store.get(Keys("b").secret)
        with pytest.raises(StoreRefused, match="permission"):
            store.range("/zero/")


def test_the_same_role_is_enough_to_look_at_the_job_to_change_it_and_for_a_preflight(
    etcd: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    reach = [f"--rdzv-endpoint={etcd.endpoint}", "--etcd-user=alice"]
    reach.append(f"--etcd-password-file={password}")

    def said(*words: str) -> tuple[int | str | None, str]:
        with pytest.raises(SystemExit) as ended:
            main([*words, *reach])
        told = capsys.readouterr()
        return ended.value.code, told.out + told.err

    who = Credentials(user="alice", password="secret")
    with contextlib.closing(EtcdStore(etcd.endpoint, credentials=who)) as store:
        agent, pen = member_of("a", store), Publisher(store, "a", "n", "1", SystemClock())
        agent.register()
        wait_for(lambda: agent.poll().state is State.ACTIVE, SOON_S, "its round")
        assert agent.commit(
            agent.snapshot.fence, step=2, in_memory=True, tag="kept", digest="d", samples=8
        )
        pen.event('{"event": "start", "text": "it has begun", "time": 1}')
        pen.progress(Progress(step=3), lease=agent.lease, nodes=1)
        pen.alive(nodes=1)
        wait_for(lambda: store.get(seen_key("a")), SOON_S, "a sign of life")
        pen.close()
        code, told = said("status", "a")
        assert (code, "ACTIVE" in told, "(kept)" in told) == (0, True, True)
        code, told = said("events", "a")
        assert (code, "it has begun" in told) == (0, True)
        for words in (("exclude", "n", "a"), ("include", "n", "a")):
            assert said(*words)[0] == 2, "the only node is needed, and not excluded"
        assert said("drain", "n", "a")[0] == 0
        assert said("stop", "a")[0] == 0
        wait_for(lambda: agent.poll().stop is not None, SOON_S, "the wish")
        agent.close()
    code, told = said("status")
    assert (code, "name a job whose keys this user may read" in told) == (3, True)
    code, told = said("status", "b")
    assert (code, "permission denied" in told) == (3, True)
    flags = command_line.parse([*reach, "--rdzv-id=a", "--preflight"], {})
    with contextlib.suppress(SystemExit):
        preflight(flags, parse_rdzv_conf(""))
    (line,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("etcd")]
    assert line.split()[:2] == ["etcd", "ok"]
    offset_s = etcd_clock.offset_s(Access(endpoints=etcd.endpoint))
    assert offset_s is not None, "etcd tells the time, without a login"
    assert abs(offset_s) < 60


def member_of(job: str, store: EtcdStore) -> Rendezvous:
    node = Node(id="n", incarnation=secrets.token_hex(4), address="here", slots=1)
    spec = JobSpec(min_nodes=1, max_nodes=1, max_restarts=1)
    return Rendezvous(store, job, spec, node, clock=SystemClock(), journal=Journal("n"))
