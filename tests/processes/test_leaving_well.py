"""It leaves well under any launcher: the step is finished and saved, and the exit code says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cluster import COLD, ROOT, TOGETHER, environment, whole_lines
from tests.support.metadata import CLOUDS, NOTICES, Metadata, metadata_server
from tests.support.new_environment import python_with
from tests.support.ports import free_port
from tests.support.slurm import slurm_cluster
from tests.support.terminal import Terminal
from tests.support.waiting import wait_for

pytestmark = pytest.mark.processes

JOB = ROOT / "tests" / "support" / "leaving_job.py"
PYTHON = (sys.executable,)
TORCHRUN = (*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
CODES = {"SIGHUP": 129, "SIGINT": 130, "SIGUSR1": 138, "SIGTERM": 143}
TERM = CODES["SIGTERM"]


@dataclass(frozen=True)
class Job:
    """A training, started as its users start it."""

    directory: Path
    launcher: Sequence[str]
    kind: str
    environment: Mapping[str, str]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            # Under nohup the tests ignore SIGHUP, and so would what they start.
            [
                "env",
                "--default-signal=HUP",
                *self.launcher,
                str(JOB),
                self.kind,
                str(self.directory),
            ],
            env={**environment(), "PYTHONPATH": str(ROOT), **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def steps(self, rank: int = 0) -> list[int]:
        file = self.directory / f"steps-{rank}"
        return [int(line) for line in whole_lines(file)] if file.exists() else []

    def wait_for_steps(self, more: int = 3) -> None:
        before = len(self.steps())
        wait_for(lambda: len(self.steps()) >= before + more, 150, f"{more} steps")

    def saved(self) -> int:
        """The step of the newest complete checkpoint."""
        if self.kind in ("alone", "ranks"):
            return int((self.directory / "saved").read_text())
        manifests = (self.directory / "checkpoints").glob("step-*/MANIFEST.json")
        return max(int(path.parent.name.split(".")[0].removeprefix("step-")) for path in manifests)


def has_left(process: subprocess.Popen[str], job: Job, code: int, ranks: int = 1) -> str:
    """It ends with this code, and every rank did the same steps, up to the one that is saved."""
    try:
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == code, output
    done = [job.steps(rank) for rank in range(ranks)]
    assert done == [list(range(1, job.saved() + 1))] * ranks, output
    return output


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with metadata_server() as server:
        yield server


# ---- a terminal, or whatever starts one process ----


@pytest.mark.parametrize("name", CODES)
def test_a_script_of_its_own_saves_its_step_and_exits_as_of_the_signal(tmp_path, name):
    job = Job(tmp_path, PYTHON, "alone", {})
    process = job.start()
    job.wait_for_steps()
    process.send_signal(signal.Signals[name])
    output = has_left(process, job, CODES[name])
    assert f"zero: {name}: leaving after this step; once more to leave at once\n" in output


@pytest.mark.corners(notice=["spot", "preempted", "scheduled event"])
@pytest.mark.parametrize("notice", NOTICES)
def test_a_cloud_that_takes_its_machine_away_is_heeded(tmp_path, metadata, notice):
    cloud = NOTICES[notice][0]
    job = Job(tmp_path, PYTHON, "alone", metadata.environment(cloud))
    process = job.start()
    wait_for(lambda: len(metadata.asked) > 1 and len(job.steps()) > 1, 30, "nothing is scheduled")
    assert process.poll() is None
    metadata.schedule(notice)
    assert f"zero: {cloud}: " in has_left(process, job, TERM)


def test_a_file_that_is_not_empty_any_more_is_heeded(tmp_path):
    """As the downward API of Kubernetes writes an annotation of the pod."""
    file = tmp_path / "leave"
    file.touch()
    job = Job(tmp_path, PYTHON, "alone", {"ZERO_LEAVE_FILE": str(file)})
    process = job.start()
    job.wait_for_steps()
    file.write_text("node.kubernetes.io/out-of-service")
    has_left(process, job, TERM)


def test_a_terminal_whose_ctrl_c_is_pressed_twice_interrupts_at_once(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(
        "import threading, zero_agent\n"
        "zero_agent.should_leave()\n"
        "print('begun', flush=True)\n"
        "threading.Event().wait()\n"
    )
    terminal = Terminal([sys.executable, str(script)], environment())
    wait_for(lambda: "begun" in terminal.text, 30, "the script")
    terminal.type(b"\x03")
    wait_for(lambda: "once more to leave at once" in terminal.text, 30, "the first Ctrl-C")
    assert terminal.process.poll() is None
    terminal.type(b"\x03")
    assert terminal.process.wait(30) == -signal.SIGINT
    wait_for(lambda: "KeyboardInterrupt" in terminal.text, 10, "what Python shows")
    terminal.close()


def test_a_handler_of_the_scripts_own_stays(tmp_path):
    script = (
        "import os, signal, zero_agent\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('mine'))\n"
        "zero_agent.should_leave()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "print(zero_agent.should_leave())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "mine\nFalse\n"


def test_the_handler_that_ray_gives_its_workers_is_replaced(tmp_path):
    script = (
        "import os, signal, sys, zero_agent\n"
        "ends = lambda *_: sys.exit(1)\n"
        "ends.__module__ = 'ray._private.worker'\n"
        "signal.signal(signal.SIGTERM, ends)\n"
        "zero_agent.should_leave()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(zero_agent.should_leave())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"


@pytest.mark.parametrize("state", ["silent", "dead"])
def test_no_step_and_no_start_waits_for_a_server_that_does_not_answer(tmp_path, metadata, state):
    variables = {k: v for cloud in CLOUDS for k, v in metadata.environment(cloud).items()}
    if state == "silent":
        metadata.answering.clear()
    else:
        metadata.server_close()
    job = Job(tmp_path, PYTHON, "alone", variables)
    process = job.start()
    job.wait_for_steps(10)
    assert metadata.asked == []
    process.send_signal(signal.SIGTERM)
    has_left(process, job, TERM)


@pytest.mark.full
def test_events_of_another_machine_of_the_set_and_pauses_are_not_heeded(tmp_path, metadata):
    job = Job(
        tmp_path,
        PYTHON,
        "alone",
        metadata.environment("Azure") | metadata.environment("Google"),
    )
    path, body = NOTICES["scheduled event"][1:]
    metadata.answers[path] = body.replace("vm-1", "vm-2")
    metadata.answers[NOTICES["maintenance"][1]] = "MIGRATE_ON_HOST_MAINTENANCE"
    process = job.start()
    wait_for(lambda: metadata.asked.count(path) > 2, 30, "three looks")
    assert process.poll() is None
    metadata.answers[path] = body.replace("Preempt", "Freeze")
    before = metadata.asked.count(path)
    wait_for(lambda: metadata.asked.count(path) > before + 1, 30, "two looks")
    assert process.poll() is None
    metadata.schedule("scheduled event")
    has_left(process, job, TERM)


@pytest.mark.full
def test_who_is_started_again_on_the_machine_does_not_leave_again_for_the_same(tmp_path, metadata):
    """A recommendation may stand for hours; torchrun restarts workers on a machine that goes."""
    metadata.schedule("rebalance")
    job = Job(tmp_path, PYTHON, "alone", metadata.environment("AWS"))
    process = job.start()
    wait_for(lambda: len(metadata.asked) > 3, 30, "two looks")
    assert process.poll() is None
    metadata.schedule("spot")
    has_left(process, job, TERM)
    (tmp_path / "steps-0").unlink()
    (tmp_path / "saved").unlink()
    variables = {**metadata.environment("AWS"), "TORCHELASTIC_RESTART_COUNT": "1"}
    job = Job(tmp_path, PYTHON, "alone", variables)
    process, before = job.start(), len(metadata.asked)
    wait_for(lambda: len(metadata.asked) > before + 3, 30, "two looks")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    has_left(process, job, TERM)


# ---- launchers ----


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ranks", "protect", "engine"])
@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGUSR1", "SIGTERM"])
def test_under_torchrun_all_ranks_save_the_same_step_when_it_gets_a_signal(tmp_path, kind, name):
    """torchrun itself ends with 1, whatever its workers do, and starts none again."""
    job = Job(tmp_path, (*TORCHRUN, "--signals-to-handle=SIGHUP,SIGINT,SIGTERM,SIGUSR1"), kind, {})
    process = job.start()
    job.wait_for_steps()
    process.send_signal(signal.Signals[name])
    has_left(process, job, 1, ranks=2)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ranks", "protect", "engine"])
def test_under_torchrun_a_notice_to_one_machine_lets_all_ranks_leave(tmp_path, metadata, kind):
    job = Job(tmp_path, TORCHRUN, kind, metadata.environment("AWS"))
    process = job.start()
    job.wait_for_steps()
    metadata.schedule("spot")
    output = has_left(process, job, 1, ranks=2)
    assert f"exitcode  : {TERM}" in output


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ranks", "protect", "engine"])
def test_under_srun_the_signal_before_the_limit_saves_the_step_and_is_the_exit_code(tmp_path, kind):
    with slurm_cluster(tmp_path / "slurm") as slurm:
        srun = ("srun", "--nodes=2", "--ntasks=2", *PYTHON)
        for name in ("SIGUSR1", "SIGTERM"):
            directory = tmp_path / name
            directory.mkdir()
            # No DNS knows its nodes, and another Slurm of the tests has the same default port.
            store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            here = slurm.environment | store
            job = Job(directory, srun, kind, here)
            process = job.start()
            job.wait_for_steps()
            (number,) = slurm.run("squeue", "--noheader", "--states=R", "--format=%i").split()
            slurm.run("scancel", f"--signal={name[3:]}", number)
            has_left(process, job, CODES[name], ranks=2)


@pytest.mark.full
def test_as_process_1_of_a_container_it_leaves_before_the_grace_period_ends(tmp_path):
    """Whose default for SIGTERM the kernel ignores: Kubernetes would kill it in the end."""
    if os.geteuid() != 0:
        pytest.skip("makes a PID namespace")
    job = Job(tmp_path, ("unshare", "--pid", "--fork", "--kill-child", *PYTHON), "alone", {})
    process = job.start()
    job.wait_for_steps()
    (inside,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(inside), signal.SIGTERM)
    has_left(process, job, TERM)


RAY = """
import os, signal, sys, ray
ray.init(num_cpus=1, include_dashboard=False)

