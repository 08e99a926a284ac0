"""`host:port` (RFC 3986, 3.2.2) and `USER@HOST` as text, and the route to such a place."""

from __future__ import annotations

import getpass
import os
import socket


def host_port(host: str, port: int | str) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """The parts of `host:port`, the host without brackets. Raises ValueError: no port."""
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def family_of(host: str) -> socket.AddressFamily:
    """The address family of a numeric address or of a host name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def route_towards(endpoint: str) -> str | None:
    """The local address of the route to `host:port`; None without a route. Sends nothing."""
    host, port = split_host_port(endpoint)
    # A name may have addresses of both families; where it has, others use that of IPv4.
    for family in dict.fromkeys((family_of(host), socket.AF_INET6)):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, port))
                return str(probe.getsockname()[0])
        except (OSError, UnicodeError):  # the latter: no DNS name, such as a..b
            continue
    return None


def who() -> str:
    """`USER@HOST` of the user of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without such a user
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
