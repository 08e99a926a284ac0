"""The stacks of running workers, taken without disturbing them, and why a killed one does not end.

A worker writes the Python stacks of its threads itself, on a signal (`worker_main`); this works
while it is stuck in a call of a library. py-spy, if it is installed, reads the stack of a process
from outside: native frames as well, and of programs that `worker_main` does not run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_agent.workers.worker_main import STACKS_SIGNAL
from zero_contract.kernel import text_of

WRITE_S = 2.0
"""How long a worker may take to write its stacks, which takes milliseconds."""
_POLL_S = 0.05
"""A file that does not grow for this long is complete."""
INSTALL = "pip install 'zero-elastic[stacks]' in the environment of the agent"


@dataclass(frozen=True, kw_only=True)
class Process:
    """A running worker."""

    rank: int
    pid: int
    parent: int
    """The forkserver's pid: a process of this pid with another parent is another one."""
    file: Path
    """The file into which it writes its stacks."""


def take(processes: Sequence[Process], *, native: bool, within_s: float) -> list[dict[str, Any]]:
    """The stacks of some workers: `rank`, `pid`, and `text`, `spy` or `problem`.

    `text` is the output of faulthandler, `spy` that of `py-spy dump --json`.
    """
    if native:
        with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
            found = list(pool.map(lambda one: _spy(one, within_s, "--native"), processes))
    else:
        # All are signalled before the first is read: they write at the same time.
        asked = [ask(one) for one in processes]
        deadline_s = time.monotonic() + min(WRITE_S, within_s)
        found = [
            _written(one, deadline_s) if was_asked else _spy(one, within_s)
            for one, was_asked in zip(processes, asked, strict=True)
        ]
    return [
        {"rank": one.rank, "pid": one.pid, **its} for one, its in zip(processes, found, strict=True)
    ]


def ask(process: Process) -> bool:
    """Ask a worker to write its stacks; False if that would end it, or it is gone."""
    with contextlib.suppress(OSError):
        # The descriptor keeps its meaning if the process ends and its pid is used again.
        handle = os.pidfd_open(process.pid)
        try:
            # A signal without a handler would end the process, and a pid may be another one's now.
            status = Path(f"/proc/{process.pid}/status").read_text(errors="replace")
            facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            handles = int(facts["SigCgt"], 16) >> (STACKS_SIGNAL - 1) & 1
            if int(facts["PPid"]) != process.parent or not handles:
                return False
            os.truncate(process.file, 0)  # the worker appends: stacks of before would be read
            signal.pidfd_send_signal(handle, STACKS_SIGNAL)
            return True
        finally:
            os.close(handle)
    return False


def _written(process: Process, deadline_s: float) -> dict[str, str]:
    """Read the stacks that a worker writes, once its file no longer grows."""
    # No line says that it is the last one: what stops growing is whole.
    size = 0
    while time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        with contextlib.suppress(OSError):
            before, size = size, process.file.stat().st_size
            if size and size == before:
                return {"text": process.file.read_text(errors="replace")}
    return {"problem": f"it does not write its stacks: {describe(process.pid)}"}


def _spy(process: Process, within_s: float, *flags: str) -> dict[str, str]:
    """The stacks of a process as py-spy sees them, or why there are none."""
    # Beside the interpreter first: a virtual environment that is not activated is not on the PATH.
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    what = f"process {process.pid}"
    if not Path(f"/proc/{process.pid}").exists():
        return {"problem": f"{what} has just ended"}
    if program is None:
        why = (
            "native frames need" if flags else "it does not write its stacks itself, so this needs"
        )
        return {"problem": f"{what}: {why} py-spy on its node: {INSTALL}"}
    command = [program, "dump", "--json", *flags, "--pid", str(process.pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=within_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"{what}: py-spy took longer than {within_s:g} s; use a longer --wait"}
    except OSError as error:
        return {"problem": f"{what}: {program} cannot be executed: {error.strerror}"}
    if done.returncode != 0:
        words = " ".join(done.stderr.split())
        problem = f"{what}: py-spy: {words or done.returncode}"
        if "ermission" in words:
            problem += (
                "; the agent needs CAP_SYS_PTRACE (Kubernetes: securityContext.capabilities.add)"
            )
        return {"problem": problem}
    return {"spy": done.stdout}


# An uninterruptible sleep (a GPU that fell off the bus, a hung NFS server), a frozen cgroup or a
# tracer keep SIGKILL pending for as long as they last, perhaps for ever.
GIVE_UP_S = 20.0
"""How long the agent waits for a process to end after SIGKILL."""
_STATES = {
    "D": "uninterruptible sleep",
    "R": "running",
    "S": "sleeping",
    "T": "stopped",
    "t": "held by a tracer",
    "Z": "zombie",
}
_FRAMES = 8
"""How many frames of a kernel stack are shown: the innermost ones."""


def describe(pid: int, proc: Path = Path("/proc")) -> str:
    """`process 7 (python) in state D (uninterruptible sleep), waiting in nfs_wait; stack: ...`."""
    # Of several threads the one in an uninterruptible sleep holds the process.
    threads = sorted((proc / str(pid) / "task").glob("*"), key=lambda path: _state(path) != "D")
    if not threads:
        return f"process {pid}, of which /proc shows nothing"
    thread = threads[0]
    state = _state(thread)
    words = [f"process {pid} ({text_of(thread / 'comm').strip()}) in state {state}"]
    words += [f" ({_STATES[state]})"] if state in _STATES else []
    wchan = text_of(thread / "wchan").strip()
    words += [f", waiting in {wchan}"] if wchan not in ("", "0") else []
    status = text_of(thread / "status").splitlines()
    tracer = next((line.split()[1] for line in status if line.startswith("TracerPid:")), "")
    words += [f", traced by process {tracer}"] if tracer not in ("", "0") else []
    frames = [line.split()[-1].split("+")[0] for line in text_of(thread / "stack").splitlines()]
    words += [f"; kernel stack: {' < '.join(frames[:_FRAMES])}"] if frames else []
    return "".join(words)


def is_stopped(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a signal, a tracer or a job scheduler has stopped every thread of a process."""
    states = {_state(thread) for thread in (proc / str(pid) / "task").glob("*")}
    return bool(states) and states <= {"T", "t"}


def _state(thread: Path) -> str:
    fields = text_of(thread / "stat").rpartition(")")[2].split()
    return fields[0] if fields else "?"
