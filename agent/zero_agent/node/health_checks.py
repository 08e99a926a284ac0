"""Health checks of a node: a table of checks, all run at once, each with a deadline.

A check looks at one thing and returns what it found, or raises `HealthCheckFailed` with what is
wrong and the remedy. It changes nothing, except that it makes --log-dir.

Before it has joined, an unhealthy node waits, and is checked again with exponential backoff. After
a failure of the node's workers the checks run beside the agent's loop, and the next round begins
with the node, or, if it is unhealthy, without it: it stays in the job as a spare.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from zero_agent.errors import AgentFailed
from zero_agent.node.beside import beside
from zero_agent.node.process_control import dying_with_parent
from zero_contract.clock import Clock, Stopwatch
from zero_contract.exit_codes import AgentExit
from zero_contract.journal import Journal
from zero_contract.kernel import available_bytes

log = logging.getLogger("zero")

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
"""Exponential backoff of the checks of an unhealthy node: each pause is twice the one before."""
ALONE_S = 30.0
"""How long an unhealthy node waits that sees no other node of its job. Other nodes may be starting,
but without any of them the job makes no progress, and the user should learn of it."""
SINGLE_S = 5.0
"""How long an unhealthy node waits that is the job's only node (--nnodes=1)."""
DEADLINE_S = 10.0
"""Deadline of a built-in check, seconds; a check takes milliseconds on a healthy machine."""
_GPU_S = 30.0  # nvidia-smi takes seconds where the driver is not loaded for good
_MIB = 1 << 20
# What the smallest job needs: a check finds a broken machine, and no job that is too large.
_SHM_PER_WORKER = 32 * _MIB
_MEMORY_PER_WORKER = 256 * _MIB
_DISK = 256 * _MIB
_FILES_PER_WORKER = 64
_FILES = 1024
_NOT_BEFORE = 1_735_689_600
"""2025-01-01, in Unix seconds: a clock that shows an earlier time was never set."""
_LAST_LINES = 5
_TAIL_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the checks look at."""

    slots: int
    """Workers on this node."""
    gpus: bool
    """Whether each worker needs its own GPU."""
    address: str
    """This node's address, as the other nodes dial it; empty if it is not known yet."""
    log_dir: Path | None = None
    command: str = ""
    """The command of --health-check; empty if there is none."""
    command_timeout_s: float = 60.0
    ask_etcd: Callable[[], str] | None = None
    """Returns the state of etcd or raises HealthCheckFailed; None: etcd is not checked."""
    ask_clock: Callable[[], str] | None = None
    """Returns how this clock differs from another one, empty if it does not; None: no other clock
    is known."""
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
            "remove what is left there; in a container make it larger (docker run --shm-size)",
        )
    return f"{_mib(free)} free"


def _room(name: str, path: Path) -> str:
    """Check that a directory can be written to and has free space; `name` sets the directory."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Some bytes are written: a quota, and a disk that has gone read-only, show only then.
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
    """Check the bytes that processes can still allocate: of the machine, and of its container."""
    free, need = available_bytes(), node.slots * _MEMORY_PER_WORKER
    if free < need:
        raise HealthCheckFailed(
            f"{_mib(free)} available, {_mib(need)} needed for {node.slots} workers",
            "end what uses it, or start fewer workers with --nproc-per-node",
        )
    return f"{_mib(free)} available"


def allow_files(slots: int) -> None:
    """Let this process and those that it starts open as many files as they need, if they may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = _files(slots)
    if soft < need and soft != resource.RLIM_INFINITY:
        with contextlib.suppress(ValueError, OSError):  # the hard limit is lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def _files(slots: int) -> int:
    return max(_FILES, _FILES_PER_WORKER * slots)


def _open_files(node: Surroundings) -> str:
    # The hard limit: up to that `allow_files` raises the other one.
    limit, need = resource.getrlimit(resource.RLIMIT_NOFILE)[1], _files(node.slots)
    if limit != resource.RLIM_INFINITY and limit < need:
        raise HealthCheckFailed(
            f"a process may open {limit} files, {need} needed", f"ulimit -n {need}"
        )
    return "any number" if limit == resource.RLIM_INFINITY else f"up to {limit}"


def _clock(node: Surroundings) -> str:
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    if time.time() < _NOT_BEFORE:
        raise HealthCheckFailed(f"it shows {shown}", "set it: certificates and logs depend on it")
    if node.ask_clock is not None and (wrong := node.ask_clock()):
        raise HealthCheckFailed(f"{shown} UTC: {wrong}")
    return f"{shown} UTC"


