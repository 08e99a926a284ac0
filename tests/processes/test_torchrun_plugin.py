"""Stock torchrun with `--rdzv-backend=zero-etcd`: a rendezvous in etcd v3."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from tests.support.cluster import ROOT, descendants, environment, kill_all, whole_lines
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_comm.worker.agent_link import AgentLink
from zero_contract.errors import CommitRefused
from zero_contract.exit_codes import AgentExit
from zero_contract.worker import ENV_JOB, ENV_ROUND
from zero_orchestrator.membership.job_state import Published
from zero_orchestrator.membership.keys import Keys
from zero_torchrun.etcd_handler import BACKEND, create

LEAVING = ROOT / "tests" / "support" / "leaving_job.py"

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

# Steps until a file appears; every step needs every rank. A lost peer is an error, as with gloo.
TRAIN = """
import os, pathlib, sys, time, torch, torch.distributed as dist
out = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if out.joinpath("fail").exists() and os.environ["TORCHELASTIC_MAX_RESTARTS"] == "0":
    raise SystemExit(5)
goes_on = torch.ones(())
while goes_on.item():
    goes_on.fill_(float(rank == 0 and not out.joinpath("stop").exists()))
    dist.all_reduce(goes_on)
    out.joinpath(f"at-{world}-{rank}").touch()
    time.sleep(0.01)
print("rank", rank, "of", world)
dist.destroy_process_group()
"""


@pytest.fixture
def torchrun(tmp_path: Path, etcd, request: pytest.FixtureRequest):
    """Starts nodes of one job; none outlives the test."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    job = f"{request.node.originalname[:60].replace('_', '-')}-{os.getpid()}-{tmp_path.name[-3:]}"
    started: list[subprocess.Popen[str]] = []

    def start(
        *flags: str,
        nnodes: str = "1:2",
        endpoint: str = etcd.endpoint,
        training: tuple[str, ...] = (str(script), str(tmp_path)),
    ) -> subprocess.Popen[str]:
        where = (f"--rdzv-endpoint={endpoint}", f"--rdzv-id={job}")
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}", *flags]
        command += ["--rdzv-backend=zero-etcd", *where, *training]
        log = tmp_path / f"{len(started)}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                env={**environment(), "PYTHONPATH": str(ROOT)},
                cwd=tmp_path,
            )
        started.append(process)
        return process

    start.job = job
    yield start
    for process in started:
        kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """kill -9 the agent and its workers at once, as if power were lost."""
    kill_all([process.pid, *descendants(process.pid)])
    process.wait()


def reached(directory: Path, world: int) -> bool:
    return all((directory / f"at-{world}-{rank}").exists() for rank in range(world))


def output(directory: Path) -> str:
    return "".join(path.read_text() for path in sorted(directory.glob("*.log")))


def ranks(directory: Path) -> list[str]:
    return sorted(re.findall(r"^rank \d+ of \d+$", output(directory), re.MULTILINE))


@pytest.mark.full
def test_the_job_goes_on_without_a_killed_node_and_with_a_new_one_and_then_is_over(
    torchrun, tmp_path
):
    first, second = (torchrun("--max-restarts=3") for _ in range(2))
    wait_for(lambda: reached(tmp_path, 2), 150, "two nodes at work")
    kill(first)  # whichever hosted the store of the round
    wait_for(lambda: reached(tmp_path, 1), 150, "the job to go on with one node")
    for mark in tmp_path.glob("at-*"):
        mark.unlink()
    third = torchrun("--max-restarts=3")
    wait_for(lambda: reached(tmp_path, 2), 150, "the new node to join")
    (tmp_path / "stop").touch()
    assert [process.wait(150) for process in (second, third)] == [0, 0], output(tmp_path)
    assert ranks(tmp_path) == ["rank 0 of 2", "rank 1 of 2"]

    assert torchrun().wait(150) != 0  # the job stays over
    assert "is over; choose another --rdzv-id for a new one" in output(tmp_path)


@pytest.mark.full
def test_when_one_torchrun_gives_up_the_others_do_not_wait_for_it(torchrun, tmp_path):
    (tmp_path / "fail").touch()
    gives_up = torchrun(nnodes="2")
    goes_on = torchrun("--max-restarts=9", nnodes="2")
    codes = [process.wait(150) for process in (gives_up, goes_on)]
    assert 0 not in codes, output(tmp_path)


def test_an_etcd_that_is_not_there_is_named_at_once(torchrun, tmp_path):
    endpoint = f"127.0.0.1:{free_port()}"
    torchrun(endpoint=endpoint)
    said = f"cannot reach etcd at {endpoint}"
    wait_for(lambda: said in output(tmp_path), 150, "a line that names it")


WRONG = {
    "a setting": (("--rdzv-conf=join_timeout=soon",), {}, "join_timeout=soon: give a number"),
    "an endpoint": ((), {"endpoint": "http://etcd:2379"}, "write HOST:PORT, without the scheme"),
    "too few nodes": (("--rdzv-conf=join_timeout=1",), {"nnodes": "2"}, "start more agents, or"),
}


