"""How long until N agents have logged in to etcd, and how often they do it again after a pause.

For `rendezvous.py`. Each agent is a store with a connection and a login of its own, as each agent
process has, on an etcd of one member that asks for passwords. After the logins the member is
stopped (SIGSTOP) for a moment, as a slow disk or an election would, while every agent keeps a
lease alive and reads.

All agents are on this machine, where each would have its own. Some thousands of connections that
are opened at once take its cores longer than a call may take, so calls fail, and are repeated on
new connections, which takes longer still: `at_once` lets so many at a time log in. What the fleet
costs etcd is said apart, as the seconds that its process has computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import logging
import multiprocessing
import os
import re
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from zero_agent.etcd.etcd_process import EtcdProcess, Member, free_port
from zero_orchestrator.errors import StoreError
from zero_orchestrator.store import retry
from zero_orchestrator.store.etcd.client import Credentials, EtcdStore

PER_PROCESS = 100
LIMIT_S = 300.0
PAUSE_S = 3.0
"""For so long etcd stands still: longer than a keep-alive waits, shorter than a call does."""
WHO = Credentials(user="root", password="secret")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logins:
    """What N agents needed."""

    p50_s: float
    last_s: float
    checks: float
    """Passwords that etcd has checked for each agent, until all had read."""
    checks_after_pause: float
    """And again, after etcd had stood still."""
    streams: float
    """Of keep-alives, for each agent, in all."""
    server_s: float
    """What etcd has computed for each agent until all had read."""


def logins(count: int, bcrypt_cost: int, at_once: int) -> Logins:
    """Log `count` agents in, so many at once, then let etcd pause."""
    with tempfile.TemporaryDirectory(prefix="logins-") as name, contextlib.ExitStack() as stack:
        member = Member(
            data=Path(name, "data"),
            client_port=free_port(),
            options=(f"--bcrypt-cost={bcrypt_cost}", "--unsafe-no-fsync"),
        )
        etcd = EtcdProcess(member, Path(name, "log"))
        stack.callback(etcd.kill)
        etcd.start().wait_healthy()
        for path, body in (
            ("auth/user/add", {"name": "root", "password": "secret"}),
            ("auth/role/add", {"name": "root"}),
            ("auth/user/grant", {"user": "root", "role": "root"}),
            ("auth/enable", {}),
        ):
            _post(member.endpoint, path, body)
        pipes = [
            _agents(stack, member.endpoint, min(PER_PROCESS, count - begin), at_once / count)
            for begin in range(0, count, PER_PROCESS)
        ]
        began, computed_s = time.monotonic(), _computed_s(etcd.pid)
        took = sorted(done - began for answer in _all(pipes) for done in answer)
        computed_s = _computed_s(etcd.pid) - computed_s
        checks = _calls(member.endpoint, "Authenticate")
        etcd.send_signal(signal.SIGSTOP)
        for pipe in pipes:
            pipe.send(None)
        time.sleep(PAUSE_S)
        etcd.send_signal(signal.SIGCONT)
        for pipe in pipes:
            _answer(pipe)
        again = _calls(member.endpoint, "Authenticate") - checks
        streams = _calls(member.endpoint, "LeaseKeepAlive")
    return Logins(
        p50_s=statistics.median(took),
        last_s=took[-1],
        checks=checks / count,
        checks_after_pause=again / count,
        streams=streams / count,
        server_s=computed_s / count,
    )


def _computed_s(pid: int) -> float:
    """Of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _agents(stack: contextlib.ExitStack, endpoint: str, count: int, share: float) -> Connection:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, endpoint, count, share), daemon=True)
    process.start()
    stack.callback(process.kill)
    _answer(ours)
    return ours


def _all(pipes: Sequence[Connection]) -> list[list[float]]:
    for pipe in pipes:
        pipe.send(None)
    return [_answer(pipe) for pipe in pipes]


def _answer(pipe: Connection) -> list[float]:
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"a process of agents did not answer within {LIMIT_S:g} s")
    return list(pipe.recv())


def _serve(pipe: Connection, endpoint: str, count: int, share: float) -> None:
    """A process's life: log in when told to; read, and keep leases alive, when told to."""
    logging.disable(logging.CRITICAL)
    threading.stack_size(256 * 1024)
    stores = [EtcdStore(endpoint, credentials=WHO) for _ in range(count)]
    pipe.send([])
    with ThreadPoolExecutor(max(1, round(count * min(1.0, share)))) as pool:
        pipe.recv()
        leases, done = zip(*pool.map(_begin, stores), strict=True)
        pipe.send(list(done))
        pipe.recv()
        list(pool.map(_go_on, stores, leases))
        pipe.send([])
        pipe.recv()


def _begin(store: EtcdStore) -> tuple[int, float]:
    lease = retry.within(LIMIT_S)(store.grant, 60)
    retry.within(LIMIT_S)(store.keep_alive, lease)
    return lease, time.monotonic()


def _go_on(store: EtcdStore, lease: int) -> None:
    for _ in range(3):
        with contextlib.suppress(StoreError):
            store.keep_alive(lease)
        retry.within(LIMIT_S)(store.get, "/zero/none")


def _calls(endpoint: str, method: str) -> int:
    connection = http.client.HTTPConnection(endpoint, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    line = rf'^grpc_server_started_total{{grpc_method="{method}",.*}} (\d+)'
    return sum(map(int, re.findall(line, text, re.MULTILINE)))


def _post(endpoint: str, path: str, body: dict[str, str]) -> None:
    connection = http.client.HTTPConnection(endpoint, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", f"/v3/{path}", json.dumps(body))
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(answer.read().decode())
