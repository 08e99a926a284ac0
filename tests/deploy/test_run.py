"""`zero-ctl run` and `render`, as they are typed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.cluster import (
    SAMPLES,
    Cluster,
    descendants,
    environment,
    final_hash,
    is_alive,
    paced,
    training,
)
from tests.support.network import kill_all_with
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_data.ledger import read_ledger, verify

CTL = [sys.executable, "-m", "zero_orchestrator"]
BUFFERED = {**os.environ, "PYTHONUNBUFFERED": ""}


def ctl(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CTL, *map(str, words)],
        env=environment() | {"KUBECONFIG": "/none"} | variables,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def job_file(directory: Path, **more: object) -> Path:
    path = directory / "job.yaml"
    least = {"name": "gpt", "script": "train.py", "nodes": "1:4"}
    path.write_text(yaml.safe_dump({**least, **more}))
    return path


def program(directory: Path, name: str, text: str) -> Path:
    """A program of this name in a directory that is to be on the PATH."""
    path = directory / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path.parent


# ---- on this machine ----


@pytest.mark.processes
@pytest.mark.etcd
@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGINT, 128 + signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)]
)
@pytest.mark.full
def test_a_job_that_is_run_here_drains_when_ended_and_when_run_again_ends_with_the_same_bits(
    tmp_path, etcd, undisturbed_hash, how, code
):
    script, *arguments = paced(training(tmp_path), tmp_path)
    path = job_file(
        tmp_path, script=script, args=arguments, threads=1, etcd={"endpoints": [etcd.endpoint]}
    )
    view = Cluster(tmp_path, etcd.endpoint, pause_s=0.1)

    def start(output: Path) -> subprocess.Popen[bytes]:
        words = [*CTL, "run", str(path), "--on", "local", "--agents", "2"]
        with output.open("wb") as file:
            return subprocess.Popen(words, env=marked, stdout=file, stderr=file)

    marked = environment() | {"RUN": str(tmp_path)}
    try:
        first = start(tmp_path / "first")
        view.wait_for_step(10, world=2)
        agents_and_workers = descendants(first.pid)
        first.send_signal(how)
        assert first.wait(150) == code, (tmp_path / "first").read_text()
        wait_for(lambda: not any(map(is_alive, agents_and_workers)), 150, "nothing is left behind")
        view.pace(0)
        second = start(tmp_path / "second")
        assert second.wait(150) == 0, (tmp_path / "second").read_text()
    finally:
        kill_all_with("RUN", str(tmp_path))

    assert final_hash((tmp_path / "second").read_text()) == undisturbed_hash
    report = verify(read_ledger(tmp_path / "ledger"), SAMPLES)
    assert (report.problems, report.repeated_steps) == ((), 0)


def test_one_agent_takes_the_place_of_the_command(tmp_path):
    (tmp_path / "train.py").write_text("import os; print('parent', os.environ['PET_NNODES'])\n")
    path = job_file(tmp_path, script=str(tmp_path / "train.py"), nodes="1")
    done = ctl("run", path, "--on", "local", PET_COLD_START="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "parent 1:1\n"


def test_a_dry_run_starts_nothing_and_shows_what_would_be(tmp_path):
    script = tmp_path / "train.py"
    path = job_file(tmp_path, threads=1, nodes="2:4", script=str(script), secrets={"T": "a/b"})
    there_is_none = ctl("run", path, "--on", "local", "--dry-run")
    assert (there_is_none.returncode, there_is_none.stdout) == (2, "")
    assert f"script: {script}: there is no such file here" in there_is_none.stderr
    assert "secrets.T: is not set; on this machine the agents have it" in there_is_none.stderr
    script.touch()
    done = ctl("run", path, "--on", "local", "--dry-run", T="secret")
    assert done.returncode == 0, done.stderr
    assert "secret" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == "# 2 times:"
    assert {"PET_NNODES=2:4", "OMP_NUM_THREADS=1"} <= set(lines)
    assert lines[-1] == f"{sys.executable} -m zero_agent {script}"


@pytest.mark.parametrize(
    ("more", "words", "message"),
    [
        ({}, ("run", "--on=local"), "script: train.py: there is no such file here; run this where"),
        ({"nodes": "4:2"}, ("run",), "nodes: 4:2: minimum 4 exceeds maximum 2; write 2:4"),
        ({}, ("run", "--agents=0"), "argument --agents: 0: write a number of agents, from 1"),
        ({}, ("render", "--to=helm"), "argument --to: invalid choice: 'helm'"),
        ({}, ("run", "--on=slurm"), "sbatch is not on the PATH; run this on a login node"),
    ],
)
def test_what_cannot_be_run_is_one_message_and_exit_code_2(tmp_path, more, words, message):
    without_slurm = str(Path(sys.executable).parent)
    done = ctl(words[0], job_file(tmp_path, **more), *words[1:], PATH=without_slurm)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_etcd_that_does_not_answer_is_named_with_the_line_before_anything_starts(tmp_path):
    path = job_file(tmp_path, etcd={"endpoints": [f"127.0.0.1:{free_port()}"]})
    done = ctl("run", path, "--on", "local")
    assert done.returncode == 2
    assert "etcd.endpoints: cannot be reached from here" in done.stderr
    assert f"{path}:2:" in done.stderr


# ---- on Slurm ----


def test_on_slurm_the_script_is_handed_to_sbatch_and_its_exit_code_is_ours(tmp_path):
    sbatch = program(tmp_path, "sbatch", f"cat > {tmp_path}/submitted; exit 7")
    done = ctl("run", job_file(tmp_path), PATH=f"{sbatch}:{os.environ['PATH']}")
    assert done.returncode == 7
    assert "on slurm, since sbatch is on the PATH" in done.stderr
    assert (tmp_path / "submitted").read_text() == ctl(
        "render", tmp_path / "job.yaml", "--to", "slurm"
    ).stdout


def test_rendered_files_can_be_written_to_a_directory(tmp_path):
    path = job_file(tmp_path)
    done = ctl("render", path, "--to", "slurm", "--output", tmp_path / "out")
    assert done.stdout == f"{tmp_path}/out/gpt.sbatch\n"
    assert (tmp_path / "out" / "gpt.sbatch").read_text() == ctl("render", path, "--to=slurm").stdout
    (tmp_path / "file").touch()
    done = ctl("render", path, "--to", "slurm", "--output", tmp_path / "file")
    assert done.returncode == 2
    assert f"--output={tmp_path}/file" in done.stderr


@pytest.fixture(params=["render FILE --to=slurm", "completion bash"])
def printing(request, tmp_path):
    """A command that prints, without etcd."""
    path = job_file(tmp_path, checkpoint={"path": "/c"})
    return [*CTL, *request.param.replace("FILE", str(path)).split()]


def test_the_reader_of_a_pipe_may_leave(printing):
    with subprocess.Popen(
        printing, env=BUFFERED, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    wait_for(lambda: process.poll() is not None, 150, "zero-ctl ends")
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_disk_that_is_full_is_one_message(printing):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            printing,
            env=BUFFERED, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        2, "zero-ctl: [Errno 28] No space left on device\n",
    )  # fmt: skip
