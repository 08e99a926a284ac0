"""The etcd of a job's own at `--rdzv-endpoint`: what torchrun's c10d backend is, by the same flags.

The agent on the host that `--rdzv-backend=c10d --rdzv-endpoint=HOST[:PORT]` names serves one etcd
member there; the other agents wait for it. Its data stay until the job has ended, so an agent that
is started again on that host serves the same job, and the others have seen an outage.

Must always hold: of the agents of one host one serves an endpoint; an etcd that answers there
already is used as it is; data that nobody can wait for any more are not served again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zero_agent.etcd.etcd_process import LOOPBACK, FoundEtcd, probe
from zero_agent.etcd.joining import OPEN, Joining
from zero_agent.etcd.local_etcd import SharedDirectory, private_server, state_directory
from zero_agent.node.network import is_local
from zero_orchestrator.addresses import host_port, split_host_port
from zero_orchestrator.errors import SpecError

log = logging.getLogger("zero")

DEFAULT_PORT = 29400
"""As torchrun's."""
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a job serves its own etcd."""

    host: str
    port: int
    """0: a free one of this machine, for a job of one node."""

    @property
    def text(self) -> str:
        """`host:port`."""
        return host_port(self.host, self.port)

    @classmethod
    def of(cls, text: str) -> Endpoint:
        """Parse `HOST[:PORT]`; the port is torchrun's by default.

        Raises:
            SpecError: It is malformed.
        """
        has_port = text.rpartition(":")[2].isdecimal() and not text.endswith("]")
        with contextlib.suppress(ValueError):
            host, port = split_host_port(text if has_port else f"{text}:{DEFAULT_PORT}")
            if host and port < 1 << 16:
                return cls(host=host, port=port)
        raise SpecError(f"--rdzv-endpoint={text}: write HOST or HOST:PORT, the port at most 65535")


@dataclass
class Serving:
    """The etcd that this agent serves."""

    ended: bool = False
    """The job is over: nobody needs the data any more."""


@contextlib.contextmanager
def own_server(
    endpoint: Endpoint, joining: Joining, *, job: str, keep_s: float
) -> Iterator[Serving | None]:
    """Serve etcd at the endpoint, if that is on this machine and nobody does yet.

    Args:
        endpoint: Where.
        joining: The join token; without one every client is admitted.
        job: The job's name, if it has one: its data are its own.
        keep_s: Data that were written longer ago are of a job that nobody waits for.

    Yields:
        None if another process serves there, now or later.

    Raises:
        SpecError: Another program listens there, or no etcd is installed.
        StoreUnavailable: The server does not start; with the end of its log.
    """
    if not is_local(endpoint.host):
        yield None
        return
    name = f"etcd-{socket.gethostname()}-{endpoint.port}-{job or 'none'}"
    directory = SharedDirectory(state_directory() / name)
    with directory.keeping() as alone:
        found = probe(endpoint.text, joining.tls)
        if not alone or found is FoundEtcd.ETCD:
            yield None
            return
        if found is not FoundEtcd.NOTHING:
            raise SpecError(
                f"--rdzv-endpoint={endpoint.text}: a program listens there that does not answer "
                "as etcd does; stop it, or choose another port, the same on all nodes"
            )
        if _age_s(directory.data) > keep_s:
            shutil.rmtree(directory.data, ignore_errors=True)
        serving = Serving()
        with private_server(
            addresses_of(endpoint.host),
            endpoint.port,
            token=joining.token,
            names=[endpoint.host],
            data=directory.data,
        ):
            log.info("this node serves the job's etcd at %s", endpoint.text)
            if not joining.token and addresses_of(endpoint.host):
                log.warning("%s", OPEN.format(where=endpoint.text))
            yield serving
        if serving.ended:
            shutil.rmtree(directory.data, ignore_errors=True)


def addresses_of(host: str) -> list[str]:
    """The IP addresses of a host of this machine, without the loopback that is served anyway."""
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found = {str(info[4][0]).partition("%")[0] for info in infos}
    return sorted(address for address in found - {LOOPBACK} if is_local(address))


def _age_s(data: Path) -> float:
    """Seconds since anything in a directory was written; 0 if there is none."""
    if not data.exists():
        return 0.0
    written_s = (os.lstat(path).st_mtime for path in data.rglob("*"))
    return time.time() - max(written_s, default=0.0)