def _gpus(node: Surroundings) -> str:
    there, shown = _count_gpus(), node.environ.get("CUDA_VISIBLE_DEVICES")
    # The variable may name more than the driver reaches: one may have fallen off the bus since.
    visible = there if shown is None else min(there, len([d for d in shown.split(",") if d]))
    if visible < node.slots:
        why = "" if shown is None else f", CUDA_VISIBLE_DEVICES={shown}"
        raise HealthCheckFailed(
            f"{there} work{why}; {node.slots} needed",
            "look at nvidia-smi and dmesg, or start fewer workers with --nproc-per-node",
        )
    return f"{visible} of {there} for {node.slots} workers"


def _count_gpus() -> int:
    """Count the GPUs that the driver can reach; without nvidia-smi, the GPUs' device files."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=_GPU_S, check=False)
    if done.returncode != 0:
        printed = (done.stdout + done.stderr).strip().splitlines()
        raise HealthCheckFailed(
            f"nvidia-smi: {printed[-1] if printed else done.returncode}", "look at dmesg"
        )
    return sum(1 for line in done.stdout.splitlines() if line.startswith("GPU "))


def _address(node: Surroundings) -> str:
    """Check that the address which this node publishes leads to this node."""
    try:
        # The connection stays in the backlog: nobody has to accept it.
        family = socket.getaddrinfo(node.address, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((node.address, 0), family=family) as server:
            host, port = server.getsockname()[:2]
            with socket.create_connection((host, port), timeout=DEADLINE_S / 2):
                return f"{node.address} leads here"
    except OSError as error:
        remedy = "give --local-addr an address of this machine that the other nodes can reach"
        raise HealthCheckFailed(f"{node.address}: {error.strerror or error}", remedy) from error


def _health_check(node: Surroundings) -> str:
    """Run the command of --health-check; it and all of its children have ended on return."""
    with tempfile.TemporaryFile() as output:  # a process left behind could hold a pipe open
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
                f"`{node.command}` did not end within {limit}; it printed: {_last_lines(output)}",
                "raise --health-check-timeout if it needs longer",
            ) from expired
        finally:
            # Also after an orderly end: the command may have left children in its session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code != 0:
            raise HealthCheckFailed(
                f"`{node.command}` ended with {code} and printed: {_last_lines(output)}"
            )
        return _last_lines(output)


def _last_lines(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
    lines = output.read().decode(errors="replace").strip().splitlines()
    return " | ".join(lines[-_LAST_LINES:]) or "nothing"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of `CHECKS`."""

    look: Callable[[Surroundings], str]
    applies: Callable[[Surroundings], bool] = lambda node: True
    limit_s: Callable[[Surroundings], float] = lambda node: DEADLINE_S


CHECKS: Mapping[str, Check] = {
    "shared memory": Check(look=_shared_memory),
    "memory": Check(look=_memory),
    "temporary files": Check(look=lambda node: _room("TMPDIR", Path(tempfile.gettempdir()))),
    "logs": Check(
        look=lambda node: _room("--log-dir", node.log_dir) if node.log_dir else "",
        applies=lambda node: node.log_dir is not None,
    ),
    "open files": Check(look=_open_files),
    "clock": Check(look=_clock),
    "GPUs": Check(
        look=_gpus, applies=lambda node: node.gpus, limit_s=lambda node: _GPU_S + DEADLINE_S
    ),
    "address": Check(look=_address, applies=lambda node: bool(node.address)),
    "etcd": Check(
        look=lambda node: node.ask_etcd() if node.ask_etcd else "",
        applies=lambda node: node.ask_etcd is not None,
    ),
    "health check": Check(
        look=_health_check,
        applies=lambda node: bool(node.command),
        limit_s=lambda node: node.command_timeout_s + DEADLINE_S,
    ),
}
"""Every check by its name, in the order in which `--preflight` prints them."""


# ---- all checks ----


@dataclass(frozen=True, kw_only=True)
class HealthProblem:
    """The result of one check."""

    check: str
    passed: bool
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.found}" + (f"; {self.remedy}" if self.remedy else "")


def examine(node: Surroundings) -> tuple[HealthProblem, ...]:
    """Run every check that applies, in parallel; returns within the longest of their deadlines."""
    runs = [_Run(name, check, node) for name, check in CHECKS.items() if check.applies(node)]
    return tuple(run.finding() for run in runs)


def complaint(findings: Sequence[HealthProblem]) -> str:
    """Why a node is unhealthy, in one line; empty if the node is healthy."""
    return "; ".join(str(finding) for finding in findings if not finding.passed)


