"""A fixed world at a real `--master-addr`: two hosts on one network, and what they open on it."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.support.cluster import COLD, environment, printed_by_all
from tests.support.partition import network
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN

pytestmark = pytest.mark.processes

PORT = 29511
FIRST, SECOND = "10.77.0.1", "10.77.0.2"
LOOK = """
import os, socket

rank, host, port = (os.environ[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
socket.create_connection((host, int(port)), 10).close()
rows = [line.split() for line in open("/proc/self/net/tcp").read().splitlines()[1:]]
rows += [line.split() for line in open("/proc/self/net/tcp6").read().splitlines()[1:]]
listening = set()
for address, number in (row[1].split(":") for row in rows if row[3] == "0A"):
    known = len(address) == 8 and socket.inet_ntoa(bytes.fromhex(address)[::-1])
    listening.add(f"{known or address}:{int(number, 16)}")
print(rank, "at", host, port, *sorted(where for where in listening if where[:4] != "127."))
"""


GLOO = """
import os, torch, torch.distributed as dist

dist.init_process_group("gloo")
ranks = torch.tensor([dist.get_rank()])
dist.all_reduce(ranks)
dist.new_group([0, 1])
rows = [line.split() for line in open("/proc/self/net/tcp").read().splitlines()[1:]]
taken = {row[1].split(":")[1] for row in rows if row[3] == "0A" and row[1][6:8] != "7F"}
gloos = [port for port in (int(port, 16) for port in taken) if 40000 <= port <= 40099]
print(dist.get_rank(), "sum", ranks.item(), "gloo", len(gloos), "of", len(taken))
dist.barrier()
dist.destroy_process_group()
"""


def run_on_two_hosts(script: Path, *before: str) -> list[list[str]]:
    """What the workers of both hosts print, which are at 10.77.0.1 and 10.77.0.2.

    Args:
        script: The program.
        before: A command of each host's own, run first.
    """
    agents, token = [], uuid.uuid4().hex
    flags = ("--nnodes=2", f"--master-addr={FIRST}", f"--master-port={PORT}", COLD)
    with network("a", "b") as machines:
        for rank, name in enumerate(("a", "b")):
            rest = (f"--node-rank={rank}", "--port-range=29600-29699", str(script))
            with machines.inside(name):
                if before:
                    subprocess.run(before, check=True)
                agents.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "zero_agent", *flags, *rest],
                        env={**environment(), ENV_JOIN_TOKEN: token},
                        text=True,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                    )
                )
        return printed_by_all(agents)


def test_two_hosts_meet_at_master_addr_and_open_that_port_and_the_ring_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOOK)
    assert run_on_two_hosts(script) == [
        [f"0 at {FIRST} {PORT} {FIRST}:{PORT} {FIRST}:29600"],
        [f"1 at {FIRST} {PORT} {SECOND}:29600"],
    ]


@pytest.mark.full
def test_gloo_listens_on_ports_of_the_kernels_range_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(GLOO)
    kernels = ("sysctl", "-qw", "net.ipv4.ip_local_port_range=40000 40099")
    assert run_on_two_hosts(script, *kernels) == [
        ["0 sum 1 gloo 2 of 4"],  # the port of --master-port, the ring's, one for each group
        ["1 sum 1 gloo 2 of 3"],
    ]