@ray.remote(max_restarts=0)
class Worker:
    def pid(self):
        return os.getpid()

    def train(self):
        sys.argv = ["job", "alone", {directory!r}]
        sys.path += {paths!r}
        try:
            exec(open({job!r}).read(), {{"__name__": "job"}})
        except SystemExit as ending:
            return ending.code

worker = Worker.remote()
pid, ending = ray.get(worker.pid.remote()), worker.train.remote()
print(pid, flush=True)
print(ray.get(ending, timeout=60), flush=True)
"""


@pytest.mark.full
def test_an_actor_of_ray_saves_its_step_when_its_process_gets_sigterm(tmp_path):
    """Ray gives its workers a handler that ends them at once."""
    python = python_with("ray", "msgspec")
    paths = [str(ROOT / one) for one in ("agent", "orchestrator")]
    script = tmp_path / "ray_job.py"
    script.write_text(RAY.format(directory=str(tmp_path), paths=paths, job=str(JOB)))
    job = Job(tmp_path, (str(python),), "alone", {})
    with subprocess.Popen(
        [str(python), str(script)], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            pid = int(process.stdout.readline())
            job.wait_for_steps()
            os.kill(pid, signal.SIGTERM)
            said = process.stdout.read()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert str(TERM) in said.splitlines()
    assert job.steps() == list(range(1, job.saved() + 1))


@pytest.mark.etcd
def test_an_agent_drains_its_node_before_its_machine_is_taken(tmp_path, metadata, cluster):
    flags = ("--nnodes=1:2", "--max-restarts=0", COLD, TOGETHER)
    job = cluster(flags=flags, script=[str(JOB), "alone", str(tmp_path)])
    job.start("a", PYTHONPATH=str(ROOT))
    job.start("b", PYTHONPATH=str(ROOT), **metadata.environment("AWS"))
    steps = [tmp_path / "steps-0", tmp_path / "steps-1"]
    wait_for(lambda: all(s.exists() and whole_lines(s) for s in steps), 90, "steps of both")
    metadata.schedule("spot")
    assert job.agents["b"].wait() == TERM
    assert "AWS: spot instance-action terminate at 2026-11-24T18:00:00Z: leaving" in job.output
    before = len(whole_lines(steps[0]))
    wait_for(lambda: len(whole_lines(steps[0])) > before, 60, "steps of the other, alone")
    counted = [int(line) for line in whole_lines(steps[0])]
    assert counted == list(range(1, len(counted) + 1))
    assert job.agents["a"].process.poll() is None
