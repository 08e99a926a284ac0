"""Deployments without Kubernetes: the image, systemd and Slurm."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.deploy.manifests import DEPLOY, ROOT
from tests.support.cluster import environment, paced, training
from tests.support.network import kill_all_with, own_loopback
from tests.support.waiting import wait_for
from zero_agent.etcd.etcd_process import Member, find_etcd

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SBATCH = DEPLOY / "slurm" / "zero_agent.sbatch"
UNIT = DEPLOY / "systemd" / "zero-agent@.service"


def needs(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


# ---- the image ----


def _instructions(keyword: str) -> list[str]:
    text = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^{keyword} (.*)$", text, re.MULTILINE)


def test_everything_that_the_image_copies_is_here_and_not_ignored():
    sources = {
        word
        for line in _instructions("COPY")
        if not line.startswith("--from")
        for word in line.split()[:-1]
    }
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert sources == {line[1:] for line in kept if line.startswith("!")}
    assert [name for name in sources if not (ROOT / name).exists()] == []


def test_the_image_runs_zero_agent_as_a_user_without_rights():
    last_stage = DOCKERFILE.rpartition("\nFROM ")[2]
    assert "USER 1000:1000" in last_stage
    assert 'ENTRYPOINT ["zero-agent"]' in last_stage
    assert "pip install" not in last_stage, "built in the first stage, copied to the second"


def _locked(name: str) -> dict[str, tuple[str, int]]:
    """Package -> its version, and how many files may be installed for it."""
    text = (DEPLOY / "locks" / f"{name}.lock").read_text().replace("\\\n", " ")
    lines = [line.partition(";") for line in text.splitlines() if not line.startswith("#")]
    pins = ((before.partition("==")[::2], before + after) for before, _, after in lines)
    return {n: (v.split()[0], all_.count("--hash=sha256:")) for (n, v), all_ in pins}


@pytest.mark.parametrize("name", ["base", "etcd", "s3", "gcs", "stacks", "traces"])
def test_the_image_installs_what_pyproject_asks_for_and_each_file_by_its_hash(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    base = project["dependencies"] + extras["metrics"] + extras["torch"]
    wanted = [Requirement(one) for one in extras.get(name, base)]
    locked = _locked(name)
    outside = [r.name for r in wanted if r.name not in locked]
    assert outside == (["torch"] if name == "base" else []), "run `make locks`"
    wrong = [r for r in wanted if r.name in locked and locked[r.name][0] not in r.specifier]
    assert wrong == [], "run `make locks`"
    assert [package for package, (_, files) in locked.items() if not files] == []
    [install] = [line for line in _instructions("RUN") if "locks" in line]
    assert "--no-deps --require-hashes" in install


# ---- systemd ----


def test_systemd_accepts_the_unit(tmp_path):
    analyze = needs("systemd-analyze")
    text = UNIT.read_text()
    (tmp_path / UNIT.name).write_text(text.replace("/opt/zero/bin/zero-agent", "/bin/true"))
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(tmp_path / UNIT.name)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_waits_longer_than_an_agent_drains():
    text = UNIT.read_text()
    [stop_s] = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    [drain_s] = re.findall(r"PET_SHUTDOWN_TIMEOUT=(\d+)", text)
    assert int(stop_s) >= int(drain_s) + 5


# ---- Slurm ----


def test_the_batch_script_is_clean():
    done = subprocess.run(
        [needs("shellcheck"), str(SBATCH)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_batch_script_without_a_script_says_how_it_is_used():
    done = subprocess.run(
        ["bash", str(SBATCH)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sbatch")


SRUN = r"""#!/usr/bin/env bash
# A task a node. tests/processes/test_slurm.py runs the script on a real Slurm.
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do "$@" & done
wait
"""


class Allocation:
    """A batch script run as slurmd would run it, on two nodes that are this machine."""

    def __init__(self, directory: Path, network: list[str]) -> None:
        self.directory, self._network = directory, network
        self.mark = f"sbatch-{directory}"
        self.scratch = directory / "tmp"
        self.scratch.mkdir()
        programs = {
            "srun": SRUN,
            "scontrol": f'#!/bin/sh\necho "$@" >> {shlex.quote(str(directory))}/scontrol\n',
            "hostname": "#!/bin/sh\necho 127.0.0.1\n",
            "etcd": f'#!/bin/sh\nexec {find_etcd()} "$@"\n',
            "zero-agent": f'#!/bin/sh\nexec {sys.executable} -m zero_agent "$@"\n',
            "zero-ctl": f'#!/bin/sh\nexec {sys.executable} -m zero_orchestrator "$@"\n',
        }
        for name, text in programs.items():
            path = directory / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)

    def submit(self) -> subprocess.Popen[bytes]:
        facts = {
            "PATH": f"{self.directory}/bin:{os.environ['PATH']}",
            "SLURM_JOB_NAME": "gpt", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2",
            "PET_LOG_DIR": f"{self.directory}/logs", "SLURM_CPUS_PER_TASK": "1",
            "ALLOCATION": self.mark, "TMPDIR": str(self.scratch),
        }  # fmt: skip
        script = paced(training(self.directory), self.directory)
        with (self.directory / "output").open("ab") as output:
            return subprocess.Popen(
                [*self._network, "bash", str(SBATCH), *script],
                env=environment() | facts, stdout=output, stderr=output, cwd=self.directory,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text()


ASK = r"""#!/bin/bash
# An agent that says where it was sent, and whose etcd that is.
[[ -n $ZERO_JOIN_TOKEN ]] && echo "sent to $PET_RDZV_ENDPOINT, $PET_RDZV_BACKEND"
"""


@pytest.mark.etcd
@pytest.mark.netns
def test_a_slurm_job_leaves_the_port_of_anothers_etcd_alone(tmp_path):
    with own_loopback(2379) as network:
        allocation = Allocation(tmp_path, network)
        (tmp_path / "bin" / "zero-agent").write_text(ASK)

        def sent_to() -> str:
            (tmp_path / "output").unlink(missing_ok=True)
            assert allocation.submit().wait(60) == 0, allocation.output
            told = re.findall(r"sent to (\S+), c10d", allocation.output)
            assert told == 2 * told[:1], allocation.output
            return str(told[0])

        try:
            first = sent_to()
            with _anothers_etcd(tmp_path, network, first):
                second = sent_to()
        finally:
            kill_all_with("ALLOCATION", allocation.mark)
    assert second != first
    assert list(tmp_path.glob(".zero-*")) == []


@contextlib.contextmanager
def _anothers_etcd(directory: Path, network: list[str], endpoint: str) -> Iterator[None]:
    """An etcd of another user on this machine."""
    data = Path(directory, "another")
    member = Member(data=data, client_port=int(endpoint.rpartition(":")[2]))
    with (directory / "another.log").open("wb") as log:
        command = [*network, *member.command(find_etcd())]
        etcd = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        ask = [*network, "bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{member.client_port}"]
        wait_for(
            lambda: subprocess.run(ask, capture_output=True, check=False).returncode == 0,
            60,
            "another user's etcd",
        )
        yield
    finally:
        etcd.kill()
        etcd.wait()


# ---- every etcd of ours ----


def _etcd_commands() -> dict[str, list[str]]:
    """The options of each etcd that we start or tell others to start."""
    manifests = yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / "etcd.yaml").read_text())
    stateful = next(m for m in manifests if m["kind"] == "StatefulSet")
    member = Member(data=Path("/data"), client_port=1)
    return {
        "kubernetes": stateful["spec"]["template"]["spec"]["containers"][0]["command"],
        "of an agent": member.command(Path("etcd")),
    }


@pytest.mark.parametrize("place", _etcd_commands())
def test_every_etcd_of_ours_forgets_its_history_and_elects_in_time_for_short_leases(place):
    options = _etcd_commands()[place]
    assert {
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=1h",
        "--election-timeout=1000",
    } <= set(options)
