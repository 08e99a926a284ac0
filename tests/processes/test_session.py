"""The commands of a launch, while they run: what they print, and when the session ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.cluster import environment

pytestmark = pytest.mark.processes

SESSION = """
import sys
from zero_agent.launch.runners import Command
from zero_agent.launch.session import Session
command = Command(where="here", argv=("sh", "-c", "echo begun; sleep 600 & echo $!; echo ended"))
sys.exit(Session([command], lambda: None).run())
"""


def test_a_session_ends_with_its_commands_though_something_keeps_their_pipe_open() -> None:
    """As ssh does that keeps its connection for later: ControlPersist."""
    done = subprocess.run(
        [sys.executable, "-c", SESSION],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    begun, kept, ended = done.stdout.split()
    os.kill(int(kept), signal.SIGKILL)  # it was still there
    assert (done.returncode, begun, ended) == (0, "begun", "ended")
