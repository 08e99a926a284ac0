"""Nodes of a fixed world (`--master-addr`) meet in an etcd of node 0 that keeps strangers out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.cluster import COLD, environment
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_agent.etcd.etcd_process import FoundEtcd, probe
from zero_agent.etcd.local_etcd import private_server
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN, new_token, write_certificates

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

SAY = ("--no-python", "sh", "-c", f'echo "rank $RANK has ${{{ENV_JOIN_TOKEN}-no token}}"')


def node(rank: int, port: int, token: str, *flags: str) -> subprocess.Popen[str]:
    world = ["--nnodes=2", f"--node-rank={rank}", "--master-addr=127.0.0.1", COLD]
    return subprocess.Popen(
        [sys.executable, "-m", "zero_agent", *world, f"--master-port={port}", *flags, *SAY],
        env=environment() | ({ENV_JOIN_TOKEN: token} if token else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_node_without_the_token_does_not_get_in_and_the_workers_do_not_see_it(tmp_path):
    port, token = free_port(), new_token()
    first = node(0, port, token)
    started = [first]
    try:
        mine = write_certificates(tmp_path, token)
        serving = f"127.0.0.1:{port}"
        wait_for(lambda: probe(serving, mine) is FoundEtcd.ETCD, 150, "the etcd of node 0")
        started.append(stranger := node(1, port, "", "--rdzv-conf=join_timeout=1"))
        _, said = stranger.communicate(timeout=150)
        assert stranger.returncode == AgentExit.NO_NODES
        assert "and ZERO_JOIN_TOKEN (if any node has one, all have the same)" in said
        started.append(second := node(1, port, token))
        ended = [process.communicate(timeout=150) for process in (first, second)]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [out for out, _ in ended] == ["rank 0 has no token\n", "rank 1 has no token\n"], ended
    assert ENV_JOIN_TOKEN not in os.environ


@pytest.mark.full
@pytest.mark.parametrize(
    ("etcds", "mine", "remedy"),
    [
        ("a" * 32, "b" * 32, "ZERO_JOIN_TOKEN is not that with which etcd was started"),
        ("a" * 32, "", "and the job's ZERO_JOIN_TOKEN or --etcd-ca if it uses TLS"),
        ("", "b" * 32, "it may not use TLS: then leave out --etcd-ca and ZERO_JOIN_TOKEN"),
    ],
)
def test_a_token_that_is_not_the_etcds_is_named_with_the_remedy(etcds, mine, remedy):
    with private_server(token=etcds) as endpoint:
        flags = ["--rdzv-id=x", "--nnodes=1:2", "--etcd-wait=1", f"--rdzv-endpoint={endpoint}"]
        done = subprocess.run(
            [sys.executable, "-m", "zero_agent", *flags, COLD, *SAY],
            env=environment() | ({ENV_JOIN_TOKEN: mine} if mine else {}),
            capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (AgentExit.NO_STORE, "")
    assert remedy in done.stderr
