"""torchrun's rendezvous on our round machine: `torchrun --rdzv-backend=zero-etcd`.

    torchrun --nnodes=1:4 --max-restarts=3 --rdzv-backend=zero-etcd \
             --rdzv-endpoint=etcd-0:2379,etcd-1:2379 --rdzv-id=job train.py

torchrun starts, watches and restarts the workers; this only says who takes part in which round.
A node that dies is noticed when its lease runs out, the others go on without it at once, and
there is no node whose loss ends the job: each round has a TCPStore of its own, on its first node.

Must always hold: everything runs on torchrun's own thread, in `num_nodes_waiting` and
`next_rendezvous`; each wait ends.

Source of the interface: torch.distributed.elastic.rendezvous.api.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from zero_contract.clock import SystemClock
from zero_contract.journal import Journal
from zero_orchestrator.addresses import host_port, split_host_port
from zero_orchestrator.errors import SpecError, StoreError, StoreUnavailable
from zero_orchestrator.membership.job_state import Failure, Node, Snapshot, State
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.membership.rounds import Timing
from zero_orchestrator.membership.spec import JobSpec, check_job_name
from zero_orchestrator.store.etcd.client import Credentials, EtcdStore
from zero_orchestrator.store.kv import KeyValueStore

log = logging.getLogger("zero")

BACKEND = "zero-etcd"
RESTARTS = 1_000_000
"""torchrun has its own budget, one for each agent; ours must not end the job before."""
_BACKLOG = 4096
"""So many workers may connect to a round's store at once."""
_POLL_S = 0.05
_FINISH_S = 2.0


