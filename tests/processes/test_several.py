"""The agents that `zero-ctl run` starts on this machine, and a signal that comes early."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import environment
from tests.support.network import kill_all_with
from zero_contract.exit_codes import AgentExit

COUNT = 3

SIGNAL_AT = """
import os, signal, sys

def hook(event, args):
    if event == "subprocess.Popen" and "zero_agent" in args[1]:
        with open({started!r}, "a") as file:
            print(*args[1], file=file)
        with open({started!r}) as file:
            if len(file.readlines()) == {last}:
                os.kill(os.getpid(), {number})

if sys.orig_argv[1:3] == ["-m", "zero_agent.launch.local_agents"]:
    sys.addaudithook(hook)
"""
"""As sitecustomize: the signal comes while the last agent that is to start is being started."""


@pytest.mark.processes
@pytest.mark.etcd
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("last", range(1, COUNT + 1))
def test_a_signal_while_agents_are_started_reaches_those_and_no_other_starts(
    tmp_path: Path, etcd, last: int, number: signal.Signals
):
    started = tmp_path / "started"
    (tmp_path / "sitecustomize.py").write_text(
        SIGNAL_AT.format(started=str(started), last=last, number=int(number))
    )
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('a round has begun')\n")
    flags = ["--rdzv-endpoint", etcd.endpoint, "--rdzv-id", tmp_path.name, "--nnodes", str(COUNT)]
    marked = environment() | {"RUN": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "zero_agent.launch.local_agents", str(COUNT), *flags, script],
            env=marked, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    finally:
        kill_all_with("RUN", str(tmp_path))
    assert len(started.read_text().splitlines()) == last
    # All have ended, or their output would not have. The second code is of an agent that had come
    # far enough to leave.
    assert done.returncode in (128 + number, AgentExit.DRAINED), done.stderr
    assert "a round has begun" not in done.stderr
    assert "Traceback" not in done.stderr
