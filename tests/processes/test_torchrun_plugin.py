"""Stock torchrun with `--rdzv-backend=zero-etcd`: a rendezvous in etcd v3."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import descendants, environment, kill_all
from tests.support.ports import free_port
from tests.support.waiting import wait_for

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
        *flags: str, nnodes: str = "1:2", endpoint: str = etcd.endpoint
    ) -> subprocess.Popen[str]:
        where = (f"--rdzv-endpoint={endpoint}", f"--rdzv-id={job}")
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}", *flags]
        command += ["--rdzv-backend=zero-etcd", *where, str(script), str(tmp_path)]
        log = tmp_path / f"{len(started)}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment(), cwd=tmp_path
            )
        started.append(process)
        return process

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
