"""Jobs that keep failing, as processes: who is excluded, who is unhealthy, when it is enough."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.cluster import COLD, environment, light_imports
from tests.support.waiting import wait_for
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.observe import status
from zero_orchestrator.observe.status import Condition

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

BAD_HOST = """
import os, pathlib, time, zero_agent
if os.environ["ZERO_NODE"] == "b" and not pathlib.Path("{healed}").exists():
    raise RuntimeError("b is bad")
print("runs on", os.environ["ZERO_NODE"], flush=True)
step = 0
while not pathlib.Path("{enough}").exists():
    zero_agent.heartbeat(step := step + 1)
    time.sleep(0.02)
"""
LOOP = """
import os, time, zero_agent
first = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0
for step in range(1, 6 if first else 4):
    zero_agent.heartbeat(step)
    time.sleep(0.3)
raise RuntimeError("always here")
"""
STUCK = """
import os, pathlib, subprocess, time
mark = pathlib.Path("{mark}")
for step in range(3):
    subprocess.run(["touch", os.environ["ZERO_HEARTBEAT_FILE"]], check=True)
    time.sleep(0.3)
if not mark.exists():
    mark.touch()
    time.sleep(600)
print("through", flush=True)
"""


def ctl(endpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zero_orchestrator", *arguments, f"--rdzv-endpoint={endpoint}"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def write(path, text: str) -> list[str]:
    path.write_text(text)
    return [str(path)]


def conditions(store, job) -> dict[str, Condition]:
    jobs = [now for now in status.read_all(store) if now.job == job.job]
    return {row.node: row.condition for now in jobs for row in (*now.members, *now.spares)}


@pytest.mark.full
def test_a_host_that_keeps_failing_is_excluded_and_included_again_on_request(
    cluster, etcd_store, tmp_path
):
    healed, enough = tmp_path / "healed", tmp_path / "enough"
    job = cluster(
        flags=("--nnodes=1:2", "--max-restarts=5", "--exclude-for=10m", COLD),
        script=write(tmp_path / "bad.py", BAD_HOST.format(healed=healed, enough=enough)),
    )
    job.start("a")
    wait_for(lambda: "runs on a" in job.output, 150, "a runs")  # b alone would not be excluded
    job.start("b")
    wait_for(lambda: conditions(etcd_store, job).get("b") is Condition.EXCLUDED, 150, "exclusion")
    wait_for(lambda: status.read(etcd_store, job.job).world_size == 1, 150, "the round without b")
    now = status.read(etcd_store, job.job)
    assert [str(e) for e in now.exclusions] == [
        "b is excluded for 600 s: its workers failed 2 times in a row"
    ]
    assert (now.restarts, [row.node for row in now.members]) == (2, ["a"])
    shown = ctl(job.endpoint, "status", job.job).stdout
    assert "b is excluded for 600 s: its workers failed 2 times in a row; it ends in" in shown
    assert 500 < now.excluded_left_s["b"] <= 600

    refused = ctl(job.endpoint, "exclude", "a", job.job, "--for=10m")
    assert refused.returncode == 2
    assert "needs 1 nodes, and without those of host a (a) it has 0: start an" in refused.stderr

    healed.touch()
    done = ctl(job.endpoint, "include", "b", job.job)
    assert (done.returncode, done.stdout) == (0, f"b may take part in job {job.job} again\n")
    wait_for(lambda: job.output.count("runs on b"), 150, "b runs again")
    barred = ctl(job.endpoint, "exclude", "b", job.job, "--for=10m", "--reason=new disk")
    assert "b is excluded for 600 s: asked for by " in barred.stdout
    wait_for(lambda: status.read(etcd_store, job.job).world_size == 1, 150, "the round without b")
    assert status.read(etcd_store, job.job).restarts == 2, "that was free"
    enough.touch()
    job.wait_for_end()


def test_a_crash_loop_ends_before_the_budget_with_a_code_of_its_own(cluster, etcd_store, tmp_path):
    job = cluster(
        flags=("--nnodes=1", "--max-restarts=100", "--max-restarts-without-progress=2"),
        script=write(tmp_path / "loop.py", LOOP),
    )
    job.start("a", PYTHONPATH=light_imports(tmp_path)["PYTHONPATH"])
    assert job.agents["a"].wait() == 7
    assert (
        "no step after 5 was finished in 2 restarts in a row (--max-restarts-without-progress)"
    ) in job.agents["a"].output
    assert job.agents["a"].output.count("RuntimeError: always here\n") == 3, "of each round"
    now = status.read(etcd_store, job.job)
    assert (now.state, now.restarts) == ("FAILED", 3)
    assert job.events("give up")[0]["round"] == 3


def test_a_plain_script_that_touches_its_file_is_found_out_when_it_hangs(cluster, tmp_path):
    job = cluster(
        flags=("--nnodes=1", "--max-restarts=1", "--hang-timeout=6", COLD),
        script=write(tmp_path / "stuck.py", STUCK.format(mark=tmp_path / "mark")),
    )
    job.start("a")
    job.wait_for_end()
    assert "through" in job.output
    assert "no step for 6" in job.events("hang")[0]["text"]
    assert len(job.events("interrupt")) == 1


def test_a_node_that_is_unfit_after_a_failure_is_replaced_by_a_spare_and_comes_back(
    cluster, etcd_store, tmp_path
):
    sick, enough = tmp_path / "sick-b", tmp_path / "enough"
    script = write(
        tmp_path / "fails.py",
        "import os, pathlib, time\n"
        f"sick, enough = pathlib.Path({str(sick)!r}), pathlib.Path({str(enough)!r})\n"
        "print('runs on', os.environ['ZERO_NODE'], flush=True)\n"
        "while not enough.exists():\n"
        "    if os.environ['ZERO_NODE'] == 'b' and sick.exists(): raise RuntimeError('no GPU')\n"
        "    time.sleep(0.02)\n",
    )
    check = f"--health-check=test ! -e {tmp_path}/sick-$ZERO_TEST_NODE || (echo no GPU; false)"
    job = cluster(flags=("--nnodes=1:2", "--max-restarts=5", COLD, check), script=script)
    for node in "ab":
        job.start(node, ZERO_TEST_NODE=node)
    wait_for(lambda: "runs on a" in job.output and "runs on b" in job.output, 150, "both")
    job.start("c", ZERO_TEST_NODE="c")
    wait_for(lambda: conditions(etcd_store, job).get("c") is Condition.SPARE, 150, "a spare")
    sick.touch()
    wait_for(
        lambda: conditions(etcd_store, job).get("b") is Condition.UNHEALTHY, 150, "b is unhealthy"
    )
    wait_for(lambda: "runs on c" in job.output, 150, "the spare runs")
    assert "printed: no GPU" in job.events("health")[0]["text"]
    assert status.read(etcd_store, job.job).restarts == 1
    sick.unlink()
    wait_for(lambda: conditions(etcd_store, job).get("b") is Condition.SPARE, 150, "b is fit again")
    enough.touch()
    job.wait_for_end()


def test_a_node_that_is_not_fit_does_not_join_and_says_why(etcd, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "zero_agent", f"--rdzv-endpoint={etcd.endpoint}"),
            *(
                "--rdzv-id=unhealthy",
                "--join-timeout=0.1",
                "--health-check=echo broken link; exit 9",
            ),
            *write(tmp_path / "script.py", "print('ran')"),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (8, "")
    assert done.stderr.strip().endswith("ended with 9 and printed: broken link")
    assert "(--join-timeout)" in done.stderr
    asked = ctl(etcd.endpoint, "status", "unhealthy")
    assert (asked.returncode, asked.stdout) == (2, ""), "nothing was written of such a job"


def test_preflight_shows_every_check_and_needs_no_script(etcd, tmp_path):
    command = [sys.executable, "-m", "zero_agent", "--preflight"]
    command += [f"--rdzv-endpoint={etcd.endpoint}", f"--log-dir={tmp_path}"]
    options = {"env": environment(), "capture_output": True, "text": True, "timeout": 240}
    fit = subprocess.run(command, check=False, **options)
    assert fit.returncode == 0, fit.stdout + fit.stderr
    named = [line.split("  ")[0] for line in fit.stdout.splitlines()]
    assert named == [
        *("check", "shared memory", "memory", "temporary files", "logs", "open files", "clock"),
        *("address", "etcd"),
    ]
    assert f"{etcd.endpoint} answers in " in fit.stdout
    command += ["--health-check=echo one; echo two; exit 4"]
    sick = subprocess.run(command, check=False, **options)
    assert (sick.returncode, sick.stderr) == (AgentExit.UNHEALTHY, "")
    last = sick.stdout.splitlines()[-1]
    assert last.split("  ")[0] == "health check"
    assert "FAILED" in last
    assert "ended with 4 and printed: one | two" in last


@pytest.mark.full
def test_a_round_has_whole_units_and_grows_by_one_when_it_is_whole(cluster, etcd_store, tmp_path):
    enough = tmp_path / "enough"
    script = write(
        tmp_path / "waits.py",
        "import pathlib, time\n"
        f"while not pathlib.Path({str(enough)!r}).exists(): time.sleep(0.02)\n",
    )
    job = cluster(flags=("--nnodes=2:4", "--node-unit=2", COLD), script=script)

    def shape():
        jobs = [now for now in status.read_all(etcd_store) if now.job == job.job]
        return [(now.state, len(now.members), len(now.spares)) for now in jobs]

    job.start("a", "b", "c")
    wait_for(lambda: shape() == [("ACTIVE", 2, 1)], 150, "a unit, and a spare")
    first = status.read(etcd_store, job.job)
    assert f"multiples of 2 nodes; spare: {first.spares[0].node}" in first.now
    job.start("d")
    wait_for(lambda: shape() == [("ACTIVE", 4, 0)], 150, "two units")
    enough.touch()
    job.wait_for_end()
    assert [len(event["nodes"]) for event in job.events("activate")] == [2, 4]
    assert status.read(etcd_store, job.job).restarts == 0


@pytest.mark.full
def test_a_restart_comes_back_to_the_budget_after_so_many_committed_steps(cluster, etcd_store):
    """A budget of one survives two failures with checkpoints between them, and not a third."""
    job = cluster(flags=("--nnodes=1", "--max-restarts=1", "--refill-after-steps=15"), pause_s=0.3)
    job.start("a")
    for step in (22, 45):
        job.wait_for_step(step, world=1)
        os.kill(job.worker_of("a"), signal.SIGKILL)
    wait_for(lambda: len(job.events("activate")) == 3, 150, "the third round")
    now = status.read(etcd_store, job.job)
    assert (now.state, now.restarts, now.restarts_spent) == ("ACTIVE", 2, 1)
    wait_for(lambda: len(job.events("worker")) == 3, 150, "its worker")
    os.kill(job.worker_of("a"), signal.SIGKILL)
    assert job.agents["a"].wait() == AgentExit.JOB_FAILED
    assert status.read(etcd_store, job.job).state == "FAILED"
