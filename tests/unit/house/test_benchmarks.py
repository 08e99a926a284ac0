"""The scripts of benchmarks start as their page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
IN_TURN = """
import os, runpy, sys
import torch, zero_engine, zero_torch  # once for all scripts, which are forked from here

for script in sys.argv[1:]:
    if (child := os.fork()) == 0:
        sys.path[0] = os.path.dirname(script)
        sys.argv = [script, "--help"]
        runpy.run_path(script, run_name="__main__")
        os._exit(1)  # it was to end by itself
    print("exit code of", script, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.full
@pytest.mark.timeout(660)
def test_each_script_of_the_page_tells_what_it_measures(tmp_path):
    page = (ROOT / "benchmarks/README.md").read_text()
    scripts = {str(ROOT / "benchmarks" / name) for name in re.findall(r"`(\w+\.py)`", page)}
    scripts |= {str(ROOT / path) for path in re.findall(r"^python (benchmarks/\S+)", page, re.M)}
    ran = subprocess.run(
        [sys.executable, "-c", IN_TURN, *sorted(scripts)],
        cwd=tmp_path,  # a script finds what it imports wherever it is started
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    ended = re.findall(r"^exit code of (.*) (-?\d+)$", ran.stdout, re.M)
    assert sorted(ended) == [(script, "0") for script in sorted(scripts)], ran.stderr


def test_chaos_refuses_a_kind_of_fault_that_there_is_not():
    chaos = [sys.executable, str(ROOT / "benchmarks/chaos.py"), "--schedule", "--only=no such"]
    ran = subprocess.run(chaos, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "no fault has 'no such' in its name; there are: " in ran.stderr
