"""Real etcd servers for tests, on the loopback interface, with the faults servers have.

They die with the test process, however that ends (`zero_agent.node.process_control`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.support.ports import free_port
from tests.support.suspended import suspend
from zero_agent.etcd.etcd_process import EtcdProcess, Member


class EtcdServer:
    """One server that can be stopped, killed, suspended, and started again on its data."""

    def __init__(
        self, directory: Path, member: Member | None = None, binary: Path | None = None
    ) -> None:
        self._binary = binary
        self.member = member or Member(data=directory / "data", client_port=free_port())
        self._log = directory / f"{self.member.name}.log"
        self._process: EtcdProcess | None = None

    @property
    def endpoint(self) -> str:
        return self.member.endpoint

    def start(self, *, wait: bool = True) -> EtcdServer:
        self._process = EtcdProcess(self.member, self._log, binary=self._binary).start()
        if wait:
            self.wait_healthy()
        return self

    def wait_healthy(self) -> None:
        self._running().wait_healthy()

    def stop(self) -> None:
        self._running().stop()

    def kill(self) -> None:
        self._running().kill()

    def suspend(self) -> None:
        """The server keeps its connections, and the kernel goes on accepting new ones."""
        suspend(self._running().pid)

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        self.suspend()
        try:
            yield
        finally:
            self.resume()

    def call(self, path: str, **body: object) -> dict[str, object]:
        """POST to etcd's own JSON gateway: administration that the store has no use for."""
        connection = http.client.HTTPConnection(self.endpoint, timeout=120)
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(body))
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status == 200, content
            return dict(json.loads(content))
        finally:
            connection.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _running(self) -> EtcdProcess:
        assert self._process is not None, "not started"
        return self._process


@contextlib.contextmanager
def server(directory: Path) -> Iterator[EtcdServer]:
    """A server that serves."""
    with contextlib.closing(EtcdServer(directory)) as etcd:
        yield etcd.start()


@contextlib.contextmanager
def cluster(
    directory: Path,
    size: int = 3,
    *,
    binary: Path | None = None,
    options: tuple[str, ...] = (),
) -> Iterator[list[EtcdServer]]:
    """Members of one cluster that serve; by default those that an agent would start."""
    members = [
        Member(
            name=f"m{index}",
            data=directory / f"m{index}",
            client_port=free_port(),
            peer_port=free_port(),
            options=options,
        )
        for index in range(size)
    ]
    peers = ",".join(f"{member.name}={member.peer_url}" for member in members)
    servers = [
        EtcdServer(directory, dataclasses.replace(member, peers=peers), binary)
        for member in members
    ]
    with contextlib.ExitStack() as stack:
        for etcd in servers:
            stack.callback(etcd.close)
            etcd.start(wait=False)
        for etcd in servers:
            etcd.wait_healthy()
        yield servers
