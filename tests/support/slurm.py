"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd of its own.

Its daemons run in the foreground as children of the test, with files, ports and a munge key of
their own, so a Slurm that this machine may already run is not touched.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.waiting import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
KILL_WAIT_S = 30
"""Slurm's default: seconds from SIGTERM to SIGKILL when a job is cancelled or out of time."""

# config_overrides: each of the two nodes has the processors of the whole machine.
_CONF = """
ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
CryptoType=crypto/munge
SlurmctldPort={controller}
FirstJobId={first_job}
SlurmdParameters=config_overrides
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1
MpiDefault=none
ReturnToService=2
KillWait={kill_wait}
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
TopologyPlugin=topology/tree
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname=localhost Port={first} CPUs=8 RealMemory=4000
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname=localhost Port={second} CPUs=8 RealMemory=4000
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


_TOPOLOGY = """
SwitchName=rack1 Nodes=n1
SwitchName=rack2 Nodes=n2
SwitchName=block Switches=rack[1-2]
"""


@dataclass(frozen=True)
class Slurm:
    """The cluster, and the commands of its users."""

    environment: dict[str, str]

    def run(self, *words: str) -> str:
        """The output of a command such as `sbatch`, which must succeed."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def submit(self, *words: str) -> str:
        """Submit a batch script; the job's id."""
        return self.run("sbatch", "--parsable", *words).strip()

    def facts(self, job: str) -> dict[str, str]:
        """What `scontrol show job` knows."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, job: str, *states: str, timeout_s: float = 120.0) -> str:
        """Wait until the job is in one of these states; returns it."""
        wait_for(lambda: self.facts(job)["JobState"] in states, timeout_s, f"job {job} is {states}")
        return self.facts(job)["JobState"]


@contextlib.contextmanager
def slurm_cluster(place: Path) -> Iterator[Slurm]:
    """Start a cluster whose files are in `place`; skips where this machine cannot run one."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs as other users, so it needs root")
    for name in ("state", "n1", "n2"):
        (place / name).mkdir(parents=True)
    place.chmod(0o755)  # munged asks for that
    key = place / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    ports = {name: free_port() for name in ("controller", "first", "second")}
    conf = place / "slurm.conf"
    # A batch script takes its port from the id of its job, which is unique on a real machine: two
    # clusters that both begin with job 1 would share a port. The controllers' ports differ.
    numbers = {"kill_wait": KILL_WAIT_S, "first_job": 3 * ports["controller"] % 30_000 + 1}
    conf.write_text(_CONF.format(place=place, **numbers, **ports))
    (place / "topology.conf").write_text(_TOPOLOGY)
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    slurm = Slurm(environment)
    munge = {"key-file": key, "socket": place / "munge.socket", "pid-file": place / "munged.pid",
             "log-file": place / "munged.log", "seed-file": place / "munge.seed"}  # fmt: skip
    with contextlib.ExitStack() as stack:

        def start(*words: str) -> None:
            daemon = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
            stack.callback(daemon.wait, 60)
            stack.callback(daemon.terminate)

        start("munged", "--foreground", "--force", *(f"--{k}={v}" for k, v in munge.items()))
        wait_for((place / "munge.socket").exists, 30, "munged")
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", "n1")
        start("slurmd", "-D", "-N", "n2")
        idle = ("sinfo", "--noheader", "--partition=low", "--states=idle", "--format=%D")
        wait_for(lambda: _try(slurm, *idle) == "2", 60, "two idle nodes")
        try:
            yield slurm
        finally:
            slurm.run("scancel", "--user=root", "--signal=KILL", "--full")
            _try(slurm, "scancel", "--user=root")
            wait_for(lambda: _try(slurm, "squeue", "--noheader") == "", 60, "no job is left")


def _try(slurm: Slurm, *words: str) -> str | None:
    done = subprocess.run(
        words, env=slurm.environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None
