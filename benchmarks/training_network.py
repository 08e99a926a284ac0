"""Where the ranks of one measurement meet: a network of their own, if this is root.

Owns the namespaces: one with a loopback for the ranks of one node; or one for each node, each with
a /dev/shm of its own, joined by a switch whose cables are throttled. Must always hold: what an
interface has counted was sent by the ranks that are measured and by nobody else.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PORT = 29533
_OWN_SHM = 'mount --bind "$0" /dev/shm && exec "$@"'
_BURST_S = 0.002
"""What a throttled cable may send at once, in time: much longer than a tick of its clock."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the ranks run."""

    nodes: tuple[int, ...]
    """Ranks of each node."""
    prefixes: tuple[tuple[str, ...], ...]
    """Per rank: what to put before its command."""
    address: str
    port: int
    interface: str
    """By which the ranks meet: that between nodes, or the loopback of the one node."""
    counted: bool
    """Whether the interfaces count only our bytes."""


def available() -> bool:
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc", "unshare"))


@contextmanager
def place(nodes: Sequence[int], rate: str) -> Iterator[Place]:
    """A place for ranks on some nodes; `rate`, in the words of tc, is that of each node's cable.

    Raises:
        SystemExit: There are several nodes, and there are no namespaces here.
    """
    if not available():
        if len(nodes) > 1:
            raise SystemExit("several nodes need root, ip, tc and unshare; leave them out")
        yield _here(nodes)
        return
    run = f"training-{uuid.uuid4().hex[:8]}"
    names = [f"{run}-{number}" for number in range(len(nodes))]
    everything = [*names, run] if len(nodes) > 1 else names
    shared = [Path("/dev/shm") / name for name in names]
    for name in everything:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
    for directory in shared:
        directory.mkdir()
    try:
        yield (
            _joined(nodes, run, names, shared, rate) if len(nodes) > 1 else _alone(nodes, names[0])
        )
    finally:
        for name in everything:
            _run("ip", "netns", "delete", name)
        for directory in shared:
            shutil.rmtree(directory)


def _here(nodes: Sequence[int]) -> Place:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Place(
        nodes=tuple(nodes),
        prefixes=((),) * nodes[0],
        address="127.0.0.1",
        port=port,
        interface="lo",
        counted=False,
    )


def _alone(nodes: Sequence[int], name: str) -> Place:
    return Place(
        nodes=tuple(nodes),
        prefixes=(("ip", "netns", "exec", name),) * nodes[0],
        address="127.0.0.1",
        port=_PORT,
        interface="lo",
        counted=True,
    )


def _joined(
    nodes: Sequence[int], switch: str, names: Sequence[str], shared: Sequence[Path], rate: str
) -> Place:
    _run("ip", "-n", switch, "link", "add", "switch0", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "switch0", "up")
    prefixes: list[tuple[str, ...]] = []
    for number, (name, directory) in enumerate(zip(names, shared, strict=True), start=1):
        port = f"port{number}"
        cable = ("link", "add", "wire0", "type", "veth", "peer", port, "netns", switch)
        _run("ip", "-n", name, *cable)
        _run("ip", "-n", switch, "link", "set", port, "master", "switch0", "up")
        _run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire0")
        _run("ip", "-n", name, "link", "set", "wire0", "up")
        if rate:
            burst_bytes = round(bits_per_s(rate) / 8 * _BURST_S)
            shape = ("rate", rate, "burst", str(burst_bytes), "latency", "50ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", "wire0", "root", "tbf", *shape)
        own = ("ip", "netns", "exec", name, "unshare", "-m", "sh", "-c", _OWN_SHM, str(directory))
        prefixes += [own] * nodes[number - 1]
    return Place(
        nodes=tuple(nodes),
        prefixes=tuple(prefixes),
        address="10.77.0.1",
        port=_PORT,
        interface="wire0",
        counted=True,
    )


def bits_per_s(rate: str) -> float:
    """A rate as tc spells it, such as 1gbit or 500mbit.

    Raises:
        SystemExit: It is spelt in another way.
    """
    found = re.fullmatch(r"([\d.]+)([kmg])bit", rate)
    if found is None:
        raise SystemExit(f"a rate of {rate!r}: write it as 500mbit or 10gbit")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
