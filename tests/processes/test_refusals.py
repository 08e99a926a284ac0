"""What cannot go well is said once, with the remedy: a full etcd, another job, a name taken."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import COLD, TOGETHER, Cluster
from tests.support.etcd_server import EtcdServer
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_agent.etcd.etcd_process import Member
from zero_agent.loop.store_writes import StoreWrites
from zero_contract.clock import SystemClock
from zero_contract.exit_codes import AgentExit
from zero_contract.journal import Journal
from zero_contract.worker import CommitRequest
from zero_orchestrator.errors import StoreRefused
from zero_orchestrator.membership.job_state import Node, State
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe import status
from zero_orchestrator.store.etcd.client import EtcdStore
from zero_orchestrator.store.kv import KeyValueStore

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

QUOTA_BYTES = 1 << 20
FILLER = "/filler/"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd that is soon full."""
    data = tmp_path / "etcd"
    data.mkdir()
    member = Member(
        data=data, client_port=free_port(), options=(f"--quota-backend-bytes={QUOTA_BYTES}",)
    )
    with contextlib.closing(EtcdServer(tmp_path, member)) as etcd:
        yield etcd.start()


def fill(store: KeyValueStore) -> None:
    """Write until there is no room left."""
    with pytest.raises(StoreRefused, match="database space exceeded"):
        write_for_ever(store)


def write_for_ever(store: KeyValueStore) -> None:
    for number in itertools.count():
        store.put(f"{FILLER}{number}", "x" * 50_000)


def make_room(etcd: EtcdServer, store: KeyValueStore) -> None:
    """What the message says: compact, defragment, disarm."""
    for item in store.range(FILLER).items:
        store.delete(item.key)
    etcd.call("kv/compaction", revision=store.range(FILLER).revision, physical=True)
    etcd.call("maintenance/defragment")
    member = etcd.call("maintenance/status")["header"]["member_id"]  # type: ignore[index]
    etcd.call("maintenance/alarm", action="DEACTIVATE", alarm="NOSPACE", memberID=member)


