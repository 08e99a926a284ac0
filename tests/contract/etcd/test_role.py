"""What a user of etcd must be allowed for its job to run, and no more."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.etcd_server import EtcdServer
from tests.support.flags import parse
from tests.support.waiting import wait_for
from zero_agent.command.preflight import preflight
from zero_agent.etcd.etcd_access import Access
from zero_agent.etcd.rdzv_conf import parse_rdzv_conf
from zero_contract.clock import SystemClock
from zero_contract.journal import Journal
from zero_contract.worker import CommitRequest, Progress
from zero_orchestrator.ctl.cli import main
from zero_orchestrator.errors import StoreRefused
from zero_orchestrator.membership.job_state import Failure, Node, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe.events import Publisher, seen_key
from zero_orchestrator.store.etcd.client import Credentials, EtcdStore

pytestmark = pytest.mark.etcd

SOON_S = 60.0


SECURITY = (Path(__file__).resolve().parents[3] / "SECURITY.md").read_text()
TEAM = "vision-"
"""How the names of the jobs of a team begin: Kubernetes adds to it what nobody knows before."""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Where SECURITY.md's commands have been typed for the jobs of a team."""
    etcdctl = shutil.which("etcdctl", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if etcdctl is None:
        pytest.skip("needs the etcdctl command")
    written = re.search(r"<!-- roles -->\n```bash\n(.*?)```\n<!-- /roles -->", SECURITY, re.DOTALL)
    assert written is not None
    directory = tmp_path_factory.mktemp("etcd")
    with contextlib.closing(EtcdServer(directory).start()) as etcd:
        for name in ("alice", "bob"):
            (directory / f"{name}.password").write_text("secret")
        path = f"{Path(etcdctl).parent}:{os.environ['PATH']}"
        subprocess.run(
            ["bash", "-e", "-c", written[1].replace("whose=gpt/", f"whose={TEAM}", 1)],
            cwd=directory,
            env={**os.environ, "PATH": path, "ETCDCTL_ENDPOINTS": etcd.endpoint},
            check=True,
            capture_output=True,
            timeout=120,
        )
        etcd.call("auth/role/add", name="root")
        etcd.call("auth/user/add", name="root", password="secret")
        etcd.call("auth/user/grant", user="root", role="root")
        etcd.call("auth/enable")
        yield etcd


def store_of(etcd: EtcdServer, user: str) -> contextlib.closing[EtcdStore]:
    who = Credentials(user=user, password="secret")
    return contextlib.closing(EtcdStore(etcd.endpoint, credentials=who))


def reach(etcd: EtcdServer, user: str, directory: Path) -> list[str]:
    """The flags with which a user finds etcd."""
    (directory / "password").write_text("secret\n")
    login = [f"--etcd-user={user}", f"--etcd-password-file={directory / 'password'}"]
    return [f"--rdzv-endpoint={etcd.endpoint}", *login]


@contextlib.contextmanager
def first_line(words: list[str]) -> Iterator[dict[str, Any]]:
    """What a command of zero-ctl that does not end says first, while it runs."""
    command = [sys.executable, "-m", "zero_orchestrator", *words, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


def test_a_reader_sees_all_of_a_job_but_its_secret_and_changes_nothing(
    etcd: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, job = reach(etcd, "bob", tmp_path), f"{TEAM}read"
    with store_of(etcd, "alice") as theirs, store_of(etcd, "bob") as store:
        agent = member_of(job, theirs)
        agent.register()
        wait_for(lambda: agent.poll().state is State.ACTIVE, SOON_S, "its round")
        page = str(tmp_path / "page.html")
        for words in (
            ("status", job),
            ("events", job),
            ("report", job, f"--output={page}"),
            ("metrics", job),
        ):
            with pytest.raises(SystemExit) as ended:
                main([*words, *flags])
            assert ended.value.code == 0, (words, capsys.readouterr())
        with first_line(["status", job, "--watch", *flags]) as line:
            shown = json.dumps(line)
        with (
            first_line(["dashboard", job, "--port=0", *flags]) as line,
            urllib.request.urlopen(line["url"], timeout=60) as answer,
        ):
            shown += answer.read().decode()
        assert job in shown
        told = shown + capsys.readouterr().out + Path(page).read_text()
        assert agent.secret
        assert agent.secret not in told
        for refused in (
            lambda: store.get(Keys(job).secret),
            lambda: store.range("/zero/secret/"),
            lambda: store.range("/zero/"),
            lambda: store.put(Keys(job).stop, "{}"),
        ):
            with pytest.raises(StoreRefused, match="permission"):
                refused()
        agent.close()


@pytest.mark.full
def test_an_agent_runs_a_job_of_its_role(etcd: EtcdServer, tmp_path: Path) -> None:
    flags = [*reach(etcd, "alice", tmp_path), f"--rdzv-id={TEAM}77aa"]
    command = [sys.executable, "-m", "zero_agent", *flags, "--no-python", "echo", "ran"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert "permission" not in done.stderr


def test_a_role_that_may_use_one_jobs_keys_is_enough_for_its_agents_and_for_no_other_job(
    etcd: EtcdServer,
) -> None:
    with store_of(etcd, "alice") as store:
        agent = member_of(f"{TEAM}a", store)
        agent.register()
        wait_for(lambda: agent.poll().state is State.ACTIVE, SOON_S, "its round")
        facts = {"tag": "t", "digest": "d", "samples": 8}
        assert agent.commit(agent.snapshot.fence, CommitRequest(request=1, step=1, **facts))
        assert agent.commit(
            agent.snapshot.fence, CommitRequest(request=1, step=2, in_memory=True, **facts)
        )
        agent.report_failure(1, Failure(node="n", symptom=False, summary="broke"))
        wait_for(lambda: agent.poll().state is State.FORMING, SOON_S, "its end")
        agent.close()
        assert store.range(Keys(f"{TEAM}a").nodes).items == ()
        with pytest.raises(StoreRefused, match="permission"):
            member_of("b", store).register()
        with pytest.raises(StoreRefused, match="permission"):
            store.get(Keys("b").secret)
        with pytest.raises(StoreRefused, match="permission"):
            store.range("/zero/")


def test_the_same_role_is_enough_to_look_at_the_job_to_change_it_and_for_a_preflight(
    etcd: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, job = reach(etcd, "alice", tmp_path), f"{TEAM}looked-at"

    def said(*words: str) -> tuple[int | str | None, str]:
        with pytest.raises(SystemExit) as ended:
            main([*words, *flags])
        told = capsys.readouterr()
        return ended.value.code, told.out + told.err

    with store_of(etcd, "alice") as store:
        agent, pen = member_of(job, store), Publisher(store, job, "n", "1", SystemClock())
        agent.register()
        wait_for(lambda: agent.poll().state is State.ACTIVE, SOON_S, "its round")
        assert agent.commit(
            agent.snapshot.fence,
            CommitRequest(request=1, step=2, in_memory=True, tag="kept", digest="d", samples=8),
        )
        pen.event('{"event": "start", "text": "it has begun", "time": 1}')
        pen.progress(Progress(step=3), lease=agent.lease, nodes=1)
        pen.alive(nodes=1)
        wait_for(lambda: store.get(seen_key(job)), SOON_S, "a sign of life")
        pen.close()
        code, told = said("status", job)
        assert (code, "ACTIVE" in told, "(kept)" in told) == (0, True, True)
        code, told = said("events", job)
        assert (code, "it has begun" in told) == (0, True)
        for words in (("exclude", "n", job), ("include", "n", job)):
            assert said(*words)[0] == 2, "the only node is needed, and not excluded"
        assert said("drain", "n", job)[0] == 0
        assert said("stop", job)[0] == 0
        wait_for(lambda: agent.poll().stop is not None, SOON_S, "the wish")
        agent.close()
    code, told = said("status")
    assert (code, "name a job whose keys this user may read" in told) == (3, True)
    code, told = said("status", "b")
    assert (code, "permission denied" in told) == (3, True)
    asked = parse([*flags, f"--rdzv-id={job}", "--preflight"], {})
    with contextlib.suppress(SystemExit):
        preflight(asked, parse_rdzv_conf(""))
    (line,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("etcd")]
    assert line.split()[:2] == ["etcd", "ok"]
    offset_s = Access(endpoints=etcd.endpoint).clock_offset_s()
    assert offset_s is not None, "etcd tells the time, without a login"
    assert abs(offset_s) < 60


def member_of(job: str, store: EtcdStore) -> Rendezvous:
    node = Node(id="n", incarnation=secrets.token_hex(4), address="here", slots=1)
    spec = JobSpec(min_nodes=1, max_nodes=1, max_restarts=1)
    return Rendezvous(store, job, spec, node, clock=SystemClock(), journal=Journal("n"))
