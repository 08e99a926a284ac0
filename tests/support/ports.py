"""Ports for servers that are started later, or never.

Must always hold: nobody else takes such a port in between. It is below those that the kernel gives
to connections and to listeners without a wish; and what this process has handed out, no other test
process does, as long as this one lives.
"""

from __future__ import annotations

import contextlib
import secrets
import socket

_PORTS = range(20_000, 30_000)


def free_port() -> int:
    """A port of the loopback interface that is free, and stays so for whom it is meant."""
    while True:
        port = secrets.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            with socket.socket(socket.AF_UNIX) as claim:
                claim.bind(f"\0zero-tests-port-{port}")  # a name that the kernel lets nobody share
                claim.detach()  # until this process ends
            return port
