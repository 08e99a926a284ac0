"""`make gpu-test` under pytest: on a GPU if there is one, else what holds on a CPU as well."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
