"""Hosts that are reached by ssh: network namespaces, each with a real sshd and a key for it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.sandbox import Bridge
from tests.support.waiting import wait_for

_SSHD = "/usr/sbin/sshd"


def why_not() -> str | None:
    """What keeps this machine from having such hosts, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in (_SSHD, "ssh", "ssh-keygen", "ip") if shutil.which(name) is None]
    return f"needs {', '.join(missing)}" if missing else None


class SshHosts:
    """Some hosts on one network, which this machine is on as well."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._bridge = Bridge()
        self._namespaces: dict[str, str] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("host_key", "user_key"):
            path = directory / name
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it separates its privileges

    @property
    def ssh_options(self) -> str:
        """How ssh gets in."""
        known = "-oStrictHostKeyChecking=no -oUserKnownHostsFile=/dev/null"
        return f"-i {self._directory / 'user_key'} {known}"

    def add(self, *, serving: bool = True) -> str:
        """One more host; its address."""
        namespace, address = self._bridge.attach()
        self._namespaces[address] = namespace
        if serving:
            self.serve(address)
        return address

    def serve(self, address: str) -> None:
        """Start a host's sshd."""
        options = {
            "HostKey": self._directory / "host_key",
            "AuthorizedKeysFile": self._directory / "user_key.pub",
            "StrictModes": "no",
            "UsePAM": "no",
            "PidFile": "none",
            "PermitRootLogin": "yes",
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        inside = ["ip", "netns", "exec", self._namespaces[address]]
        with (self._directory / f"sshd-{address}.log").open("wb") as log:
            command = [*inside, _SSHD, "-D", "-e", "-f", "/dev/null", *words]
            self._daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
        wait_for(lambda: _answers(address), 60.0, f"sshd on {address}")

    def processes(self, address: str) -> list[int]:
        """All that run on a host."""
        ask = ["ip", "netns", "pids", self._namespaces[address]]
        return [int(pid) for pid in subprocess.check_output(ask, text=True).split()]

    def is_idle(self, address: str) -> bool:
        """Whether nothing but sshd itself runs on a host."""
        return set(self.processes(address)) <= {daemon.pid for daemon in self._daemons}

    def kill(self, address: str) -> None:
        """kill -9 everything on a host, its sshd too."""
        for pid in self.processes(address):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for address in self._namespaces:
            self.kill(address)
        for daemon in self._daemons:
            daemon.wait()
        self._bridge.close()


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, 22), timeout=1):
        return True
    return False


@contextlib.contextmanager
def ssh_hosts(directory: Path) -> Iterator[SshHosts]:
    """No host at first; all of them go in the end."""
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(SshHosts(directory)) as hosts:
        yield hosts
