"""SECURITY.md's table of ports has every socket of a job, with what a stranger gets there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.support.cluster import COLD, ROOT, environment, paced, training
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_agent.etcd.etcd_process import FoundEtcd, probe
from zero_agent.node.process_control import children
from zero_contract.handshake import NONCE_BYTES
from zero_orchestrator.store.etcd.client import EtcdStore
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN, new_token

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

HERE = "tests/processes/test_open_ports.py"
TABLE = {
    "etcd that `zero-agent` starts with `--standalone`": (
        "the keys of the jobs there, including their secrets",
        f"{HERE}::test_an_etcd_without_a_token_gives_a_stranger_all_it_has",
    ),
    "etcd that is started for several machines": (
        "a refused handshake",
        "tests/contract/etcd/test_join_token.py"
        "::test_whoever_has_the_token_gets_in_and_a_stranger_learns_and_changes_nothing",
    ),
    "etcd of `--master-addr` or `--rdzv-backend=c10d` without `ZERO_JOIN_TOKEN`": (
        "everything below; the agent logs a warning at its start",
        f"{HERE}::test_an_etcd_without_a_token_gives_a_stranger_all_it_has",
    ),
    "your own etcd": (
        "whatever your etcd allows",
        "tests/contract/etcd/test_role.py"
        "::test_a_reader_sees_all_of_a_job_but_its_secret_and_changes_nothing",
    ),
    "liveness ring of the agents": (
        "a nonce",
        "tests/unit/agent/test_strangers.py"
        "::test_a_stranger_hears_a_nonce_and_is_hung_up_on_while_the_job_is_served",
    ),
    "peer memory": (
        "a nonce",
        "tests/unit/agent/test_strangers.py"
        "::test_a_stranger_hears_a_nonce_and_is_hung_up_on_while_the_job_is_served",
    ),
    "TCPStore of the round": (
        "read and write access to the keys of torch; read access to the votes of a save, which "
        "cannot be forged",
        f"{HERE}::test_every_socket_of_a_job_is_in_the_table",
    ),
    "collectives: gloo, NCCL": (
        "read and write access to tensors",
        f"{HERE}::test_every_socket_of_a_job_is_in_the_table",
    ),
    "`--health-port`": (
        "read access to job, node, round, state and reason, and to the metrics of the agent",
        "tests/unit/agent/test_strangers.py"
        "::test_who_talks_nonsense_to_the_health_port_leaves_it_answering",
    ),
    "`zero-ctl dashboard`": (
        "read access to state, steps, loss, nodes and events of one job; drain and stop need the "
        "token",
        "tests/processes/test_dashboard.py"
        "::test_anyone_here_may_read_and_only_the_holder_of_the_token_may_act",
    ),
    "`zero-ctl metrics --port`": (
        "read access to the metrics of the jobs that its login may read",
        "tests/processes/test_observed.py"
        "::test_the_metrics_of_all_jobs_are_served_on_a_free_port_until_ctrl_c",
    ),
    "agent, workers and fork server": (
        "nothing",
        f"{HERE}::test_every_socket_of_a_job_is_in_the_table",
    ),
    "workers of one host, while they meet": (
        "nothing: a worker hangs up on every process that is no rank of its job",
        "tests/unit/agent/test_same_host_peers.py"
        "::test_strangers_who_connect_while_ranks_meet_are_hung_up_on_and_they_meet",
    ),
}
"""The beginning of a row, what a stranger gets, and the test that tries it."""


def test_the_table_says_what_a_stranger_gets_and_each_row_is_tried():
    text = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\| (.+) \| .+ \| .+ \| (.+) \|$", text, re.MULTILINE)[2:]
    assert [gets for _, gets in rows] == [gets for gets, _ in TABLE.values()]
    for (port, _), known in zip(rows, TABLE, strict=True):
        assert port.startswith(known)
    for _, test in TABLE.values():
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test


# ---- what a job has opened ----


@dataclass(frozen=True)
class Listener:
    program: str
    """The process that listens: its title, or the agent."""
    address: str
    """host:port, or the path of a Unix socket, which begins with `@` if it is abstract."""


def listeners(agent: int) -> set[Listener]:
    """What an agent and all below it listen on, by inode."""
    found = _listening_inodes()
    return {
        Listener(program, found[inode])
        for pid in descendants(agent)
        for program in [_program(pid, agent)]
        for inode in _inodes(pid)
        if inode in found
    }


def descendants(pid: int) -> list[int]:
    return [pid, *(each for child in children(pid) for each in descendants(child))]


def _program(pid: int, agent: int) -> str:
    if pid == agent:
        return "agent"
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return " ".join(Path(words[0].decode()).name.split()[:1])
    return "gone"


def _inodes(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                    yield match[1]


def _listening_inodes() -> dict[str, str]:
    found = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            host, port = fields[1].split(":")
            address = socket.inet_ntoa(bytes.fromhex(host)[::-1])
            found[fields[9]] = f"{address}:{int(port, 16)}"
    for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            found[fields[9]] = f"[ipv6]:{int(fields[1].split(':')[1], 16)}"
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & 0x10000:  # it accepts connections
            found[fields[6]] = fields[7] if len(fields) > 7 else ""
    return found


@contextlib.contextmanager
def running(*command: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "zero_agent", *command],
            env=environment() | variables, stdout=said, stderr=said,
        )  # fmt: skip
        try:
            yield process
        except BaseException:
            said.seek(0)
            print(said.read().decode())
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def heard(address: str) -> bytes:
    """What a stranger who says nothing hears before it is hung up on."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.shutdown(socket.SHUT_WR)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(65536):
                said += data
    return said


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user as well")
def test_every_socket_of_a_job_is_in_the_table(tmp_path):
    port, health = free_port(), free_port()
    config = json.loads((ROOT / "examples" / "gpt.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "checkpoint": {"ram": {}}}))
    (tmp_path / "pause").write_text("0.2")
    script = paced(training(tmp_path, f"--config={tmp_path}/config.json"), tmp_path)
    world = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}")
    first = (*world, "--node-rank=0", f"--health-port={health}", *script)
    token = {ENV_JOIN_TOKEN: new_token()}
    with running(*first, **token) as agent, running(*world, "--node-rank=1", *script, **token):

        def all_open() -> dict[str, set[str]]:
            found: dict[str, set[str]] = {}
            for one in listeners(agent.pid):
                found.setdefault(one.program, set()).add(one.address)
            whole = {"agent", "etcd", "zero-store", "zero-worker"} <= found.keys()
            return found if whole and len(found["agent"]) == 5 else {}

        found = wait_for(all_open, 150, "the sockets of a job")
        assert found.pop("zero-forkserver") < found["agent"]  # the ring, for its last word
        assert found.keys() == {"agent", "etcd", "zero-store", "zero-worker"}
        tcp = {name: {a for a in each if ":" in a} for name, each in found.items()}
        assert {a.rpartition(":")[0] for each in tcp.values() for a in each} == {"127.0.0.1"}

        # The agent: the health port, the port of --master-addr, the ring, peer memory.
        known = {f"127.0.0.1:{health}", f"127.0.0.1:{port}"}
        assert known < tcp["agent"]
        assert [len(heard(each)) for each in tcp["agent"] - known] == [NONCE_BYTES, NONCE_BYTES]
        for each in tcp["etcd"] | {f"127.0.0.1:{port}"}:
            assert probe(each) is not FoundEtcd.ETCD
        (store,) = tcp["zero-store"]
        host, _, store_port = store.rpartition(":")
        torch_store = TCPStore(host, int(store_port), timeout=timedelta(seconds=60))
        torch_store.set("written by", "a stranger")
        assert torch_store.get("written by") == b"a stranger"
        for each in tcp["zero-worker"]:  # gloo takes every connection, and asks for no proof
            socket.create_connection(
                (each.rpartition(":")[0], int(each.rpartition(":")[2]))
            ).close()

        local = {each for of in found.values() for each in of if ":" not in each}
        (path,) = map(Path, local)  # no abstract name, which every user could reach
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert as_nobody(f"socket.socket(socket.AF_UNIX).connect({str(path)!r})")


def as_nobody(code: str) -> bool:
    """Whether another user of this machine is denied what the code does."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import os, socket; os.setuid(65534)\n{code}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return "PermissionError" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("way", ["standalone", "master-addr"])
def test_an_etcd_without_a_token_gives_a_stranger_all_it_has(tmp_path, way):
    port = free_port()
    flags = {
        "standalone": ["--standalone"],
        "master-addr": ["--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}"],
    }
    waits = ("--no-python", "sh", "-c", "sleep 60")
    with running("--nnodes=1", *flags[way], COLD, *waits) as agent:

        def open_etcd() -> set[str]:
            return {each.address for each in listeners(agent.pid) if each.program == "etcd"}

        found = wait_for(open_etcd, 150, "the etcd")
        assert {each.rpartition(":")[0] for each in found} == {"127.0.0.1"}
        client = wait_for(
            lambda: next((e for e in open_etcd() if probe(e) is FoundEtcd.ETCD), ""),
            150,
            "its port",
        )
        with contextlib.closing(EtcdStore(client)) as store:
            wait_for(lambda: store.range("/zero/secret/").items, 60, "the secret of the job")
