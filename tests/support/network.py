"""A network of one's own, so that a test can have a well-known port to itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def own_loopback(port: int) -> Iterator[list[str]]:
    """What to put before a command so that `port` on 127.0.0.1 is free for it.

    As root, a network namespace with nothing but a loopback; otherwise nothing, if the port
    happens to be free here, or the test is skipped.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"port {port} is in use, and a network namespace needs root and ip")
        yield []
        return
    name = f"zero-{uuid.uuid4().hex[:8]}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def kill_all_with(name: str, value: str) -> None:
    """kill -9 every process that was started with this variable in its environment."""
    mark = f"{name}={value}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
