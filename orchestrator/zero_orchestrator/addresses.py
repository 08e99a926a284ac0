"""`host:port` as text, in which an IPv6 address stands in brackets.

Who calls it: everything that writes or reads such text.
Source: RFC 3986, 3.2.2.
"""

from __future__ import annotations


def host_port(host: str, port: int | str) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """The parts of `host:port`, the host without brackets. Raises ValueError: no port."""
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
