"""Hosts that have IPv6 alone: two namespaces without any IPv4 address, not even 127.0.0.1."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import environment, printed_by_all
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN

pytestmark = pytest.mark.processes

FIRST = "fd00:6::1"
WHERE = ("--no-python", "sh", "-c", 'echo "$RANK at $MASTER_ADDR $MASTER_PORT"')
MEET = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.tensor([dist.get_rank()])
dist.all_reduce(ranks)
print(os.environ["RANK"], "at", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
assert ranks.item() == 1
dist.destroy_process_group()
"""


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The namespaces of two hosts on one network."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")
    mark = uuid.uuid4().hex[:8]
    spaces = (f"zero-{mark}a", f"zero-{mark}b")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    for space in spaces:
        ip("netns", "add", space)
    try:
        a, b = spaces
        for space in spaces:
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "addr", "del", "127.0.0.1/8", "dev", "lo")
        ip("-n", a, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", b)
        for number, space in enumerate(spaces, 1):
            ip("-n", space, "addr", "add", f"fd00:6::{number}/64", "dev", "eth0", "nodad")
            ip("-n", space, "link", "set", "eth0", "up")
        yield a, b
    finally:
        for space in spaces:
            ip("netns", "delete", space)


def run_on(hosts: tuple[str, str], program: tuple[str, ...], **variables: str) -> list[str]:
    """What the workers of both hosts print."""
    flags = ("--nnodes=2", f"--master-addr={FIRST}", "--master-port=29511")
    agents = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                host,
                sys.executable,
                "-m",
                "zero_agent",
                *flags,
                f"--node-rank={rank}",
                *program,
            ],
            env={**environment(), **variables},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, host in enumerate(hosts)
    ]
    return [line for lines in printed_by_all(agents) for line in lines]


def test_two_hosts_with_ipv6_alone_run_one_job(hosts):
    token = {ENV_JOIN_TOKEN: uuid.uuid4().hex}
    assert run_on(hosts, WHERE, **token) == [f"{rank} at {FIRST} 29511" for rank in (0, 1)]


def test_a_host_with_ipv6_alone_knows_its_own_address_where_etcd_is_named(hosts, tmp_path: Path):
    names = tmp_path / "hosts"
    names.write_text(f"{FIRST} head\n")
    see = f'mount --bind {names} /etc/hosts && exec "$@"'
    ask = "from zero_orchestrator.addresses import *; print(route_towards('head:2379'))"
    inside = ("ip", "netns", "exec", hosts[1], "unshare", "--mount", "sh", "-c", see, "-")
    told = subprocess.check_output([*inside, sys.executable, "-c", ask], text=True)
    assert told == "fd00:6::2\n"


@pytest.mark.full
def test_workers_of_two_hosts_with_ipv6_alone_find_each_other(hosts, tmp_path: Path):
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    assert run_on(hosts, (str(script),)) == [f"{rank} at {FIRST} 29511" for rank in (0, 1)]
