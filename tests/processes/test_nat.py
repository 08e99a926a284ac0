"""`--advertise-addr`: nodes behind address translation, which know their own addresses alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import COLD, environment, printed_by_all
from tests.support.waiting import wait_for
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN

pytestmark = pytest.mark.processes

PRIVATE = "192.168.7.2"
"""Of both hosts, as of so many."""
PUBLIC = ("203.0.113.1", "203.0.113.2")
PORT = 29511
WAITS = """
import os, sys, time

print("here is", os.environ["RANK"], flush=True)
while not os.path.exists(sys.argv[0] + ".end"):
    time.sleep(0.05)
"""
RING = """
import os, socket, time

def ring():
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for line in open("/proc/self/net/tcp").read().splitlines()[1:]:
            host, port = line.split()[2].split(":")
            if line.split()[3] == "01" and 29600 <= int(port, 16) <= 29699:
                return socket.inet_ntoa(bytes.fromhex(host)[::-1])
        time.sleep(0.05)

rank, host, port = (os.environ[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
socket.create_connection((host, int(port)), 10).close()
print(rank, "at", host, port, "watches", ring())
"""
STORE = """
import datetime, os
from torch.distributed import TCPStore

rank, host, port = (os.environ[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
store = TCPStore(host, int(port), is_master=False, timeout=datetime.timedelta(seconds=60))
store.set(rank, f"from {rank}")
print(rank, "at", host, port, "reads", store.get(str(1 - int(rank))).decode())
store.set(f"{rank} has read", "")
store.wait(["0 has read", "1 has read"])
"""


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The namespaces of two hosts, each behind a router that forwards some ports to it."""
    iptables = shutil.which("iptables", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if os.geteuid() != 0 or shutil.which("ip") is None or iptables is None:
        pytest.skip("address translation between namespaces needs root, ip and iptables")
    mark = uuid.uuid4().hex[:6]
    spaces = {name: f"zero-{mark}-{name}" for name in ("host0", "host1", "router0", "router1")}

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    def translate(router: str, *words: str) -> None:
        command = ["ip", "netns", "exec", router, iptables, "-t", "nat", *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"this kernel translates no addresses: {done.stderr}")

    def connect(host: str, router: str, public: str) -> None:
        cable = ("type", "veth", "peer", "name", "inside", "netns", router)
        ip("-n", host, "link", "add", "eth0", *cable)
        addresses = ((host, "eth0", PRIVATE), (router, "inside", "192.168.7.1"))
        for space, device, address in (*addresses, (router, "outside", public)):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", space, "link", "set", device, "up")
        ip("-n", host, "route", "add", "default", "via", "192.168.7.1")
        forward = ["sysctl", "-qw", "net.ipv4.ip_forward=1"]
        subprocess.run(["ip", "netns", "exec", router, *forward], check=True)
        to_host = ("-p", "tcp", "--match", "multiport", "--dports", f"{PORT},29600:29699")
        outside = ("-i", "outside", *to_host, "-j", "DNAT", "--to-destination", PRIVATE)
        translate(router, "-A", "PREROUTING", *outside)
        translate(router, "-A", "POSTROUTING", "-o", "outside", "-j", "MASQUERADE")

    made: list[str] = []
    try:
        for space in spaces.values():
            ip("netns", "add", space)
            made.append(space)
            ip("-n", space, "link", "set", "lo", "up")
        wire = ("type", "veth", "peer", "name", "outside", "netns", spaces["router1"])
        ip("-n", spaces["router0"], "link", "add", "outside", *wire)
        for number, public in enumerate(PUBLIC):
            connect(spaces[f"host{number}"], spaces[f"router{number}"], public)
        yield spaces["host0"], spaces["host1"]
    finally:
        for space in made:
            ip("netns", "delete", space)


def begin_behind_nat(
    hosts: tuple[str, str], script: Path, token: str
) -> list[subprocess.Popen[str]]:
    """Agents on both hosts; nothing but the advertised addresses joins them."""
    flags = ("--nnodes=2", f"--master-addr={PUBLIC[0]}", f"--master-port={PORT}", COLD)
    return [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", host, sys.executable, "-m", "zero_agent", *flags),
                *(f"--node-rank={rank}", "--port-range=29600-29699", str(script)),
            ],
            env={**environment(), ENV_JOIN_TOKEN: token, "PET_ADVERTISE_ADDR": PUBLIC[rank]},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, host in enumerate(hosts)
    ]


def run_behind_nat(hosts: tuple[str, str], script: Path) -> set[str]:
    """What the workers of both hosts print."""
    agents = begin_behind_nat(hosts, script, uuid.uuid4().hex)
    return {line for lines in printed_by_all(agents) for line in lines}


def test_two_nodes_behind_nat_meet_by_the_addresses_that_they_advertise(hosts, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RING)
    assert run_behind_nat(hosts, script) == {
        f"0 at {PRIVATE} {PORT} watches {PUBLIC[1]}",
        f"1 at {PUBLIC[0]} {PORT} watches {PUBLIC[0]}",
    }


@pytest.mark.full
def test_workers_of_two_nodes_behind_nat_exchange_through_the_rounds_store(hosts, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STORE)
    assert run_behind_nat(hosts, script) == {
        f"0 at {PRIVATE} {PORT} reads from 1",
        f"1 at {PUBLIC[0]} {PORT} reads from 0",
    }


@pytest.mark.full
def test_zero_ctl_behind_nat_reads_the_output_of_all_nodes(hosts, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WAITS)
    token = uuid.uuid4().hex
    agents = begin_behind_nat(hosts, script, token)
    words = ["zero_orchestrator", "logs", "static", f"--rdzv-endpoint={PUBLIC[0]}:{PORT}"]

    def shown() -> bool:
        done = subprocess.run(
            ["ip", "netns", "exec", hosts[1], sys.executable, "-m", *words],
            env={**environment(), ENV_JOIN_TOKEN: token},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return set(done.stdout.splitlines()) == {"[rank0]: here is 0", "[rank1]: here is 1"}

    try:
        wait_for(shown, 90, "the output of both nodes")
    finally:
        (tmp_path / "script.py.end").touch()
        printed_by_all(agents)
