"""Where the ranks of one measurement meet: a network of their own, if this is root.

Owns the namespaces: one with a loopback for ranks on one host, or two joined by a throttled
cable, each with a /dev/shm of its own, for ranks on two. Must always hold: what an interface has
counted was sent by the ranks that are measured and by nobody else.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_PORT = 29533
_OWN_SHM = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the ranks run."""

    prefixes: tuple[tuple[str, ...], ...]
    """Per rank: what to put before its command."""
    address: str
    port: int
    interface: str
    counted: bool
    """Whether the interface counts only our bytes."""
    one_host: bool


def available() -> bool:
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc", "unshare"))


@contextmanager
def place(world: int, throttle: str) -> Iterator[Place]:
    """A place for `world` ranks; with `throttle`, a rate for tc, one host for each.

    Raises:
        SystemExit: A throttle is wanted and there are no namespaces here.
    """
    if not available():
        if throttle:
            raise SystemExit("--throttle needs root, ip, tc and unshare; leave it out")
        yield _here(world)
        return
    names = [f"training-{uuid.uuid4().hex[:8]}" for _ in range(world if throttle else 1)]
    for name in names:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
    try:
        yield _joined(names, throttle) if throttle else _alone(names[0], world)
    finally:
        for name in names:
            _run("ip", "netns", "delete", name)


def _here(world: int) -> Place:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Place(
        prefixes=((),) * world,
        address="127.0.0.1",
        port=port,
        interface="lo",
        counted=False,
        one_host=True,
    )


def _alone(name: str, world: int) -> Place:
    return Place(
        prefixes=(("ip", "netns", "exec", name),) * world,
        address="127.0.0.1",
        port=_PORT,
        interface="lo",
        counted=True,
        one_host=True,
    )


def _joined(names: list[str], throttle: str) -> Place:
    if len(names) != 2:
        raise SystemExit("--throttle joins two hosts; the world must be 2")
    first, second = names
    _run(
        "ip", "-n", first, "link", "add", "wire0", "type", "veth", "peer", "wire0", "netns", second
    )
    for number, name in enumerate(names, start=1):
        _run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire0")
        _run("ip", "-n", name, "link", "set", "wire0", "up")
        shape = ("rate", throttle, "burst", "256kb", "latency", "50ms")
        _run("tc", "-n", name, "qdisc", "add", "dev", "wire0", "root", "tbf", *shape)
    shm = ("unshare", "-m", "sh", "-c", _OWN_SHM, "rank")
    return Place(
        prefixes=tuple(("ip", "netns", "exec", name, *shm) for name in names),
        address="10.77.0.1",
        port=_PORT,
        interface="wire0",
        counted=True,
        one_host=False,
    )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
