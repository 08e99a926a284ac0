"""`zero-ctl launch` as its users run it: hosts behind a real sshd, a hostfile, one command."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cluster import (
    LONG_S,
    SAMPLES,
    STEPS,
    Cluster,
    environment,
    final_hash,
    light_imports,
    paced,
    training,
)
from tests.support.ssh_hosts import SshHosts, ssh_hosts, why_not
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.processes,
    pytest.mark.etcd,
    pytest.mark.netns,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


# How each launcher is told to log in with the tests' key: flags, and environment.
WAYS = {
    "ssh": lambda options: ([f"--launcher-args={options}"], {}),
    "pdsh": lambda options: ([], {"PDSH_SSH_ARGS_APPEND": options}),
}


@dataclass
class Launched:
    """One `zero-ctl launch` and what it says."""

    process: subprocess.Popen[bytes]
    log: Path
    ledger: Cluster

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self) -> int:
        return self.process.wait(150)

    def wait_for_step(self, step: int, world: int) -> None:
        self.ledger.wait_for_step(step, world)


@pytest.fixture
def hosts(tmp_path):
    with ssh_hosts(tmp_path / "ssh") as running:
        yield running


@pytest.fixture
def launch(tmp_path, hosts: SshHosts):
    """Runs the command on some hosts; nothing of it is left in the end."""
    started: list[Launched] = []

    def run(
        *addresses: str,
        flags: tuple[str, ...] = (),
        pause_s: float = 0.06,
        script: Sequence[str] = (),
        launcher: str = "ssh",
    ) -> Launched:
        hostfile = tmp_path / "hostfile"
        hostfile.write_text("".join(f"{address} slots=1\n" for address in addresses))
        log = tmp_path / "launch.log"
        options, environ = WAYS[launcher](hosts.ssh_options)
        args = [f"--hostfile={hostfile}", f"--launcher={launcher}", *options, *flags]
        command = script or paced(training(tmp_path), tmp_path)
        ledger = Cluster(tmp_path, "", pause_s=pause_s)
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "zero_agent.launch", *args, *command],
                stdout=file,
                stderr=file,
                env={**environment(), **environ},
                cwd=tmp_path,
                start_new_session=True,
            )
        started.append(Launched(process, log, ledger))
        return started[-1]

    yield run
    for launched in started:
        launched.process.kill()
        launched.process.wait()


def assert_one_exact_pass(launched: Launched, undisturbed_hash: str) -> None:
    report = launched.ledger.report()
    assert report.problems == ()
    assert (report.steps, report.samples) == (STEPS, SAMPLES)
    assert final_hash(launched.output.replace(": done:", "\ndone:")) == undisturbed_hash


def assert_on_no_command_line(secret: bytes) -> None:
    """The hosts are on this machine, so its processes are those of both sides."""
    shown = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            shown += [path] if secret in path.read_bytes() else []
    assert shown == []


@pytest.mark.full
def test_the_job_survives_a_host_that_dies_and_one_that_was_never_there(
    hosts, launch, tmp_path, undisturbed_hash
):
    (tmp_path / ".zero_env").write_text("# for the workers\nGREETING=open sesame\n")
    first, second, absent = hosts.add(), hosts.add(), hosts.add(serving=False)
    job = launch(first, second, absent, flags=("--max-restarts=1",))
    job.wait_for_step(20, world=2)
    job.ledger.pace(LONG_S)
    wait_for(lambda: f"host {absent} is lost" in job.output, 150, "a word about the absent host")
    assert "Connection refused" in job.output
    environ = [
        Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in hosts.processes(second)
    ]
    assert {v for one in environ for v in one if b"GREETING" in v} == {b"GREETING=open sesame"}
    assert_on_no_command_line(b"open sesame")
    hosts.kill(second)
    job.ledger.pace(0)
    job.wait_for_step(40, world=1)
    assert job.wait() == 0, job.output
    assert_one_exact_pass(job, undisturbed_hash)


@pytest.mark.full
def test_ctrl_c_stops_the_job_with_a_checkpoint_and_leaves_nothing_on_the_hosts(hosts, launch):
    first, second = hosts.add(), hosts.add()
    job = launch(first, second, pause_s=0.2)
    job.wait_for_step(3, world=2)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 128 + signal.SIGINT, job.output
    assert "is asked to stop; its workers leave at the next step boundary" in job.output
    assert len(list((job.ledger.directory / "checkpoints").glob("step-*/MANIFEST.json"))) == 1
    for address in (first, second):
        wait_for(lambda a=address: hosts.is_idle(a), 150, f"nothing of the job is on {address}")


@pytest.mark.full
def test_a_launcher_that_is_killed_takes_its_agents_with_it(hosts, launch):
    first = hosts.add()
    job = launch(first, flags=("--force-multi",), pause_s=0.2)
    job.wait_for_step(3, world=1)
    job.process.kill()
    wait_for(lambda: hosts.is_idle(first), 150, "nothing of the job is left")


def test_hosts_of_which_none_answers_end_the_command_with_their_names(hosts, launch):
    first, second = hosts.add(serving=False), hosts.add(serving=False)
    job = launch(first, second)
    assert job.wait() == 255
    assert job.output.count("Connection refused") == 2


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_every_launcher_runs_the_same_agents_on_all_hosts(hosts, launch, tmp_path, launcher):
    if shutil.which(launcher) is None:
        pytest.skip(f"needs {launcher}")
    script = tmp_path / "places.py"
    script.write_text(
        "import os, time; print('place', os.environ['RANK'], os.environ['WORLD_SIZE'], "
        "'with', os.environ['GREETING'], flush=True)\n"
        "while not os.path.exists('seen'): time.sleep(0.05)"
    )
    light = light_imports(tmp_path)["PYTHONPATH"]
    (tmp_path / ".zero_env").write_text(f"GREETING=open sesame\nPYTHONPATH={light}\n")
    job = launch(hosts.add(), hosts.add(), launcher=launcher, script=[str(script)])
    wait_for(lambda: job.output.count("with open sesame") == 2, 60, "both places")
    assert_on_no_command_line(b"open sesame")
    (tmp_path / "seen").touch()
    assert job.wait() == 0, job.output
    assert sorted(re.findall(r"place \d \d", job.output)) == ["place 0 2", "place 1 2"]
    assert list(tmp_path.glob(".zero-launch-*")) == []
