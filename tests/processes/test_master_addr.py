"""A fixed world at a real `--master-addr`: two hosts on one network, and what they open on it."""

from __future__ import annotations

import subprocess
import sys
import uuid

import pytest

from tests.support.cluster import COLD, environment
from tests.support.partition import network
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN

pytestmark = pytest.mark.processes

PORT = 29511
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


def test_two_hosts_meet_at_master_addr_and_open_that_port_and_the_ring_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOOK)
    agents, token = [], uuid.uuid4().hex
    with network("a", "b") as machines:
        first, second = machines.address("a"), machines.address("b")
        flags = ("--nnodes=2", f"--master-addr={first}", f"--master-port={PORT}", COLD)
        try:
            for rank, name in enumerate(("a", "b")):
                rest = (f"--node-rank={rank}", "--port-range=29600-29699", str(script))
                with machines.inside(name):
                    agents.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "zero_agent", *flags, *rest],
                            env={**environment(), ENV_JOIN_TOKEN: token},
                            text=True,
                            stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE,
                        )
                    )
            ended = [process.communicate(timeout=120) for process in agents]
        finally:
            for process in agents:
                process.kill()
    assert [process.returncode for process in agents] == [0, 0], ended
    assert [out.splitlines() for out, _ in ended] == [
        [f"0 at {first} {PORT} {first}:{PORT} {first}:29600"],
        [f"1 at {first} {PORT} {second}:29600"],
    ]