@pytest.mark.full
@pytest.mark.parametrize(("flags", "named", "said"), WRONG.values(), ids=WRONG)
def test_an_error_of_the_rendezvous_is_one_line_and_no_traceback_of_torchrun(
    torchrun, tmp_path, flags, named, said
):
    assert torchrun(*flags, **named).wait(150) == 1
    assert "Traceback" not in output(tmp_path)
    assert said in output(tmp_path).splitlines()[-1]


# ---- trainings of this project: they leave at a step boundary ----


class Training:
    """Nodes of one job that train, of which torchrun may restart none for a failure."""

    def __init__(self, torchrun, directory: Path, endpoint: str, kind: str) -> None:
        self._torchrun, self._directory, self._endpoint = torchrun, directory, endpoint
        self._script = (str(LEAVING), kind, str(directory))

    def start(self) -> subprocess.Popen[str]:
        return self._torchrun("--max-restarts=0", training=self._script)

    def steps(self, rank: int = 0) -> list[int]:
        file = self._directory / f"steps-{rank}"
        return [int(line) for line in whole_lines(file)] if file.exists() else []

    def goes_on(self, rank: int = 0) -> None:
        before = len(self.steps(rank))
        wait_for(lambda: len(self.steps(rank)) >= before + 5, 150, f"steps of rank {rank}")

    def ctl(self, *arguments: str) -> str:
        endpoint = f"--rdzv-endpoint={self._endpoint}"
        command = [sys.executable, "-m", "zero_orchestrator", arguments[0], endpoint]
        done = subprocess.run(
            [*command, *arguments[1:], self._torchrun.job],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def status(self) -> dict[str, Any]:
        return json.loads(self.ctl("status", "--json"))


@pytest.fixture(params=["protect", "engine"])
def training(torchrun, tmp_path, etcd, request) -> Training:
    return Training(torchrun, tmp_path, etcd.endpoint, request.param)


@pytest.mark.full
def test_nodes_join_and_drain_at_a_step_boundary_and_the_job_is_stopped(training, tmp_path):
    first = training.start()
    training.goes_on()
    second = training.start()
    training.goes_on(rank=1)
    status = training.status()
    members = [one["node"] for one in status["members"]]
    assert (status["state"], len(members)) == ("ACTIVE", 2)
    wait_for(lambda: training.status()["members"][0]["step"], 30, "a step in the status")
    leaver = next(node for node in members if node != status["members"][0]["node"])
    training.ctl("drain", leaver)
    assert second.wait(60) == AgentExit.DRAINED, output(tmp_path)
    training.goes_on()
    training.ctl("stop")
    assert first.wait(60) == AgentExit.STOPPED, output(tmp_path)
    steps = training.steps()
    assert steps == list(range(1, len(steps) + 1)), "a step was done twice"
    told = training.ctl("events")
    for event in ("joins", "zero-ctl drain", "left at step", "halt"):
        assert event in told, told
    assert training.status()["restarts"] == 0


@pytest.mark.full
def test_a_torchrun_that_gets_sigterm_drains_its_node_and_no_other_is_charged(training, tmp_path):
    first = training.start()
    training.goes_on()
    second = training.start()
    training.goes_on(rank=1)
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 1, output(tmp_path)  # as ever
    training.goes_on()
    steps = training.steps()
    assert steps == list(range(1, len(steps) + 1)), "a step was done twice"
    assert training.status()["restarts"] == 0
    assert first.poll() is None


@pytest.mark.full
def test_a_node_that_is_killed_costs_torchrun_no_restart(training, tmp_path):
    first = training.start()
    training.goes_on()
    second = training.start()
    training.goes_on(rank=1)
    kill(second)
    training.goes_on()
    assert first.poll() is None, output(tmp_path)


def test_a_worker_publishes_only_while_its_round_is_current(etcd, etcd_store, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the plug-in sets variables
    handler = create(
        RendezvousParameters(
            backend=BACKEND,
            endpoint=etcd.endpoint,
            run_id="fenced",
            min_nodes=1,
            max_nodes=1,
            local_addr="127.0.0.1",
        )
    )
    try:
        handler.next_rendezvous()
        assert (os.environ[ENV_JOB], os.environ[ENV_ROUND]) == ("fenced", "1")
        link = AgentLink(0)
        current = link.fence(4, "step-4", 8, root="/shared")
        assert current is not None
        current("digest")
        assert not link.request_peer_memory(None).directory
        key = Keys("fenced").round
        held = etcd_store.get(key)
        etcd_store.put(key, held.value)  # as of a transition that this node has not seen
        stale = link.fence(5, "step-5", 10)
        assert stale is not None
        with pytest.raises(CommitRefused, match=r"step-5 .*: round 1 is over") as refused:
            stale("digest")
        assert not refused.value.passing
        link.close()
    finally:
        handler.shutdown()
    published = Published.from_json(etcd_store.get(Keys("fenced").latest).value)
    assert (published.step, published.root) == (4, "/shared")
