"""One table of exit codes: the page, the manifests and the launcher say what it says."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.flags import parse
from zero_agent.launch.plan import LaunchPlan
from zero_agent.launch.runners import Command
from zero_agent.launch.session import Session
from zero_contract.exit_codes import (
    AGENT,
    CRASHED,
    AgentExit,
    Kubernetes,
    Systemd,
    verdict,
)

ROOT = Path(__file__).resolve().parents[3]
JOB = next(yaml.safe_load_all((ROOT / "deploy/kubernetes/base/job.yaml").read_text()))
UNIT = (ROOT / "deploy/systemd/zero-agent@.service").read_text()

SBATCH = (ROOT / "deploy/slurm/zero_agent.sbatch").read_text()


def codes_of(consequence: object) -> set[int]:
    return {code for meaning in AGENT if consequence in meaning for code in meaning.codes}


@pytest.mark.parametrize("action", [Kubernetes.FAIL_JOB, Kubernetes.FAIL_INDEX, Kubernetes.IGNORE])
def test_kubernetes_does_what_the_table_says(action):
    found = {
        code
        for rule in JOB["spec"]["podFailurePolicy"]["rules"]
        if f"`{rule['action']}`" in action and "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
    }
    assert found == codes_of(action)


def test_on_kubernetes_a_stop_completes_the_job_and_does_not_fail_it():
    base = yaml.safe_load((ROOT / "deploy/kubernetes/base/kustomization.yaml").read_text())
    literals = next(m["literals"] for m in base["configMapGenerator"] if m["name"] == "agent")
    [code] = [one.partition("=")[2] for one in literals if one.startswith("PET_STOP_EXIT_CODE=")]
    assert int(code) in codes_of(Kubernetes.COMPLETE)
    flags = parse(["train.py"], {"PET_STOP_EXIT_CODE": code})
    assert (flags.stop_exit_code, parse(["t.py"], {}).stop_exit_code) == (0, 5)


def test_systemd_does_what_the_table_says():
    [success] = re.findall(r"^SuccessExitStatus=(.*)$", UNIT, re.MULTILINE)
    [final] = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT, re.MULTILINE)
    down = {0, *map(int, success.split()), *map(int, final.split())}
    assert down == codes_of(Systemd.STAYS_DOWN)


def test_the_batch_script_starts_an_agent_again_as_the_table_says():
    [final] = re.findall(r"case \$code in (.*)\) exit", SBATCH)
    by_hand = {128 + signal.SIGHUP, 128 + signal.SIGINT}
    assert set(map(int, final.split("|"))) == codes_of(Systemd.STAYS_DOWN) | by_hand


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([AgentExit.CRASHED, 0], 0),
        ([1, AgentExit.JOB_FAILED], AgentExit.JOB_FAILED),
        ([AgentExit.CRASHED, AgentExit.NO_PROGRESS], AgentExit.NO_PROGRESS),
        ([AgentExit.CRASHED, AgentExit.UNHEALTHY], AgentExit.CRASHED),
        ([-9, 1], 137),
    ],
)
def test_several_agents_end_as_one_that_saw_the_jobs_end(codes, code):
    assert verdict(codes) == code


def test_a_host_without_the_shared_directory_is_unfit_and_ends_nobodys_job(tmp_path):
    plan = LaunchPlan(
        hosts={"w1": (0,)},
        job="gpt",
        endpoint="127.0.0.1:1",
        program=("train.py",),
        env={},
        python=sys.executable,
        directory=tmp_path / "not mounted",
    )
    there = ("sh", "-c", f"{plan.in_shell('w1')}")
    commands = [Command(where="w1", argv=there), Command(where="w2", argv=("sleep", "0.5"))]
    assert subprocess.run(there, capture_output=True, check=False).returncode == AgentExit.UNHEALTHY
    assert Session(commands, ask_to_stop=lambda: None).run() == 0


PROGRAMS = {
    "def main(): raise RuntimeError('cannot start new thread')": (
        "internal error in program; no verdict on any job"
    ),
    "import no_such_module": "no_such_module is not installed: pip install zero-elastic",
    "import zero_no_such_module": "internal error in program; no verdict on any job",
}


@pytest.mark.parametrize(("text", "told"), PROGRAMS.items())
def test_a_crash_is_told_from_every_verdict(tmp_path, text, told):
    (tmp_path / "program.py").write_text(text)
    start = "from zero_orchestrator.start import run; run('program')"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {start}"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == CRASHED
    assert done.stderr.splitlines()[-1] == told
