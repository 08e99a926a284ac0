"""An agent that starts before its etcd does: it says so and waits, within a limit."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, descendants
from tests.support.etcd_server import EtcdServer
from tests.support.waiting import wait_for
from zero_contract.exit_codes import AgentExit

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

Start = Callable[..., Cluster]


@pytest.fixture
def late(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server that nobody has started yet."""
    with contextlib.closing(EtcdServer(tmp_path)) as etcd:
        yield etcd


@pytest.fixture
def start(late: EtcdServer, tmp_path: Path) -> Iterator[Start]:
    """Starts an agent that waits for it, and returns when the agent has said so."""
    made: list[Cluster] = []

    def start(*flags: str) -> Cluster:
        flags = ("--nnodes=1:2", "--rdzv-conf=read_timeout=1", *flags)
        script = ("--no-python", "echo", "ran")
        made.append(Cluster(tmp_path, late.endpoint, flags=flags, script=script))
        made[-1].start("a")
        wait_for(lambda: "; trying again for " in made[-1].output, 150, "a word about it")
        return made[-1]

    yield start
    for job in made:
        job.close()


def test_the_job_runs_when_etcd_comes_later_than_the_agent(late, start):
    job = start()
    assert f"cannot reach etcd at {late.endpoint} (" in job.output
    late.start()
    job.wait_for_end()
    assert "ran\n" in job.output
    assert job.output.count("trying again for 30 s (--etcd-wait)") == 1


def test_an_etcd_that_does_not_come_is_named_once_more_and_ends_the_agent(late, start):
    job = start("--etcd-wait=0.5")
    assert job.agents["a"].wait() == AgentExit.NO_STORE
    first, last = job.output.splitlines()
    assert first.endswith("; trying again for 0.5 s (--etcd-wait)")
    assert last.endswith(
        "; is it running there? --rdzv-endpoint names it, and the job's ZERO_JOIN_TOKEN or "
        "--etcd-ca if it uses TLS"
    )
    assert f"cannot reach etcd at {late.endpoint} (" in last


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("silent", [False, True], ids=["absent", "silent"])
@pytest.mark.full
def test_a_signal_ends_the_wait_at_once(late, start, number, silent):
    if silent:
        late.start()
        late.suspend()
    job = start()
    job.agents["a"].process.send_signal(number)
    assert job.agents["a"].wait(150) == 128 + number
    word = f"{number.name}: etcd has not answered yet, this node has not joined"
    assert job.output.splitlines()[-1].endswith(word)
    assert "Traceback" not in job.output


@pytest.mark.full
def test_an_agent_outlives_the_loss_of_its_etcd_while_it_joins(late, tmp_path):
    """It has asked etcd something, and has not registered: its workers' parent is starting."""
    late.start()
    script = (
        "--no-python",
        "sh",
        "-c",
        f"echo ran; until [ -e {tmp_path}/enough ]; do sleep 0.05; done",
    )
    job = Cluster(tmp_path, late.endpoint, flags=("--nnodes=1:2",), script=script)
    with contextlib.closing(job):
        job.start("a")
        wait_for(lambda: "\nran\n" in job.output, 150, "a round")
        job.start("b")
        wait_for(lambda: descendants(job.agents["b"].process.pid), 150, "its parent of workers")
        late.kill()
        wait_for(lambda: "etcd cannot be reached" in job.agents["b"].output, 150, "a word about it")
        late.start()
        wait_for(lambda: "\nran\n" in job.agents["b"].output, 150, "its worker")
        (tmp_path / "enough").touch()
        job.wait_for_end()
