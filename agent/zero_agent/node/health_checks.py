"""What makes a node fit to take part: a table of checks, run all at once, each with a deadline.

A check looks at one thing and returns what it found, or raises `HealthCheckFailed` with what is
wrong and what to do about it. It runs on a thread of its own, so that a call that never returns is
a finding and not a hang: it is left behind, and named.

Before it has joined, an unhealthy node waits, tries again at growing intervals, and gives up after
--join-timeout; or much sooner, if no other node is there to train without it (`patience`). After a
failure of its own workers the checks run on a thread beside the agent's loop; the node says "quiet"
only when they have ended, so the next round begins with it, or, if it is unfit, without it. An
unfit node stays in the job as a spare that is not eligible.

Must always hold: a check changes nothing, except that it makes --log-dir, and leaves no process
behind; `examine` returns within the longest deadline of its checks; the agent's loop never waits
for a check. Who calls it: `cli` and the agent's loop; `preflight`, for the user.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from zero_agent.errors import AgentFailed
from zero_agent.node.process_control import dying_with_parent
from zero_contract.clock import Clock, Stopwatch
from zero_contract.exit_codes import AgentExit
from zero_contract.journal import Journal

log = logging.getLogger("zero")

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
"""Between two examinations of an unhealthy node; each pause is twice the one before."""
ALONE_S = 30.0
"""So long an unhealthy node waits that sees no other of its job: others may be starting, but
without any nothing goes on, and whoever has started it should know..."""
SINGLE_S = 5.0
"""...and so long where there can be no other: it is looked at once or twice more."""
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
    """Says how etcd is, or raises HealthCheckFailed; None: it is not asked."""
    ask_clock: Callable[[], str] | None = None
    """Says what is wrong with this clock beside another one; empty: nothing. None: unknown."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f} MiB"


class HealthCheckFailed(Exception):
    """A check found something that is wrong."""

    def __init__(self, found: str, remedy: str = "") -> None:
        super().__init__(found)
        self.found, self.remedy = found, remedy


