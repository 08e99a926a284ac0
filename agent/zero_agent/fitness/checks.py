"""What makes a node fit to take part: a table of checks, each of which looks at one thing.

A check returns what it found, or raises `Sick` with what is wrong and what to do about it.

Must always hold: a check changes nothing, except that it makes --log-dir, and leaves no process
behind. It may hang, as a call on a dead disk does: its caller has the deadline. Who calls it:
`examination`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from zero_agent.tether import tethered

DEADLINE_S = 10.0
"""For a check of ours; each takes milliseconds on a machine that is well."""
_GPU_S = 30.0
_MIB = 1 << 20
_SHM_PER_WORKER = 32 * _MIB
_MEMORY_PER_WORKER = 256 * _MIB
_DISK = 256 * _MIB
_FILES_PER_WORKER = 64
_FILES = 1024
_NOT_BEFORE = 1_735_689_600
"""2025-01-01: a clock that says less was never set."""
_LAST_LINES = 5
_TAIL_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the checks look at."""

    slots: int
    """Workers on this node."""
    gpus: bool
    """Each of them is to have a GPU."""
    address: str
    """Of this node, for the others; empty: not known yet."""
    log_dir: Path | None = None
    command: str = ""
    """The user's own check; empty: there is none."""
    command_timeout_s: float = 60.0
    ask_etcd: Callable[[], str] | None = None
    """Says how etcd is, or raises Sick; None: it is not asked."""
    ask_clock: Callable[[], str] | None = None
    """Says what is wrong with this clock beside another one; empty: nothing. None: unknown."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f} MiB"


class Sick(Exception):
    """A check found something that is wrong."""

    def __init__(self, found: str, remedy: str = "") -> None:
        super().__init__(found)
        self.found, self.remedy = found, remedy


def _shared_memory(node: Surroundings) -> str:
    free, need = shutil.disk_usage("/dev/shm").free, node.slots * _SHM_PER_WORKER
    if free < need:
        raise Sick(
            f"{_mib(free)} free in /dev/shm, {_mib(need)} needed",
            "remove what is left there; in a container give it more (docker run --shm-size)",
        )
    return f"{_mib(free)} free"


def _logs(node: Surroundings) -> str:
    assert node.log_dir is not None
    return _room("--log-dir", node.log_dir)


def _temporary(node: Surroundings) -> str:
    return _room("TMPDIR", Path(tempfile.gettempdir()))


def _room(name: str, path: Path) -> str:
    """Whether a directory can be written to, and has room."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
    except OSError as error:
        remedy = f"free some space, or name another directory with {name}"
        raise Sick(f"{path}: {error.strerror}", remedy) from error
    free = shutil.disk_usage(path).free
    if free < _DISK:
        raise Sick(
            f"{_mib(free)} free in {path}, {_mib(_DISK)} needed",
            f"free some space, or name another directory with {name}",
        )
    return f"{_mib(free)} free in {path}"


def _memory(node: Surroundings) -> str:
    free, need = _available(), node.slots * _MEMORY_PER_WORKER
    if free < need:
        raise Sick(
            f"{_mib(free)} available, {_mib(need)} needed for {node.slots} workers",
            "end what uses it, or start fewer workers with --nproc-per-node",
        )
    return f"{_mib(free)} available"


