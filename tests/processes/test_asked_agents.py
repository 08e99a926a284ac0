"""`zero-ctl stack` and `logs`: what the agents of a running job answer, from all nodes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.support.cluster import COLD, environment, light_imports
from tests.support.waiting import wait_for
from zero_orchestrator.ctl.cli import main
from zero_orchestrator.observe import status

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

SCRIPT = """\
import os, subprocess, time

def read_a_shard():
    subprocess.run(["sleep", "600"])

def wait_for_the_others():
    time.sleep(600)

if os.environ["RANK"] == "2":
    read_a_shard()
wait_for_the_others()
"""


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def ctl(etcd, capsys, caplog, monkeypatch):
    """Runs `zero-ctl` with this test's etcd, in this process."""
    caplog.set_level(logging.CRITICAL, "zero_orchestrator")  # as `main` sets it, for this test
    monkeypatch.setenv("PET_RDZV_ENDPOINT", etcd.endpoint)

    def run(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_the_rank_that_all_others_wait_for_is_named_with_its_line(
    cluster, ctl, etcd_store, tmp_path
):
    script = tmp_path / "waits.py"
    script.write_text(SCRIPT)
    job = cluster(flags=("--nnodes=2", "--nproc-per-node=2"), script=[str(script)])
    job.start("a", "b", PYTHONPATH=light_imports(tmp_path)["PYTHONPATH"])

    def all_wait() -> bool:
        done = ctl("stack", job.job)
        return done.returncode == 0 and "read_a_shard" in done.stdout

    wait_for(lambda: len(job.events("worker")) == 4, 120, "the workers")
    wait_for(all_wait, 120, "the stacks of all workers")
    members = status.read(etcd_store, job.job).members
    first, second = (f"{row.node} (host " for row in members)
    done = ctl("stack", job.job)
    head, *lines = done.stdout.splitlines()
    assert head == (
        f"job {job.job}, round 1: the stacks of 4 of 4 workers, 2 different; most recent call first"
    )
    odd = lines.index(next(line for line in lines if line.startswith("1 worker: ")))
    rest = lines.index(next(line for line in lines if line.startswith("3 workers: ")))
    assert odd < rest, "the odd one out comes first"
    assert lines[odd].startswith(f"1 worker: rank 2 on node {second}")
    assert f"    read_a_shard ({script}:4)" in lines[odd:rest]
    assert lines[rest].startswith(f"3 workers: rank 0-1 on node {first}")
    assert lines[rest + 1 :] == [
        f"    wait_for_the_others ({script}:7)",
        f"    <module> ({script}:11)",
    ]

    (one,) = ctl("stack", job.job, "--rank=3", "--json").stdout.splitlines()
    record = json.loads(one)
    assert (record["rank"], record["node"], record["problem"]) == (3, members[1].node, "")
    assert record["threads"][0]["frames"][0] == {
        "function": "wait_for_the_others",
        "file": str(script),
        "line": 7,
    }
    none = ctl("stack", job.job, "--rank=4")
    assert (none.returncode, none.stderr) == (
        2,
        f"zero-ctl: no live node of job {job.job} has rank 4: the world size is 4\n",
    )
    assert job.events("exit") == [], "no process was disturbed"


PRINTS = """\
import os, signal, sys, time
rank, mark = os.environ["RANK"], sys.argv[1] + os.environ["RANK"]
if os.path.exists(mark):
    print("resumed", flush=True)
    while not os.path.exists(sys.argv[1] + "end"):
        time.sleep(0.01)
    print(f"the last word of {rank}", end="")
    sys.exit()
if rank == "1":
    for number in range(3000):
        print(f"line {number:04d}")
    while not os.path.exists(sys.argv[1] + "0"):
        time.sleep(0.01)
    open(mark, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
print("waiting", file=sys.stderr, flush=True)
open(mark, "w").close()
time.sleep(600)
"""


def test_all_that_a_killed_worker_printed_is_shown_and_following_ends_with_the_job(
    cluster, ctl, etcd, tmp_path
):
    script = tmp_path / "prints.py"
    script.write_text(PRINTS)
    flags = ("--nnodes=2", "--max-restarts=1", COLD)
    job = cluster(flags=flags, script=[str(script), f"{tmp_path}/mark"])
    job.start("a", "b")

    def records() -> list[dict]:
        done = ctl("logs", job.job, "--json", "--lines=5000")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def resumed() -> list[dict]:
        found = records()
        return found if sum(one["text"] == "resumed" for one in found) == 2 else []

    wait_for(lambda: len(job.events("worker")) == 4, 120, "the workers of the second round")
    found = wait_for(resumed, 120, "the second round")
    of_killed = [one for one in found if (one["rank"], one["round"]) == (1, 1)]
    assert [one["text"] for one in of_killed] == [f"line {number:04d}" for number in range(3000)]
    assert {one["stream"] for one in found if one["text"] == "waiting"} == {"stderr"}
    assert {one["node"] for one in found} == {"a", "b"}

    (only,) = ctl("logs", job.job, "--rank=0", "--lines=1").stdout.splitlines()
    assert only == "[rank0]: resumed"
    env = {**environment(), "PET_RDZV_ENDPOINT": etcd.endpoint}
    command = [sys.executable, "-m", "zero_orchestrator", "logs", job.job, "-f", "-n", "1"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as follower:
        assert {follower.stdout.readline() for _ in range(2)} == {
            "[rank0]: resumed\n",
            "[rank1]: resumed\n",
        }
        (tmp_path / "markend").touch()
        job.wait_for_end()
        assert sorted(follower.stdout.read().splitlines()) == [
            "[rank0]: the last word of 0",
            "[rank1]: the last word of 1",
        ]
    assert follower.returncode == 0
    after = ctl("logs", job.job, "-n", "1")
    assert sorted(after.stdout.splitlines())[-1] == "[rank1]: the last word of 1", "an hour long"
