"""The etcd servers that agents start if the user names none.

`private_server` belongs to one agent: `--standalone`, and jobs of one node. Its data is temporary,
and the server dies with the agent. `shared_server` belongs to no agent: all agents of this machine
that name no endpoint meet there. The first one starts it, with a daemon (`etcd_keeper`). Its data
lasts, so a finished job stays finished. Call both from the main thread.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from zero_agent.etcd.etcd_process import (
    START_TIMEOUT_S,
    EtcdProcess,
    FoundEtcd,
    Member,
    find_etcd,
    log_tail,
    port_held,
    probe,
    start_server,
)
from zero_agent.node.signals import held
from zero_contract import owned_dir
from zero_orchestrator.errors import SpecError, StoreUnavailable
from zero_orchestrator.store import private_etcd

IDLE_TIMEOUT_S = 300.0
SHARED_S = 2 * START_TIMEOUT_S
"""The longest time that an agent waits for the shared server."""
SILENT_S = 5.0
"""A process that listens and has not answered for this long is no etcd that starts or ends."""
_PORT_TRIES = 3
_POLL_S = 0.05
_LOOK_S = 0.5
"""Interval at which a private server is looked at."""


# ---- a server of one agent ----


@contextlib.contextmanager
def private_server(
    addresses: Sequence[str] = (), *, token: str = "", names: Sequence[str] = ()
) -> Iterator[str]:
    """A new etcd that ends with the calling process, entered from the main thread; its endpoint.

    Other machines reach it by `addresses` and `names`; with a `token`, only its holders are
    admitted.

    Raises:
        SpecError: As `start_server`.
        StoreUnavailable: The server does not start; with the end of its log.
    """
    made = contextlib.ExitStack()
    try:
        # Another process may have the port at one of the addresses: then another one is tried.
        for left in reversed(range(_PORT_TRIES)):
            with port_held() as port:
                member = Member(data=Path("data"), client_port=port, addresses=tuple(addresses))
                process = start_server(made, member, token=token, names=names)
                try:
                    process.wait_healthy()
                    break
                except StoreUnavailable:
                    # One that runs has its port: another try would not help.
                    if not left or process.running:
                        raise
                    made.close()
        made.callback(_kept(process))
        yield member.endpoint
    finally:
        with held():  # a second signal must not leave the server behind
            made.close()


def _kept(process: EtcdProcess) -> Callable[[], None]:
    """Start a server again, on its data, whenever it ends; until the result is called."""
    # Slurm and systemd signal every process of a job, the server too, which its agent needs then:
    # the last save is published through it.
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_S):
            if not process.running:
                with contextlib.suppress(OSError):  # no room for its process: tried again
                    process.start(to_thread=True)

    def end() -> None:
        ended.set()
        thread.join()

    thread = threading.Thread(target=look, name="etcd", daemon=True)
    thread.start()
    return end


# ---- a server for all agents of this machine ----


@dataclass(frozen=True)
class SharedDirectory:
    """The directory of the shared server of one port: its data, locks and log."""

    path: Path

    @staticmethod
    def of_port(port: int) -> SharedDirectory:
        """The directory of this user on this machine: home directories are often shared."""
        return SharedDirectory(
            private_etcd.state_directory() / f"etcd-{socket.gethostname()}-{port}"
        )

    @property
    def data(self) -> Path:
        """The server's data directory."""
        return self.path / "data"

    @property
    def log(self) -> Path:
        """The log file of the keeper and the server."""
        return self.path / "log"

    @property
    def used(self) -> Path:
        """The file that each agent touches when it gets the server, which then is not idle."""
        return self.path / "used"

    @contextlib.contextmanager
    def deciding(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock under which the server is started, used and ended.

        Raises:
            StoreUnavailable: Another process held the lock all the time.
        """
        with self._lock_file("deciding") as lock:
            if not owned_dir.lock(lock.fileno(), timeout_s):
                raise StoreUnavailable(
                    f"another agent has been starting the etcd in {self.path} for {timeout_s:g} s; "
                    "name a running one with --rdzv-endpoint"
                )
            yield

    @contextlib.contextmanager
    def keeping(self) -> Iterator[bool]:
        """Hold the keeper's lock, if it is free; whether it was free."""
        with self._lock_file("keeper") as lock:
            yield owned_dir.lock(lock.fileno())

    def _lock_file(self, name: str) -> BinaryIO:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return (self.path / f"{name}.lock").open("wb")
        except OSError as error:
            raise SpecError(
                f"no place for the data of an etcd: {error}; set XDG_STATE_HOME to a directory "
                "that can be written, or name a running etcd with --rdzv-endpoint"
            ) from error


def shared_server(endpoint: str, *, idle_timeout_s: float = IDLE_TIMEOUT_S) -> str:
    """Make sure, at any time, that an etcd answers at an endpoint of the loopback; returns that.

    A server started here ends after `idle_timeout_s` without a live node of any job.

    Raises:
        SpecError: Another program listens there, or no etcd is installed.
        StoreUnavailable: The server does not start; with the end of its log.
    """
    directory = SharedDirectory.of_port(int(endpoint.rpartition(":")[2]))
    if not directory.path.exists() and probe(endpoint) is FoundEtcd.ETCD:
        return endpoint  # an etcd of the machine, which agents neither start nor end
    deadline = time.monotonic() + SHARED_S
    # Under the lock: of the agents that start at once one starts the server, and the keeper of an
    # idle one does not end it now.
    with directory.deciding(SHARED_S):
        directory.used.touch()
        # A server that is being started or killed listens for a moment without an answer.
        silent_until = time.monotonic() + SILENT_S
        while (found := probe(endpoint)) is not FoundEtcd.ETCD:
            now = time.monotonic()
            if found is FoundEtcd.OTHER or (found is FoundEtcd.SILENT and now > silent_until):
                raise SpecError(
                    f"a program listens on {endpoint} that does not answer as etcd does; stop it, "
                    "or name an etcd with --rdzv-endpoint HOST:PORT"
                )
            if now > deadline:
                raise StoreUnavailable(_complaint(endpoint, directory, "it does not answer"))
            if found is FoundEtcd.NOTHING:
                _start_unless_kept(endpoint, directory, idle_timeout_s, deadline - now)
                silent_until = time.monotonic() + SILENT_S
            time.sleep(_POLL_S)
    return endpoint


def _start_unless_kept(
    endpoint: str, directory: SharedDirectory, idle_timeout_s: float, timeout_s: float
) -> None:
    """Start a keeper, unless there is one."""
    # One that lives starts its server again itself.
    with directory.keeping() as unkept:
        pass
    if unkept:
        find_etcd()  # raised here, where the user reads it, rather than in the keeper's log
        command = [sys.executable, "-m", "zero_agent.etcd.etcd_keeper"]
        options = {
            "client-port": endpoint.rpartition(":")[2],
            "directory": str(directory.path),
            "idle-timeout-s": f"{idle_timeout_s:g}",
        }
        command += [f"--{name}={value}" for name, value in options.items()]
        with directory.log.open("wb") as log:
            started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )
        try:  # the keeper's command returns when its server serves
            status: object = started.wait(max(1.0, timeout_s))
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
            status = f"no server after {timeout_s:g} s"
        if status != 0:
            raise StoreUnavailable(_complaint(endpoint, directory, f"keeper: {status}"))


def _complaint(endpoint: str, directory: SharedDirectory, why: str) -> str:
    return (
        f"no etcd could be started on {endpoint} ({why}); name a running one with "
        f"--rdzv-endpoint, or see {directory.log}, which ends:\n{log_tail(directory.log)}"
    )