def _shared_memory(node: Surroundings) -> str:
    free, need = shutil.disk_usage("/dev/shm").free, node.slots * _SHM_PER_WORKER
    if free < need:
        raise HealthCheckFailed(
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
        raise HealthCheckFailed(f"{path}: {error.strerror}", remedy) from error
    free = shutil.disk_usage(path).free
    if free < _DISK:
        raise HealthCheckFailed(
            f"{_mib(free)} free in {path}, {_mib(_DISK)} needed",
            f"free some space, or name another directory with {name}",
        )
    return f"{_mib(free)} free in {path}"


def _memory(node: Surroundings) -> str:
    free, need = _available(), node.slots * _MEMORY_PER_WORKER
    if free < need:
        raise HealthCheckFailed(
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
        raise HealthCheckFailed(
            f"a process may open {limit} files, {need} needed", f"ulimit -n {need}"
        )
    return "any number" if limit == resource.RLIM_INFINITY else f"up to {limit}"


def _clock(node: Surroundings) -> str:
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    if time.time() < _NOT_BEFORE:
        raise HealthCheckFailed(f"it says {shown}", "set it: certificates and logs depend on it")
    if node.ask_clock is not None and (wrong := node.ask_clock()):
        raise HealthCheckFailed(f"{shown} UTC: {wrong}")
    return f"{shown} UTC"


def _gpus(node: Surroundings) -> str:
    there, shown = _count_gpus(), node.environ.get("CUDA_VISIBLE_DEVICES")
    visible = there if shown is None else min(there, len([d for d in shown.split(",") if d]))
    if visible < node.slots:
        why = "" if shown is None else f", CUDA_VISIBLE_DEVICES={shown}"
        raise HealthCheckFailed(
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
        raise HealthCheckFailed(
            f"nvidia-smi: {said[-1] if said else done.returncode}", "look at dmesg"
        )
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
        raise HealthCheckFailed(f"{node.address}: {error.strerror or error}", remedy) from error


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]


def _etcd(node: Surroundings) -> str:
    assert node.ask_etcd is not None
    return node.ask_etcd()


def _health_check(node: Surroundings) -> str:
    """The user's command; it and all that it starts are gone when this returns."""
    with tempfile.TemporaryFile() as output:  # not a pipe: something left behind may hold that
        process = subprocess.Popen(
            dying_with_parent(["/bin/sh", "-c", node.command], to_thread=True),
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
            raise HealthCheckFailed(
                f"`{node.command}` did not end within {limit}; it said: {_last_lines(output)}",
                "--health-check-timeout gives it longer",
            ) from expired
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code != 0:
            raise HealthCheckFailed(
                f"`{node.command}` ended with {code} and said: {_last_lines(output)}"
            )
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


# ---- all of them ----


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found."""

    check: str
    fit: bool
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.found}" + (f"; {self.remedy}" if self.remedy else "")


def examine(node: Surroundings) -> tuple[Finding, ...]:
    """Run every check that applies; takes as long as the slowest of them."""
    runs = [_Run(name, check, node) for name, check in CHECKS.items() if check.applies(node)]
    return tuple(run.finding() for run in runs)


def complaint(findings: Sequence[Finding]) -> str:
    """Why a node is not fit, in one line; empty if it is."""
    return "; ".join(str(finding) for finding in findings if not finding.fit)


class _Run:
    """One check on its thread."""

    def __init__(self, name: str, check: Check, node: Surroundings) -> None:
        self._name = name
        self._limit_s = check.limit_s(node)
        self._deadline_s = time.monotonic() + self._limit_s
        self._result: Finding | None = None
        self._thread = threading.Thread(
            target=self._look, args=(check, node), name=f"check {name}", daemon=True
        )
        self._thread.start()

    def finding(self) -> Finding:
        """What it found, when it has or when its time is up."""
        self._thread.join(max(0.0, self._deadline_s - time.monotonic()))
        hangs = f"no answer within {self._limit_s:g} s"
        return self._result or self._told(False, hangs, "the machine or a disk of it hangs")

    def _look(self, check: Check, node: Surroundings) -> None:
        try:
            self._result = self._told(True, check.look(node))
        except HealthCheckFailed as failed:
            self._result = self._told(False, failed.found, failed.remedy)
        except Exception as error:
            self._result = self._told(False, str(error))

    def _told(self, fit: bool, found: str, remedy: str = "") -> Finding:
        return Finding(check=self._name, fit=fit, found=found, remedy=remedy)


# ---- what an agent does about them ----


def patience(timeout_s: float, *, max_nodes: int, others: bool) -> tuple[float, str]:
    """How long an unhealthy node waits to become healthy, and what limits that.

    Args:
        timeout_s: --join-timeout.
        max_nodes: Of the job: where it is 1, nobody else will come.
        others: Another node of the job is alive.
    """
    alone_s = SINGLE_S if max_nodes == 1 else ALONE_S
    if others or timeout_s <= alone_s:
        return timeout_s, "--join-timeout"
    return alone_s, "there is no other node to run the job without it"


def await_fit(
    node: Surroundings,
    timeout_s: float,
    tell: Callable[[str], None] = lambda why: None,
    *,
    max_nodes: int,
    others: Callable[[], bool],
) -> None:
    """Return when this node is healthy, and may join.

    Args:
        node: What is looked at.
        timeout_s: How long to be patient while others run the job.
        tell: Told why it is not healthy, each time.
        max_nodes: Of the job.
        others: Whether another node of the job is alive.

    Raises:
        AgentFailed: It has not become so in time.
    """
    began_s, pause_s = time.monotonic(), FIRST_PAUSE_S
    while why := complaint(examine(node)):
        limit_s, limit = patience(timeout_s, max_nodes=max_nodes, others=others())
        left_s = began_s + limit_s - time.monotonic()
        if left_s <= 0:
            raise _unfit(why, limit_s, limit)
        log.warning(
            "this node does not join yet: %s; it is checked again, for %.0f s more (%s)",
            why,
            left_s,
            limit,
        )
        tell(why)
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _unfit(why: str, limit_s: float, limit: str) -> AgentFailed:
    return AgentFailed(
        AgentExit.UNFIT, f"this node has not become healthy within {limit_s:g} s ({limit}): {why}"
    )


class HealthChecks:
    """The fitness of a node that has joined."""

    def __init__(
        self,
        node: Surroundings,
        timeout_s: float,
        *,
        max_nodes: int,
        clock: Clock,
        journal: Journal,
        post: Callable[[Callable[..., None]], Callable[..., None]],
    ) -> None:
        """It was fit when it joined.

        Args:
            node: What to look at.
            timeout_s: --join-timeout.
            max_nodes: Of the job.
            clock: Paces the examinations of an unhealthy node.
            journal: Told when the node falls ill and when it is well again.
            post: Wraps a handler so that it runs on the agent's thread.
        """
        self._node = node
        self._journal = journal
        self._timeout_s = timeout_s
        self._max_nodes = max_nodes
        self._done = post(self._examined)
        self._ill, self._paused = Stopwatch(clock), Stopwatch(clock)
        self._pause_s = FIRST_PAUSE_S
        self.checking = False
        """An examination is under way."""
        self.complaint = ""
        """Why the node is not fit; empty: it is."""

    def examine(self) -> None:
        """Begin an examination, unless one is under way."""
        if not self.checking:
            self.checking = True
            self._paused.stop()
            threading.Thread(target=self._run, name="fitness", daemon=True).start()

    def check_limit(self, *, needed: bool) -> None:
        """Examine an unhealthy node again when it is time.

        Args:
            needed: Another node is alive, or this one holds checkpoints in memory: it may wait.

        Raises:
            AgentFailed: It has been unhealthy for too long.
        """
        limit_s, limit = patience(self._timeout_s, max_nodes=self._max_nodes, others=needed)
        if self._ill.past(limit_s):
            raise _unfit(self.complaint, limit_s, limit)
        if self._paused.past(self._pause_s):
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self.examine()

    def _run(self) -> None:
        self._done(complaint(examine(self._node)))

    def _examined(self, why: str) -> None:
        self.checking = False
        if bool(why) != bool(self.complaint):  # amounts in a complaint change all the time
            self.complaint = why
            text = f"this node is unfit: {why}" if why else "this node is fit again"
            self._journal.tell("health", text, level=logging.WARNING if why else logging.INFO)
        if why:
            self._ill.start()
            self._paused.start()
        else:
            self._ill.stop()
            self._pause_s = FIRST_PAUSE_S
