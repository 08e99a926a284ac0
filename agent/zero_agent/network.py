"""Which address of this machine the other nodes can reach it by; servers that listen there."""

from __future__ import annotations

import errno
import fcntl
import socket
import socketserver
import struct
import time
from typing import Any

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""What a process that may open nothing more is told."""

_SIOCGIFADDR = 0x8915  # linux/sockios.h


class PatientServer(socketserver.ThreadingTCPServer):
    """Accepts again after a pause when it is out of descriptors: who knocks stays to be heard."""

    exhausted_pause_s = 0.2

    def get_request(self) -> Any:
        """As socketserver; whoever could not be accepted waits in the kernel's queue."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in EXHAUSTED:
                time.sleep(self.exhausted_pause_s)
            raise


def address_towards(endpoint: str) -> str:
    """The local address that the kernel would use to reach `host:port`, or this host's name."""
    return route_towards(endpoint) or socket.gethostname()


def route_towards(endpoint: str) -> str | None:
    """The same; None if there is no such host, or no way to it. Nothing is sent."""
    host, _, port = endpoint.rpartition(":")
    target = host.strip("[]")
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, int(port)))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def is_local(address: str) -> bool:
    """Whether an address, or what a name stands for, is one of this machine's."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def interface_of(address: str) -> str | None:
    """The name of the interface that has an IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
