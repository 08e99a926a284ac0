"""Processes that no signal reaches: in a frozen cgroup, of the first version's freezer.

(The second version's freezer lets SIGKILL through.)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.support.waiting import wait_for

FREEZER = Path("/sys/fs/cgroup/freezer")


def why_not() -> str | None:
    """What keeps this machine from freezing processes so, or None."""
    if os.geteuid() != 0:
        return "freezing a cgroup needs root"
    if not (FREEZER / "cgroup.procs").exists():
        return f"there is no freezer of cgroup v1 at {FREEZER}"
    return None


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Keep a process, with all its threads, from running and from dying."""
    group = FREEZER / f"zero-test-{os.getpid()}-{pid}"
    group.mkdir()
    state = group / "freezer.state"
    try:
        (group / "cgroup.procs").write_text(str(pid))
        state.write_text("FROZEN")
        wait_for(lambda: state.read_text() == "FROZEN\n", 30, "the freeze")
        yield
    finally:
        state.write_text("THAWED")
        _leave(group)


def _leave(group: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError, OSError):
            (FREEZER / "cgroup.procs").write_text(pid)

    def gone() -> bool:
        with contextlib.suppress(OSError):
            group.rmdir()
        return not group.exists()

    wait_for(gone, 30, "the cgroup to be empty")