def _available() -> int:
    """Bytes that processes can still have: of the machine, and of the container it is in."""
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    facts = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in meminfo)}
    free = int(facts["MemAvailable"]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def _open_files(node: Surroundings) -> str:
    limit, need = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _FILES_PER_WORKER * node.slots
    need = max(_FILES, need)
    if limit != resource.RLIM_INFINITY and limit < need:
        raise Sick(f"a process may open {limit} files, {need} needed", f"ulimit -n {need}")
    return "any number" if limit == resource.RLIM_INFINITY else f"up to {limit}"


def _clock(node: Surroundings) -> str:
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    if time.time() < _NOT_BEFORE:
        raise Sick(f"it says {shown}", "set it: certificates and logs depend on it")
    if node.ask_clock is not None and (wrong := node.ask_clock()):
        raise Sick(f"{shown} UTC: {wrong}")
    return f"{shown} UTC"


def _gpus(node: Surroundings) -> str:
    there, shown = _count_gpus(), node.environ.get("CUDA_VISIBLE_DEVICES")
    visible = there if shown is None else min(there, len([d for d in shown.split(",") if d]))
    if visible < node.slots:
        why = "" if shown is None else f", CUDA_VISIBLE_DEVICES={shown}"
        raise Sick(
            f"{there} work{why}; {node.slots} needed",
            "look at nvidia-smi and dmesg, or start fewer workers with --nproc-per-node",
        )
    return f"{visible} of {there} for {node.slots} workers"


def _count_gpus() -> int:
    """Those that the driver can talk to; without its tool, those that have a device file."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=_GPU_S, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise Sick(f"nvidia-smi: {said[-1] if said else done.returncode}", "look at dmesg")
    return sum(1 for line in done.stdout.splitlines() if line.startswith("GPU "))


def _address(node: Surroundings) -> str:
    """Whether what this node tells the others leads here."""
    try:
        with socket.create_server((node.address, 0), family=_family(node.address)) as server:
            host, port = server.getsockname()[:2]
            with socket.create_connection((host, port), timeout=DEADLINE_S / 2):
                return f"{node.address} leads here"
    except OSError as error:
        remedy = "give --local-addr an address of this machine that the other nodes can reach"
        raise Sick(f"{node.address}: {error.strerror or error}", remedy) from error


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]


def _etcd(node: Surroundings) -> str:
    assert node.ask_etcd is not None
    return node.ask_etcd()


def _health_check(node: Surroundings) -> str:
    """The user's command; it and all that it starts are gone when this returns."""
    with tempfile.TemporaryFile() as output:  # not a pipe: something left behind may hold that
        process = subprocess.Popen(
            tethered(["/bin/sh", "-c", node.command], to_thread=True),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(node.environ),
            start_new_session=True,
        )
        try:
            code = process.wait(node.command_timeout_s)
        except subprocess.TimeoutExpired as expired:
            limit = f"{node.command_timeout_s:g} s"
            raise Sick(
                f"`{node.command}` did not end within {limit}; it said: {_last_lines(output)}",
                "--health-check-timeout gives it longer",
            ) from expired
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code != 0:
            raise Sick(f"`{node.command}` ended with {code} and said: {_last_lines(output)}")
        return _last_lines(output)


def _last_lines(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
    lines = output.read().decode(errors="replace").strip().splitlines()
    return " | ".join(lines[-_LAST_LINES:]) or "nothing"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table."""

    look: Callable[[Surroundings], str]
    applies: Callable[[Surroundings], bool] = lambda node: True
    limit_s: Callable[[Surroundings], float] = lambda node: DEADLINE_S


CHECKS: Mapping[str, Check] = {
    "shared memory": Check(look=_shared_memory),
    "memory": Check(look=_memory),
    "temporary files": Check(look=_temporary),
    "logs": Check(look=_logs, applies=lambda node: node.log_dir is not None),
    "open files": Check(look=_open_files),
    "clock": Check(look=_clock),
    "GPUs": Check(
        look=_gpus, applies=lambda node: node.gpus, limit_s=lambda node: _GPU_S + DEADLINE_S
    ),
    "address": Check(look=_address, applies=lambda node: bool(node.address)),
    "etcd": Check(look=_etcd, applies=lambda node: node.ask_etcd is not None),
    "health check": Check(
        look=_health_check,
        applies=lambda node: bool(node.command),
        limit_s=lambda node: node.command_timeout_s + DEADLINE_S,
    ),
}
"""In the order of `--preflight`."""
