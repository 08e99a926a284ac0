"""The agent and `zero-ctl` need no torch; what needs it says so in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.cluster import Cluster, environment

pytestmark = pytest.mark.processes

BLOCKED = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
"""
"""A `sitecustomize`: as in an environment without torch, for every process that begins with it."""
SCRIPT = "import os, sys, zero_agent; print(os.environ['RANK'], zero_agent.should_leave())\n"


@pytest.fixture
def without_torch(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BLOCKED)
    return {"PYTHONPATH": str(tmp_path / "site")}


@pytest.mark.etcd
def test_an_agent_without_torch_runs_a_job_to_its_end(tmp_path, cluster, without_torch):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job: Cluster = cluster(flags=("--nproc-per-node=2", "--max-restarts=0"), script=[str(script)])
    job.start("a", **without_torch)
    assert job.agents["a"].wait() == 0
    lines = [line.split("]")[-1].strip() for line in job.output.splitlines()]
    assert {"0 False", "1 False"} <= set(lines), job.output


@pytest.mark.parametrize(
    ("program", "words", "code", "text"),
    [
        ("ctl", ("--version",), 0, ""),
        ("agent", ("--version",), 0, ""),
        ("ckpt", ("ls", "."), 70, "torch is not installed: pip install 'zero-elastic[torch]'\n"),
    ],
)
def test_a_command_that_needs_torch_names_the_line_to_type(
    program, words, code, text, without_torch
):
    run = f"from zero_orchestrator.start import {program}; {program}()"
    done = subprocess.run(
        [sys.executable, "-c", run, *words],
        env=environment() | without_torch, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, text)
