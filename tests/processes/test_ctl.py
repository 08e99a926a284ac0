"""`zero-ctl` beside jobs that run: what it shows, and what becomes of what it asks for."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

import pytest

from tests.support.cluster import COLD, LONG_S, TOGETHER, environment
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.observe import events, status
from zero_orchestrator.observe.status import Condition

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

SLEEP = "import time\nprint('sleeping', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def ctl(etcd):
    """Runs `zero-ctl` with this test's etcd."""

    def run(*arguments: str, endpoint: str = etcd.endpoint) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "zero_orchestrator", *arguments],
            env={**environment(), "PET_RDZV_ENDPOINT": endpoint},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@contextlib.contextmanager
def beside(job, *arguments: str):
    """`zero-ctl` running beside a job, and the file with its output."""
    out = job.directory / "ctl.out"
    env = {**environment(), "PET_RDZV_ENDPOINT": job.endpoint}
    command = [sys.executable, "-m", "zero_orchestrator", *arguments]
    with out.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    try:
        yield process, out
    finally:
        process.kill()
        process.wait()


def story(store, job: str) -> list[str]:
    return [event.record["event"] for event in events.read(store, job)]


def starts(store, job: str) -> list[int]:
    """The round of each start of a node's workers."""
    told = [event.record for event in events.read(store, job)]
    return [event["round"] for event in told if event["event"] == "start"]


def shared_round(store, job: str) -> int | None:
    """The round in which two nodes have started their workers."""
    rounds = starts(store, job)
    return next((number for number in rounds if rounds.count(number) == 2), None)


@pytest.mark.full
def test_a_drained_node_leaves_for_free_and_the_story_says_who_asked(cluster, ctl, etcd_store):
    job = cluster(flags=("--nnodes=1:2", TOGETHER))
    job.start("a", "b")
    job.wait_for_step(10, world=2)
    job.pace(LONG_S)
    wait_for(lambda: status.read(etcd_store, job.job).members[0].step, 150, "progress")

    now = json.loads(ctl("status", job.job, "--json").stdout)
    order = [member["node"] for member in now["members"]]
    assert (now["state"], now["round"], now["world_size"]) == ("ACTIVE", 1, 2)
    assert [member["first_rank"] for member in now["members"]] == [0, 1]
    assert {member["condition"] for member in now["members"]} == {"running"}
    assert now["now"] == "round 1 runs on 2 nodes"
    shown = ctl("status", job.job).stdout
    assert shown.splitlines()[0] == f"job {job.job}: ACTIVE"
    rows = [line.split()[:3] for line in shown.splitlines()]
    assert [row for row in rows if "running" in row] == [
        [str(rank), node, "running"] for rank, node in enumerate(order)
    ]

    done = ctl("drain", "b", job.job, "--wait=60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"node b has left job {job.job}"
    assert job.agents.pop("b").wait() == 6
    job.wait_for_step(11, world=1)
    after = status.read(etcd_store, job.job)
    assert (after.restarts, [member.node for member in after.members]) == (0, ["a"])
    assert etcd_store.range(Keys(job.job).drain("")).items == ()

    moves = ["activate", "drain", "yield", "form", "activate"]  # told to etcd a moment later
    wait_for(
        lambda: [e for e in story(etcd_store, job.job) if e in moves] == moves, 60, "the story"
    )
    told = [json.loads(line) for line in ctl("events", job.job, "--json").stdout.splitlines()]
    assert [event["event"] for event in told if event["event"] in moves] == moves
    drain = next(event for event in told if event["event"] == "drain")
    assert (drain["node"], drain["round"]) == ("b", 1)
    assert drain["text"].startswith("zero-ctl drain by ")
    revisions = [event["revision"] for event in told if event["event"] in moves]
    assert revisions == sorted(revisions), "what a node tells may move by the time of its write"


@pytest.mark.full
def test_a_stopped_job_ends_on_every_node_with_its_last_step_saved(cluster, ctl, etcd_store):
    job = cluster(flags=("--nnodes=2",))
    job.start("a", "b")
    job.wait_for_step(10, world=2)
    job.pace(LONG_S)
    with beside(job, "events", job.job, "--follow") as (follower, out):
        done = ctl("stop", job.job, "--reason=enough [for now]", "--wait=60")
        assert done.returncode == 0, done.stdout + done.stderr
        assert [job.agents[node].wait() for node in "ab"] == [5, 5]
        assert follower.wait(150) == 0, "it ends with the job"
    ended = status.read(etcd_store, job.job)
    assert (ended.state, ended.restarts) == ("STOPPED", 0)
    assert ended.cause.endswith(" (enough [for now])")
    steps = {step for step, _ in job.last_steps().values()}
    assert {ended.checkpoint["step"]} == steps, "nothing that was computed is lost"

    assert f"the job ends here: {ended.cause}" in out.read_text()
    job.start("late")
    assert job.agents["late"].wait() == 5
    assert f"job {job.job} has been stopped: {ended.cause}" in job.agents["late"].output
    again = ctl("stop", job.job)
    assert (again.returncode, "has ended already" in again.stdout) == (0, True)


def test_a_lost_node_is_told_as_it_happened(cluster, ctl, etcd_store, tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEP)
    job = cluster(flags=("--nnodes=1:2", "--max-restarts=1", COLD), script=[str(script)])
    job.start("a", "b")
    # A slow start gives one of them a round of its own first. And a worker may speak before its
    # agent has written that it started: killed then, it never does.
    both = wait_for(lambda: shared_round(etcd_store, job.job), 150, "the start of both")
    job.agents.pop("b").kill_node()
    wait_for(lambda: starts(etcd_store, job.job)[-1] == both + 1, 150, "the next round")
    told = [e.record for e in events.read(etcd_store, job.job)]
    lost = [event.get("text") for event in told].index("lost node b; restart 1 of 1")
    moves = {"interrupt", "form", "activate", "start"}
    rest = [(e["event"], e["round"]) for e in told[lost:] if e["event"] in moves]
    assert rest == [("interrupt", both), ("activate", both + 1), ("start", both + 1)]
    now = status.read(etcd_store, job.job)
    assert [(m.node, m.condition) for m in now.members] == [("a", Condition.RUNNING)]
    assert (now.restarts, now.cause) == (1, "lost node b; restart 1 of 1")


def test_a_spare_of_a_stopped_job_does_not_start_the_next_run(ctl, etcd, etcd_store, tmp_path):
    """Without a job's name, the end of one run could be taken for the beginning of another."""
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEP)
    command = [sys.executable, "-m", "zero_agent", "--nnodes=1", COLD]
    command += [f"--rdzv-endpoint={etcd.endpoint}", str(script)]
    with (tmp_path / "log").open("wb") as log:
        agents = [
            subprocess.Popen(command, env=environment(), stdout=log, stderr=log) for _ in range(2)
        ]
    try:
        job = wait_for(lambda: running_job(etcd_store, str(script)), 150, "a worker and a spare")
        stopped = ctl("stop", job, "--wait=60")
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        assert [agent.wait(150) for agent in agents] == [5, 5]
    finally:
        for agent in agents:
            agent.kill()
    jobs = [j.job for j in status.read_all(etcd_store) if str(script) in j.command]
    assert jobs == [job]