class _Run:
    """One check on its thread."""

    def __init__(self, name: str, check: Check, node: Surroundings) -> None:
        self._name = name
        self._limit_s = check.limit_s(node)
        self._deadline_s = time.monotonic() + self._limit_s
        # A thread for each: a call that never returns becomes a finding, and not a hang.
        self._result: HealthProblem | None = None
        self._thread = threading.Thread(
            target=self._look, args=(check, node), name=f"check {name}", daemon=True
        )
        self._thread.start()

    def finding(self) -> HealthProblem:
        """Wait for the check until its deadline; its finding, or the finding that it hangs."""
        # A thread that hangs in a call of the kernel cannot be ended: it is left alone.
        self._thread.join(max(0.0, self._deadline_s - time.monotonic()))
        hangs = f"no answer within {self._limit_s:g} s"
        return self._result or self._finding(False, hangs, "the machine or a disk of it hangs")

    def _look(self, check: Check, node: Surroundings) -> None:
        try:
            self._result = self._finding(True, check.look(node))
        except HealthCheckFailed as failed:
            self._result = self._finding(False, failed.found, failed.remedy)
        except Exception as error:  # a check that cannot be made is a finding, too
            self._result = self._finding(False, str(error))

    def _finding(self, passed: bool, found: str, remedy: str = "") -> HealthProblem:
        return HealthProblem(check=self._name, passed=passed, found=found, remedy=remedy)


# ---- what an agent does about the findings ----


def patience(timeout_s: float, *, max_nodes: int, others: bool) -> tuple[float, str]:
    """How long an unhealthy node waits to become healthy, in seconds, and what sets that limit."""
    # Where no other node can train without this one, the user should learn of it soon.
    alone_s = SINGLE_S if max_nodes == 1 else ALONE_S
    if others or timeout_s <= alone_s:
        return timeout_s, "--join-timeout"
    return alone_s, "there is no other node to run the job without it"


def await_fit(
    node: Surroundings,
    timeout_s: float,
    on_unhealthy: Callable[[str], None] = lambda why: None,
    *,
    max_nodes: int,
    others: Callable[[], bool],
) -> None:
    """Return when this node is healthy, and may join.

    Raises:
        AgentFailed: The node has not become healthy in time.
    """
    began_s, pause_s = time.monotonic(), FIRST_PAUSE_S
    while why := complaint(examine(node)):
        limit_s, limit = patience(timeout_s, max_nodes=max_nodes, others=others())
        left_s = began_s + limit_s - time.monotonic()
        if left_s <= 0:
            raise _unhealthy(why, limit_s, limit)
        log.warning(
            "this node does not join yet: %s; it is checked again, for %.0f s more (%s)",
            why,
            left_s,
            limit,
        )
        on_unhealthy(why)
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _unhealthy(why: str, limit_s: float, limit: str) -> AgentFailed:
    return AgentFailed(
        AgentExit.UNHEALTHY,
        f"this node has not become healthy within {limit_s:g} s ({limit}): {why}",
    )


class HealthChecks:
    """The health of a node that has joined, examined beside the agent's loop."""

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
        """The node was healthy when it joined."""
        self._node = replace(node, log_dir=None)  # a job that runs goes on without its logs
        self._journal = journal
        self._timeout_s = timeout_s
        self._max_nodes = max_nodes
        self._done = post(self._examined)
        self._ill, self._paused = Stopwatch(clock), Stopwatch(clock)
        self._pause_s = FIRST_PAUSE_S
        self.checking = False
        """Whether a health check is under way."""
        self.complaint = ""
        """Why the node is unhealthy; empty if it is healthy."""

    def examine(self) -> None:
        """Begin a health check, unless one is under way."""
        if not self.checking:
            self.checking = True
            self._paused.stop()
            beside(lambda: complaint(examine(self._node)), self._done, "health checks")

    def check_limit(self, *, needed: bool) -> None:
        """Examine an unhealthy node again when it is time; it may wait only if it is needed.

        Raises:
            AgentFailed: The node has been unhealthy for too long.
        """
        limit_s, limit = patience(self._timeout_s, max_nodes=self._max_nodes, others=needed)
        if self._ill.past(limit_s):
            raise _unhealthy(self.complaint, limit_s, limit)
        if self._paused.past(self._pause_s):
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self.examine()

    def _examined(self, answer: str | Exception) -> None:
        self.checking, why = False, str(answer)  # a node that cannot be examined is unhealthy
        if bool(why) != bool(self.complaint):  # amounts in a complaint change all the time
            self.complaint = why
            text = f"this node is unhealthy: {why}" if why else "this node is healthy again"
            self._journal.tell("health", text, level=logging.WARNING if why else logging.INFO)
        if why:
            self._ill.start()
            self._paused.start()
        else:
            self._ill.stop()
            self._pause_s = FIRST_PAUSE_S