def load() -> Any:
    """What the entry point `torchrun.handlers` is to return: the maker of handlers."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """A handler for torchrun's parameters; nothing is sent before it is used.

    Args:
        params: `endpoint` is etcd, `HOST:PORT[,HOST:PORT...]`; of the settings in --rdzv-conf
            `join_timeout` (600) and `last_call_timeout` (1) have a meaning, both in seconds, and
            for a secure etcd `ca_cert`, `ssl_cert`, `ssl_cert_key`, `user` and `password_file`.

    Raises:
        SpecError: Half of a pair of these, or a file that cannot be read.
    """
    spec = JobSpec(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        max_restarts=RESTARTS,
        command=("torchrun",),
    )
    name = socket.gethostname()
    node = Node(
        id=f"{name}-{secrets.token_hex(2)}",
        incarnation=secrets.token_hex(4),
        address=params.local_addr or _address_towards(params.endpoint),
        slots=1,
    )
    return EtcdV3Handler(
        EtcdStore(params.endpoint, credentials=_credentials(params)),
        check_job_name(params.run_id),
        spec,
        node,
        timing=Timing(settle_s=float(params.get("last_call_timeout", Timing.settle_s))),
        join_timeout_s=float(params.get("join_timeout", 600)),
    )


def _credentials(params: RendezvousParameters) -> Credentials:
    """Who we are to etcd. A password is in a file: command lines are read by everybody."""
    password = _file(params, "password_file")
    return Credentials(
        user=params.get("user"),
        password=password.read_text().partition("\n")[0] if password else None,
        ca=_file(params, "ca_cert"),
        cert=_file(params, "ssl_cert"),
        key=_file(params, "ssl_cert_key"),
    )


def _file(params: RendezvousParameters, name: str) -> Path | None:
    if (value := params.get(name)) is None:
        return None
    try:
        with open(value, "rb"):
            return Path(value)
    except OSError as error:
        raise SpecError(f"--rdzv-conf: {name}={value}: {error.strerror}") from error


class EtcdV3Handler(RendezvousHandler):
    """One torchrun agent's part in the rounds of its job."""

    def __init__(
        self,
        store: KeyValueStore,
        job: str,
        spec: JobSpec,
        node: Node,
        *,
        timing: Timing,
        join_timeout_s: float,
    ) -> None:
        self._store = store
        self._job = job
        self._rdzv = Rendezvous(
            store, job, spec, node, clock=SystemClock(), journal=Journal(node.id), timing=timing
        )
        self._join_timeout_s = join_timeout_s
        self._registered = False
        self._round = 0
        """The round in which this node's workers run, or ran last."""
        self._hosted: tuple[int, Any] = (0, None)
        """The newest round whose TCPStore is hosted here, and that."""

    def get_backend(self) -> str:
        """Its name on torchrun's command line."""
        return BACKEND

    def get_run_id(self) -> str:
        """The job's name."""
        return self._job

    @property
    def use_agent_store(self) -> bool:
        """Workers meet in the TCPStore of the round, which no worker's end takes away."""
        return True

    # ---- torchrun asks ----

    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the round of the workers that have just ended; wait for the next one.

        Raises:
            RendezvousClosedError: The job is over.
            RendezvousConnectionError: etcd does not let this agent in.
            RendezvousTimeoutError: Too few nodes came, or etcd stayed silent.
        """
        deadline = time.monotonic() + self._join_timeout_s
        reason = ""
        while time.monotonic() < deadline:
            with _as_torchs_errors():
                try:
                    if (info := self._try_to_join()) is not None:
                        return info
                    reason = self._rdzv.reason
                except StoreUnavailable as error:
                    if str(error) != reason:
                        reason = str(error)
                        log.warning("%s", reason)  # torchrun waits in silence
            time.sleep(_POLL_S)
        raise RendezvousTimeoutError(
            f"no round of job {self._job} began within {self._join_timeout_s:g} s: {reason}; "
            "start more agents, or raise join_timeout in --rdzv-conf"
        )

    def num_nodes_waiting(self) -> int:
        """Whether the round is over, or to be left: torchrun then restarts the workers."""
        with contextlib.suppress(StoreUnavailable), _as_torchs_errors():
            job = self._rdzv.poll()
            return int(job.n != self._round or job.state is State.FORMING or bool(job.yielding))
        return 0  # without news the workers go on

    def is_closed(self) -> bool:
        """Whether no further round can begin."""
        return self._over(self._rdzv.snapshot)

    def set_closed(self) -> None:
        """Let no further round begin."""
        self._store.put(self._closed_key, "")

    def shutdown(self) -> bool:
        """End with torchrun: with success, or while its error is on the way out."""
        failed = sys.exc_info()[1] is not None
        try:
            if self._registered:
                self._say_how_it_ended(failed)
        except StoreError:
            return False  # the lease runs out by itself
        finally:
            self._rdzv.close()
            self._store.close()
        return True

    # ---- this node's part ----

    def _try_to_join(self) -> RendezvousInfo | None:
        if not self._registered:
            self._rdzv.register()
            self._registered = True
        job = self._rdzv.poll()
        if self._over(job):
            raise RendezvousClosedError(
                f"job {self._job} is over; choose another --rdzv-id for a new one"
            )
        if job.n == self._round:
            self._leave(job)
            return None
        index = job.members.index(self._rdzv.node)
        if job.state is not State.ACTIVE or index is None:
            return None
        address = self._rdzv.node.address
        if index == 0 and self._hosted[0] != job.n:
            self._hosted = (job.n, _host_store(address))
        if index == 0 and job.master is None:
            self._rdzv.publish_master(job.n, host_port(address, self._hosted[1].port))
        if job.master is None:
            return None
        host, port = split_host_port(job.master)
        store = self._hosted[1] if index == 0 else TCPStore(host, port, is_master=False)
        self._round = job.n
        where = RendezvousStoreInfo(host, port)
        return RendezvousInfo(store, index, len(job.members.nodes), where)

    def _leave(self, job: Snapshot) -> None:
        """The workers of this round are gone: say so, and why if nobody else has."""
        if not job.has_member(self._rdzv.node):
            return
        if job.state is State.ACTIVE and job.yielding is None:
            failure = Failure(
                node=self._rdzv.node.id,
                symptom=False,
                summary=f"the workers of node {self._rdzv.node.id} ended",
            )
            self._rdzv.report_failure(job.n, failure)
        else:
            self._rdzv.report_quiet(job.n)

    def _say_how_it_ended(self, failed: bool) -> None:
        """Success: the job is done when the last node says so. Failure: the job is closed."""
        job = self._rdzv.poll()
        if failed:
            self.set_closed()
            self._leave(job)
            return
        self._rdzv.report_done(self._round)
        deadline = time.monotonic() + _FINISH_S
        while not self._over(self._rdzv.poll()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    @property
    def _closed_key(self) -> str:
        return f"{self._rdzv.keys.prefix}closed"

    def _over(self, job: Snapshot) -> bool:
        running = job.state in (None, State.FORMING, State.ACTIVE)
        return not running or self._store.get(self._closed_key) is not None


@contextlib.contextmanager
def _as_torchs_errors() -> Iterator[None]:
    """Torchrun knows its own errors only; what may pass by itself stays ours."""
    try:
        yield
    except StoreUnavailable:
        raise
    except StoreError as error:
        raise RendezvousConnectionError(str(error)) from error


def _address_towards(endpoint: str) -> str:
    """The address of this machine that the kernel would use to reach etcd."""
    try:
        host, port = split_host_port(endpoint.partition(",")[0])
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return socket.getfqdn()


def _host_store(address: str) -> TCPStore:
    """A store on this address alone: it asks nobody who they are, and torch's listen everywhere."""
    listener = _listen(address)
    return TCPStore(
        address,
        int(listener.getsockname()[1]),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        # It could not take a socket over before.
        use_libuv=torch.__version__ >= (2, 8),  # type: ignore[operator]
    )


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        ipaddress.ip_address(address)  # a name may stand for the loopback here, and not elsewhere
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    except (OSError, ValueError) as error:
        log.warning(
            "cannot listen on %s alone (%s): the round's store listens on all addresses; name an "
            "address of this machine with --local-addr",
            address,
            error,
        )
        return socket.create_server(("", 0), family=family, backlog=_BACKLOG)
