"""The address by which other nodes reach this machine, and servers that listen there."""

from __future__ import annotations

import errno
import fcntl
import logging
import socket
import socketserver
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from zero_contract.hub import EXHAUSTED
from zero_orchestrator.addresses import family_of, route_towards

log = logging.getLogger("zero")

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_INTERFACES_SIX = Path("/proc/net/if_inet6")
ANY_PORT = range(1)
"""Port 0: the kernel chooses."""

T = TypeVar("T")


def first_free(ports: Sequence[int], listen: Callable[[int], T]) -> T:
    """Listen on the first free one of these ports; returns what `listen` returned.

    Raises:
        OSError: No port is free, or listening fails for another reason.
    """
    for port in ports:
        try:
            return listen(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    text = f"all ports from {ports[0]} to {ports[-1]} are taken; name more with --port-range"
    raise OSError(errno.EADDRINUSE, text)


class PatientServer(socketserver.ThreadingTCPServer):
    """A thread for each client, none of which anybody waits for; a broken connection is no error.

    It pauses when it is out of descriptors, then accepts again: no client is turned away.
    """

    request_queue_size = 128  # all other members of a round look at their links at the same time
    exhausted_pause_s = 0.2
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, address: tuple[str, int], handler: type[socketserver.BaseRequestHandler]
    ) -> None:
        self.address_family = family_of(address[0])
        super().__init__(address, handler)

    def get_request(self) -> Any:
        """As socketserver; a client that could not be accepted waits in the kernel's queue."""
        try:
            return super().get_request()
        except OSError as error:
            # The listener stays readable: without a pause the loop would spin on it.
            if error.errno in EXHAUSTED:
                time.sleep(self.exhausted_pause_s)
            raise

    def handle_error(self, request: object, client_address: object) -> None:
        """As socketserver; called where a client has gone away."""
        log.debug("%s has gone away from port %s", client_address, self.server_address[1])

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """As socketserver; returns at once if the server was closed before its thread began."""
        try:
            super().serve_forever(poll_interval)
        except ValueError:  # of a selector for a closed socket
            if self.fileno() >= 0:
                raise


def loopback() -> str:
    """127.0.0.1, or ::1 on a machine that has only IPv6."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return "::1"
    return "127.0.0.1"


def address_towards(endpoint: str) -> str:
    """The local address that the kernel would use to reach `host:port`, or this host's name."""
    return route_towards(endpoint) or socket.gethostname()


def is_local(address: str) -> bool:
    """Whether an address, or the address of a host name, is one of this machine's."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        # A kernel binds its own addresses alone, unless `ip_nonlocal_bind` is set.
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except (OSError, UnicodeError):  # the latter: no DNS name, such as a..b
        return False
    return True


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an address, or None."""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        try:
            lines = _INTERFACES_SIX.read_text().splitlines()
        except OSError:
            return None  # without IPv6
        rows = (line.split() for line in lines)
        return next((row[5] for row in rows if row[0] == wanted), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])  # IFNAMSIZ, without the last zero
            # It answers with the first address of the interface: a further one is not found.
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
