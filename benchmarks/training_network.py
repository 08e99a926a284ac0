"""Where the ranks of one measurement meet: a network of their own, if this is root.

Owns the namespaces: one with a loopback for ranks on one host, or two joined by a throttled
cable, each with a /dev/shm of its own, for ranks on two hosts. Must always hold: what an interface
has counted was sent by the ranks that are measured and by nobody else.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PORT = 29533
_OWN_SHM = 'mount --bind "$0" /dev/shm && exec "$@"'


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
    """A place for `world` ranks; with `throttle`, a rate for tc, two hosts of half of them each.

    Raises:
        SystemExit: A throttle is wanted and there are no namespaces here, or the world is odd.
    """
    if not available():
        if throttle:
            raise SystemExit("--throttle needs root, ip, tc and unshare; leave it out")
        yield _here(world)
        return
    if throttle and world % 2:
        raise SystemExit(f"--throttle joins two hosts; the world must be even, and is {world}")
    names = [f"training-{uuid.uuid4().hex[:8]}" for _ in range(2 if throttle else 1)]
    for name in names:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
    try:
        if throttle:
            with _memories(names) as memories:
                yield _joined(names, memories, world // 2, throttle)
        else:
            yield _alone(names[0], world)
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


@contextmanager
def _memories(names: list[str]) -> Iterator[list[str]]:
    """A directory in memory for each host: what its ranks see as /dev/shm."""
    with tempfile.TemporaryDirectory(prefix="training-shm-") as parent:
        directories = [str(Path(parent) / name) for name in names]
        mounted = []
        try:
            for directory in directories:
                Path(directory).mkdir()
                _run("mount", "-t", "tmpfs", "tmpfs", directory)
                mounted.append(directory)
            yield directories
        finally:
            for directory in mounted:
                _run("umount", "-l", directory)


def _joined(names: list[str], memories: list[str], each: int, throttle: str) -> Place:
    first, second = names
    _run(
        "ip", "-n", first, "link", "add", "wire0", "type", "veth", "peer", "wire0", "netns", second
    )
    for number, name in enumerate(names, start=1):
        _run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire0")
        _run("ip", "-n", name, "link", "set", "wire0", "up")
        shape = ("rate", throttle, "burst", "256kb", "latency", "50ms")
        _run("tc", "-n", name, "qdisc", "add", "dev", "wire0", "root", "tbf", *shape)
    hosts = zip(names, memories, strict=True)
    commands = [
        ("ip", "netns", "exec", name, "unshare", "-m", "sh", "-c", _OWN_SHM, memory)
        for name, memory in hosts
    ]
    return Place(
        prefixes=tuple(command for command in commands for _ in range(each)),
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