def cpu_s(pid: int) -> float:
    """What a process has used so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def job_on(etcd: EtcdServer, directory: Path, **facts: object) -> Iterator[Cluster]:
    # Without Python a worker is there at once: its imports are not what is tested here.
    waits = f"echo works; until [ -e {directory}/enough ]; do sleep 0.05; done"
    script = ("--no-python", "sh", "-c", waits)
    job = Cluster(directory, etcd.endpoint, script=script, **facts)
    try:
        yield job
    finally:
        job.close()


def test_an_agent_waits_for_room_in_a_full_etcd_and_says_how_to_make_it(small, tmp_path):
    with contextlib.closing(EtcdStore(small.endpoint)) as store:
        fill(store)
        with job_on(small, tmp_path, flags=("--nnodes=1",)) as job:
            job.start("a")
            remedy = "compact and defragment etcd, then disarm its alarm"
            wait_for(lambda: remedy in job.output, 60, "the agent says what to do")
            assert "works" not in job.output
            make_room(small, store)
            wait_for(lambda: "works" in job.output, 60, "the job begins")
            assert job.output.count("database space exceeded") == 1
            (tmp_path / "enough").touch()
            assert job.agents["a"].wait() == 0
            assert "Traceback" not in job.output


def shown_beside(etcd: EtcdServer, job: str) -> str:
    """What `zero-ctl status` says beside the status itself."""
    command = [sys.executable, "-m", "zero_orchestrator", "status", job]
    command.append(f"--rdzv-endpoint={etcd.endpoint}")
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


GRACE_S = 1.0


@pytest.mark.parametrize("lost", ["node", "worker"])
@pytest.mark.corners(lost=["node"])
def test_a_round_that_must_change_waits_until_a_full_etcd_has_room(small, tmp_path, lost):
    """For longer than --etcd-grace, which is about an etcd that does not answer."""
    flags = ("--nnodes=1:2", "--max-restarts=1", f"--etcd-grace={GRACE_S:g}", TOGETHER, COLD)
    with (
        contextlib.closing(EtcdStore(small.endpoint)) as store,
        job_on(small, tmp_path, flags=flags) as job,
    ):
        job.start("a", "b")
        wait_for(lambda: len(job.events("worker")) == 2, 150, "the workers")
        agent = job.agents["a"].process.pid
        fill(store)
        if lost == "node":
            job.agents.pop("b").kill_node()
        else:
            os.kill(job.worker_of("b"), 9)
        wait_for(lambda: job.events("store"), 150, "the refusal")
        refused, before_s = job.events("store")[0], cpu_s(agent)
        wait_for(lambda: time.time() - refused["time"] > 3 * GRACE_S, 60, "the grace is over")
        assert [one.process.poll() for one in job.agents.values()] == [None] * len(job.agents)
        assert cpu_s(agent) - before_s < 3 * GRACE_S / 2, "it has not been busy"
        assert len(job.events("activate")) == 1
        assert "is full; compact and defragment etcd" in shown_beside(small, job.job)
        make_room(small, store)
        wait_for(lambda: len(job.events("activate")) == 2, 150, "the next round")
        (tmp_path / "enough").touch()
        job.wait_for_end()
        ended = status.read(store, job.job)
        assert store.full_note() == ""
    assert (ended.state, ended.restarts) == ("DONE", 1)
    assert refused["text"].startswith("etcd is full (")
    assert "etcdctl alarm disarm" in refused["text"]
    told = [event["text"] for event in job.events("store") if event["node"] == refused["node"]]
    assert [text.partition(" (")[0].partition(",")[0] for text in told] == [
        "etcd is full",
        "etcd has room again",
    ]


def test_a_full_etcd_is_said_once_and_costs_commits_alone(small, tmp_path):
    events, clock = tmp_path / "events.jsonl", SystemClock()
    journal = Journal("a", events)
    with contextlib.closing(EtcdStore(small.endpoint)) as store:
        spec = JobSpec(min_nodes=1, max_nodes=1)
        node = Node(id="a", incarnation="1", address="a", slots=1)
        rdzv = Rendezvous(store, "job", spec, node, clock=clock, journal=journal)
        rdzv.register()
        wait_for(lambda: rdzv.poll().state is State.ACTIVE, 60, "the round")
        store_writes = StoreWrites(journal, clock, pytest.fail)
        replies: list[tuple[bool, str]] = []

        def save(step: int) -> bool:
            request = CommitRequest(request=step, step=step, tag="t", digest="d", samples=0)
            fence = rdzv.poll().fence
            store_writes.commit(1, fence, request, lambda *reply: replies.append(reply))
            store_writes.run(rdzv, fence)
            return replies[-1][0]

        assert save(1)
        fill(store)
        assert [save(2), save(3)] == [False, False]
        assert "database space exceeded" in replies[-1][1]
        assert rdzv.poll().state is State.ACTIVE, "it is read, and the lease is kept alive"
        make_room(small, store)
        assert save(4)
        rdzv.close()
    journal.close()  # the file is written behind
    told = [json.loads(line)["text"] for line in events.read_text().splitlines()]
    refused, mended = [text for text in told if text.startswith("etcd takes")]
    assert "compact and defragment etcd, then disarm its alarm" in refused
    assert mended == "etcd takes checkpoints again"


def test_two_agents_that_disagree_about_the_job_are_told_the_difference(etcd, tmp_path):
    with job_on(etcd, tmp_path, flags=("--nnodes=1:2",), job=f"differ-{tmp_path.name}") as job:
        job.start("a")
        wait_for(lambda: job.output.count("works"), 150, "the worker")
        job.flags = ("--nnodes=1:3", "--max-restarts=4")
        job.start("b")
        assert job.agents.pop("b").wait() == AgentExit.MISMATCH
        assert (
            f"job {job.job} runs with another specification: max_nodes is 2 there and 3 here; "
            "max_restarts is 0 there and 4 here. Start this agent with the same values"
        ) in job.output
        (tmp_path / "enough").touch()
        job.wait_for_end()


def test_of_two_agents_with_one_name_the_first_says_so_and_ends(etcd, tmp_path):
    flags = ("--nnodes=1:2", "--max-restarts=1")
    with job_on(etcd, tmp_path, flags=flags, job=f"twice-{tmp_path.name}") as job:
        job.start("a")
        wait_for(lambda: job.output.count("works"), 150, "the worker")
        first = job.agents["a"]
        job.start("a")
        assert first.wait() == 2
        assert "another agent has registered as node a; this one stops" in first.output
        assert "Give each agent its own --node-id" in first.output
        wait_for(lambda: job.output.count("works") == 2, 150, "the worker of the second")
        (tmp_path / "enough").touch()
        assert job.agents["a"].wait() == 0


def test_a_message_is_never_a_traceback(tmp_path):
    """An address that cannot be resolved, at the moment when etcd is first asked."""
    with job_on_nowhere(tmp_path) as job:
        job.start("a")
        assert job.agents["a"].wait() == 3
        assert "no.such.host.invalid" in job.output
        assert "Traceback" not in job.output


@contextlib.contextmanager
def job_on_nowhere(directory: Path) -> Iterator[Cluster]:
    script = directory / "never.py"
    script.touch()
    where = "no.such.host.invalid:2379"
    job = Cluster(directory, where, flags=("--nnodes=1:2", "--etcd-wait=0"), script=[str(script)])
    try:
        yield job
    finally:
        job.close()
