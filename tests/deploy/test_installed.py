"""The package in a new environment, with nothing but what pyproject.toml asks for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, environment
from tests.support.new_environment import pip, python_with

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

SCRIPT = "import os, sys, zero_agent; print(os.environ['RANK'], zero_agent.should_leave())\n"
WORKS = {
    "dashboard": "import zero_orchestrator.ctl.page.server",
    "gcs": "import gcsfs",
    "metrics": "import zero_agent.loop.observed.metrics",
    "s3": "import s3fs",
    "stacks": "import zero_agent.workers.stacks; import shutil; assert shutil.which('py-spy')",
    "traces": "from zero_agent.loop.observed.traces import refusal as r; "
    "assert r({'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://c'}) is None",
}
"""Extra -> what works with it."""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, from a copy of its sources: a build writes beside them."""
    source = tmp_path_factory.mktemp("source")
    for name in ("orchestrator", "agent", "engine", "deploy"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = pip(Path(sys.executable), "wheel", "--no-deps", "-w", str(source / "dist"), str(source))
    assert done.returncode == 0, done.stderr
    [made] = (source / "dist").glob("*.whl")
    return made


def interpreter(version: str) -> str:
    """A Python of this version, on the PATH or of pyenv; skips without one."""
    places = [shutil.which(f"python{version}")]
    places += map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for place in filter(None, places):
        asked = [place, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return place
    pytest.skip(f"there is no Python {version} here")


def run(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A program of this environment, which sees no other."""
    here = {**environment(), "PATH": f"{python.parent}:/usr/bin:/bin"}
    here.pop("PYTHONPATH", None)
    return subprocess.run(
        words, env=here, cwd="/", capture_output=True, text=True, check=False, timeout=240
    )


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_agent_runs_a_job_without_torch(version, wheel, tmp_path):
    python = python_with(f"{wheel}[etcd]", base=interpreter(version))
    assert run(python, str(python), "-c", "import torch").returncode == 1
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    agent = str(python.parent / "zero-agent")
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=0", "--log-dir=/dev/null")
    done = run(python, agent, *flags, str(script))
    assert done.returncode == 0, done.stderr + done.stdout
    assert {"0 False", "1 False"} <= {
        line.split("]")[-1].strip() for line in done.stdout.splitlines()
    }


@pytest.mark.parametrize(
    ("program", "words", "line"),
    [
        ("zero-ckpt", ("ls", "."), "torch is not installed: pip install 'zero-elastic[torch]'"),
        (
            "zero-ctl",
            ("metrics",),
            "prometheus_client is not installed: pip install 'zero-elastic[metrics]'",
        ),
        (
            "zero-ctl",
            ("dashboard",),
            "zero-ctl: uvicorn is not installed: pip install 'zero-elastic[dashboard]'; "
            "`zero-ctl report` needs no dashboard",
        ),
    ],
)
def test_what_is_missing_is_one_line_that_says_what_to_type(program, words, line, wheel, etcd):
    python = python_with(f"{wheel}[etcd]", base=interpreter("3.11"))
    where = [f"--rdzv-endpoint={etcd.endpoint}"] if program == "zero-ctl" else []
    done = run(python, str(python.parent / program), *words, *where)
    assert done.returncode in (2, 70)
    assert done.stderr == f"{line}\n"


@pytest.mark.parametrize("extra", WORKS)
def test_an_extra_brings_what_it_is_for_and_no_torch(extra, wheel):
    python = python_with(f"{wheel}[{extra}]")
    done = run(python, str(python), "-c", WORKS[extra])
    assert done.returncode == 0, done.stderr
    assert run(python, str(python), "-c", "import torch").returncode == 1
