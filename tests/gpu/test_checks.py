"""`make gpu-test` under pytest: on a GPU if there is one, else what holds on a CPU as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.__main__ import run_limited
from tests.support.cluster import is_alive
from tests.support.waiting import wait_for


@pytest.mark.full
@pytest.mark.gpu
def test_what_the_gpu_checks_claim_holds_here() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu"],
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout


def test_a_check_that_hangs_is_told_and_leaves_no_process_behind() -> None:
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    code, out, _ = run_limited(command, os.environ, 3)
    assert code is None
    wait_for(lambda: not is_alive(int(out)), 60, "the end of what the check has started")


def test_the_checks_are_found_beside_a_package_that_is_also_called_tests(tmp_path: Path) -> None:
    """Some wheels install one; Python prefers it to a folder without an __init__.py."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    path = os.pathsep.join((".", "engine", "orchestrator", str(tmp_path)))
    asked = [sys.executable, "-c", "import importlib.util as i; print(i.find_spec('tests.gpu'))"]
    found = subprocess.run(
        asked, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert "'tests.gpu'" in found.stdout, found.stderr