def running_job(store, script: str) -> str | None:
    jobs = (j for j in status.read_all(store) if script in j.command)
    return next((j.job for j in jobs if j.members and j.spares), None)


def test_wrong_input_is_one_message_that_names_what_there_is(cluster, ctl, tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEP)
    job = cluster(flags=("--nnodes=1", COLD), script=[str(script)])
    job.start("a")
    wait_for(lambda: job.output.count("sleeping") == 1, 150, "a worker")
    nowhere = f"127.0.0.1:{free_port()}"
    for done, message, code in (
        (ctl("status", "no-such-job"), "there is no job no-such-job; there are: ", 2),
        (ctl("drain", "z", job.job), f"there is no live node z; there are: {job.job}: a", 2),
        (ctl("status", "--rdzv_endpoint=a:b"), "write HOST:PORT with a port", 2),
        (ctl("stop", "--wait=never"), "never is not a length of time; write seconds", 2),
        (ctl("status", endpoint=nowhere), f"cannot reach etcd at {nowhere}", 3),
    ):
        assert (done.returncode, done.stdout) == (code, "")
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_ctrl_c_ends_a_watch_quietly(cluster, tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEP)
    job = cluster(flags=("--nnodes=1", COLD), script=[str(script)])
    job.start("a")
    wait_for(lambda: job.output.count("sleeping") == 1, 150, "a worker")
    with beside(job, "status", job.job, "--watch", "--json") as (watch, out):
        wait_for(lambda: out.read_text().count("\n"), 150, "the first line")
        watch.send_signal(signal.SIGINT)
        assert watch.wait(150) == 128 + signal.SIGINT
    assert {json.loads(line)["job"] for line in out.read_text().splitlines()} == {job.job}
