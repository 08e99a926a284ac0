"""Processes that a test suspends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.waiting import wait_for


def suspend(*pids: int) -> None:
    """Suspend processes, and wait until they are: a thread on another CPU runs on for a moment."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        wait_for(lambda pid=pid: is_suspended(pid), 60.0, f"every thread of {pid} is suspended")


def is_suspended(pid: int) -> bool:
    stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}
