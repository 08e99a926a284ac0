"""Machines on a network of their own, which can be cut in two without a word to either side.

Each machine is a network namespace with an address on one bridge. Packets that are cut vanish:
no reset, no "unreachable", as when a switch dies or a firewall drops.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:00:01"
"""A hardware address that no interface has."""


class Network:
    """Machines by name; each reaches the others until it is cut off."""

    def __init__(self, names: Sequence[str]) -> None:
        self._mark = uuid.uuid4().hex[:6]
        self._names = list(names)
        self._hub = self._namespace("hub")
        _ip("netns", "add", self._hub)
        try:
            _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._hub, "link", "set", "bridge", "up")
            for name in names:
                self._add(name)
        except BaseException:
            self.close()
            raise

    @property
    def prefix(self) -> str:
        """The beginning of the names of its namespaces."""
        return f"zero-{self._mark}-"

    def address(self, name: str) -> str:
        return f"10.77.0.{self._names.index(name) + 1}"

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """What this thread starts or connects to in the block is on that machine."""
        with open("/proc/thread-self/ns/net") as home:
            _enter(Path("/run/netns", self._namespace(name)))
            try:
                yield
            finally:
                _set_namespace(home.fileno())

    def cut(self, one: str, *others: str) -> None:
        """Nothing gets from one machine to the others, or back."""
        for other in others:
            self._drop(one, other)
            self._drop(other, one)

    def refuse(self, here: str, there: str) -> None:
        """From now on the kernel answers each attempt to connect to a machine with a reset.

        As a firewall does that rejects with `tcp-reset`: the address leads nowhere, and nothing
        listens there. Idle connections live on, until `drop_connections`.
        """
        _ip("-n", self._namespace(here), "addr", "add", f"{self.address(there)}/32", "dev", "lo")

    def reject(self, here: str, by: str) -> None:
        """From now on a firewall resets what comes from one machine by TCP, and lets it all out."""
        if shutil.which("nft") is None:
            pytest.skip("a firewall that rejects needs nft, of nftables")
        rule = f"ip saddr {self.address(here)} meta l4proto tcp reject with tcp reset"
        chain = f"chain input {{ type filter hook input priority 0\n {rule}\n }}"
        table = f"table inet zero {{\n {chain}\n }}"
        nft = ["ip", "netns", "exec", self._namespace(by), "nft", table]
        subprocess.run(nft, check=True, capture_output=True)

    def break_link(self, one: str, other: str, verdict: str, *, one_way: bool = False) -> None:
        """A firewall drops or rejects what comes from one machine to the other, or both ways.

        Args:
            one: A machine.
            other: Its firewall has a new rule; both have, unless it is one way.
            verdict: `drop`, or as in a rule of nft: `reject with tcp reset`.
            one_way: What the other machine sends arrives.
        """
        if shutil.which("nft") is None:
            pytest.skip("a firewall needs nft, of nftables")
        for here, by in ((one, other), (other, one))[: 1 if one_way else 2]:
            # A reset passes: else what the other firewall rejects with one would vanish.
            kind = "meta l4proto tcp" if verdict == "drop" else "tcp flags & rst == 0"
            rule = f"ip saddr {self.address(here)} {kind} {verdict}"
            chain = f"chain input {{ type filter hook input priority 0\n {rule}\n }}"
            self._nft(by, f"table inet from_{here} {{\n {chain}\n }}")

    def mend_link(self, one: str, other: str) -> None:
        """Undo `break_link`."""
        for here, by in ((one, other), (other, one)):
            self._nft(by, f"table inet from_{here}\ndelete table inet from_{here}")

    def _nft(self, name: str, commands: str) -> None:
        nft = ["ip", "netns", "exec", self._namespace(name), "nft", commands]
        subprocess.run(nft, check=True, capture_output=True)

    def drop_connections(self, here: str, there: str) -> None:
        """End those between two machines, as a middle box that restarts."""
        if shutil.which("ss") is None:
            pytest.skip("ending connections needs ss, of iproute2")
        kill = ["ip", "netns", "exec", self._namespace(here), "ss", "-K", "dst"]
        done = subprocess.run(
            [*kill, self.address(there)], check=True, capture_output=True, text=True
        )
        assert self.address(there) in done.stdout, "no connection was ended"

    def received_bytes(self, here: str, there: str, port: int) -> int:
        """What a machine has received over a connection to a port of another one; 0 without one."""
        show = ["ip", "netns", "exec", self._namespace(here), "ss", "-tinH", "state", "established"]
        found = subprocess.run(
            [*show, "dst", self.address(there), "dport", "=", f":{port}"],
            check=True,
            capture_output=True,
            text=True,
        )
        received = re.search(r"bytes_received:(\d+)", found.stdout)
        return int(received[1]) if received else 0

    def heal(self, one: str, *others: str) -> None:
        for other in others:
            for here, there in ((one, other), (other, one)):
                _ip("-n", self._namespace(here), "route", "del", f"{self.address(there)}/32")

    def slow_down(self, name: str, how: str) -> None:
        """From now on what a machine sends is slower: `rate 40mbit` or `delay 30ms`, as of tc."""
        if shutil.which("tc") is None:
            pytest.skip("a slow link needs tc, of iproute2")
        shaper = "tbf burst 32kb latency 200ms" if how.startswith("rate") else "netem"
        words = f"qdisc replace dev eth0 root {shaper} {how}".split()
        command = ["tc", "-n", self._namespace(name), *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"the kernel has no {shaper.split(maxsplit=1)[0]}: {done.stderr.strip()}")

    def full_speed(self, name: str) -> None:
        """Undo `slow_down`."""
        command = f"tc -n {self._namespace(name)} qdisc del dev eth0 root".split()
        subprocess.run(command, check=True, capture_output=True)

    def unplug(self, name: str) -> None:
        """Pull the cable of a machine: nothing gets to it or from it."""
        _ip("-n", self._hub, "link", "set", f"p-{name}", "down")

    def plug_in(self, name: str) -> None:
        """Undo `unplug`."""
        _ip("-n", self._hub, "link", "set", f"p-{name}", "up")

    def close(self) -> None:
        for name in (*self._names, "hub"):
            subprocess.run(
                ["ip", "netns", "delete", self._namespace(name)], check=False, capture_output=True
            )

    def _namespace(self, name: str) -> str:
        return f"{self.prefix}{name}"

    def _add(self, name: str) -> None:
        space, port = self._namespace(name), f"p-{name}"
        _ip("netns", "add", space)
        _ip(
            *("-n", space, "link", "add", "eth0", "type", "veth"),
            *("peer", "name", port, "netns", self._hub),
        )
        _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
        _ip("-n", space, "link", "add", "void", "type", "veth", "peer", "name", "pit")
        _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        for device in ("lo", "eth0", "void", "pit"):
            _ip("-n", space, "link", "set", device, "up")

    def _drop(self, here: str, there: str) -> None:
        space, address = self._namespace(here), self.address(there)
        _ip("-n", space, "neigh", "replace", address, "lladdr", _NOBODY, "dev", "void")
        _ip("-n", space, "route", "add", f"{address}/32", "dev", "void")


@contextlib.contextmanager
def network(*names: str) -> Iterator[Network]:
    """Such machines; the test is skipped where they cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    with contextlib.closing(Network(names)) as machines:
        yield machines


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _enter(namespace: Path) -> None:
    with namespace.open() as there:
        _set_namespace(there.fileno())


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
