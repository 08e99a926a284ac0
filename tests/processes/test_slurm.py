"""A job on a real Slurm: it saves when Slurm ends it, and resumes with the same bits."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, SAMPLES, Cluster, final_hash, paced, training
from tests.support.slurm import KILL_WAIT_S, Slurm, slurm_cluster
from tests.support.waiting import wait_for
from zero_agent.etcd.etcd_process import find_etcd
from zero_data.ledger import read_ledger, verify

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.full]

SBATCH = ROOT / "deploy" / "slurm" / "zero_agent.sbatch"


@dataclass(frozen=True)
class Job:
    """The example on two nodes, submitted with the batch script as it is shipped."""

    slurm: Slurm
    id: str
    directory: Path
    view: Cluster

    def submit_again(self) -> Job:
        """The same training as another job of Slurm."""
        return submit(self.slurm, self.directory)

    @property
    def output(self) -> str:
        log = self.directory / f"gpt-{self.id}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def wait_for_step(self, step: int, timeout_s: float = 120.0) -> None:
        self.view.wait_for_step(step, world=2, timeout_s=timeout_s)

    def finish(self) -> None:
        """Hurry, and wait until Slurm says that the job has completed."""
        self.view.pace(0)
        state = self.slurm.wait_for_state(self.id, "COMPLETED", "FAILED", timeout_s=240)
        assert state == "COMPLETED", self.output

    def finish_again(self) -> None:
        """As `finish`, once Slurm has requeued the job, which it would start in two minutes.

        Not in the second of the requeue either: the credentials of both runs would be one.
        """
        self.slurm.run("scontrol", "update", f"jobid={self.id}", "starttime=now+3")
        self.finish()

    def last_step(self) -> int:
        """The last step that any worker has finished."""
        return max(step for step, _ in self.view.last_steps().values())

    def saved_step(self) -> int:
        """The step of the newest complete checkpoint."""
        manifests = (self.directory / "checkpoints").glob("global_step*/MANIFEST.json")
        return max(
            (int(path.parent.name.removeprefix("global_step")) for path in manifests), default=0
        )

    def left_behind(self) -> list[str]:
        """Files with a token, a key or etcd's data."""
        data = (self.directory / "state").glob("*/store-*/data")
        return sorted(map(str, [*self.directory.glob(".zero-*"), *data]))


def submit(slurm: Slurm, directory: Path, *options: str) -> Job:
    script = paced(training(directory), directory)
    job = slurm.submit(
        "--nodes=2", "--job-name=gpt", "--cpus-per-task=2", "--time=00:30:00",
        f"--chdir={directory}", *options, str(SBATCH), *script,
    )  # fmt: skip
    return Job(slurm, job, directory, Cluster(directory, "", f"gpt-{job}"))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job that has finished ten steps."""
    for name in [name for name in os.environ if name.startswith(("PET_", "ZERO_"))]:
        monkeypatch.delenv(name)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "etcd").symlink_to(find_etcd())
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PET_LOG_DIR", f"{tmp_path}/logs")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with slurm_cluster(tmp_path / "slurm") as slurm:
        job = submit(slurm, tmp_path)
        try:
            job.wait_for_step(10)
            yield job
        except BaseException as error:
            error.add_note(job.output)
            raise


def same_bits(job: Job, undisturbed_hash: str) -> None:
    assert final_hash(job.output) == undisturbed_hash
    report = verify(read_ledger(job.directory / "ledger"), SAMPLES)
    assert (report.problems, report.repeated_steps) == ((), 0)
    assert job.left_behind() == []


def test_an_agent_on_slurm_knows_the_switches_above_its_node(tmp_path):
    show = "from zero_agent.command.resolve import topology_of; print(topology_of(os.environ))"
    with slurm_cluster(tmp_path / "slurm") as slurm:
        words = ("srun", "--nodes=2", sys.executable, "-c", f"import os; {show}")
        assert sorted(slurm.run(*words).split()) == ["block.rack1", "block.rack2"]


def test_a_job_that_nears_its_limit_saves_its_step_is_requeued_and_ends_with_the_same_bits(
    job, undisturbed_hash
):
    job.slurm.run("scancel", "--signal=USR1", "--batch", job.id)  # what --signal=B:USR1@300 does
    job.slurm.wait_for_state(job.id, "PENDING")
    assert job.saved_step() == job.last_step() >= 10
    job.finish_again()
    assert "drained before the end of the allocation; requeued" in job.output
    same_bits(job, undisturbed_hash)


def test_scancel_saves_the_step_within_kill_wait_and_leaves_a_verdict_and_no_secret(
    job, undisturbed_hash
):
    job.slurm.run("scancel", job.id)
    job.slurm.wait_for_state(job.id, "CANCELLED", timeout_s=KILL_WAIT_S)
    assert job.saved_step() == job.last_step() >= 10, job.output
    status = json.loads((job.directory / f"gpt-{job.id}.json").read_text())
    assert status["state"] != "DONE"
    assert job.left_behind() == []
    again = job.submit_again()
    again.finish()
    same_bits(again, undisturbed_hash)


def test_a_preempted_job_saves_within_the_grace_time_is_requeued_and_resumes(job, undisturbed_hash):
    other = job.slurm.submit(
        "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "true"
    )
    job.slurm.wait_for_state(job.id, "PENDING")
    assert job.saved_step() == job.last_step() >= 10
    job.slurm.wait_for_state(other, "COMPLETED")
    job.finish_again()
    same_bits(job, undisturbed_hash)


def test_a_job_that_is_requeued_by_hand_saves_and_resumes(job, undisturbed_hash):
    job.slurm.run("scontrol", "requeue", job.id)
    job.slurm.wait_for_state(job.id, "PENDING")
    assert job.saved_step() == job.last_step() >= 10
    job.finish_again()
    same_bits(job, undisturbed_hash)


def test_an_agent_that_dies_alone_comes_back_to_its_node(job, undisturbed_hash):
    agents = {e["node"]: e["pid"] for e in job.view.events("worker")}
    assert len(agents) == 2
    node = sorted(agents)[1]
    os.kill(_agent_of(agents[node]), signal.SIGKILL)
    wait_for(lambda: "it is started again" in job.output, 60, "another agent on that node")
    before = job.last_step()
    job.wait_for_step(before + 3)
    job.finish()
    assert final_hash(job.output) == undisturbed_hash
    assert verify(read_ledger(job.directory / "ledger"), SAMPLES).problems == ()


def _agent_of(worker: int) -> int:
    """The pid of the agent: the parent of the fork server, which is the parent of the worker."""

    def parent(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])

    return parent(parent(worker))
