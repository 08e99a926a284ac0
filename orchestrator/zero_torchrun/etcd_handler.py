"""A rendezvous handler for torchrun in etcd v3: `torchrun --rdzv-backend=zero-etcd`.

    torchrun --nnodes=1:4 --max-restarts=3 --rdzv-backend=zero-etcd \
             --rdzv-endpoint=etcd-0:2379,etcd-1:2379 --rdzv-id=job train.py

torchrun starts, watches and restarts the workers; this handler decides the members of each round,
and `workers` asks them to leave at a step boundary before torchrun ends them. Rounds are left and
entered on torchrun's own thread, in `num_nodes_waiting` and `next_rendezvous`. No node's loss ends
the job: each round has a new TCPStore, on its first node.

Source of the interface: torch.distributed.elastic.rendezvous.api.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from zero_contract.clock import SystemClock
from zero_contract.exit_codes import AgentExit
from zero_contract.journal import Journal
from zero_contract.notices import OF_MACHINE
from zero_orchestrator.addresses import family_of, host_port, route_towards, split_host_port
from zero_orchestrator.errors import SpecError, StoreError, StoreUnavailable
from zero_orchestrator.membership.job_state import Failure, Node, Snapshot, State
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.membership.rounds import Timing
from zero_orchestrator.membership.spec import JobSpec, check_job_name
from zero_orchestrator.observe.events import Publisher
from zero_orchestrator.store.etcd.client import Credentials, EtcdStore
from zero_orchestrator.store.etcd.connection import parse_endpoints
from zero_orchestrator.store.kv import KeyValueStore
from zero_torchrun.workers import Workers

log = logging.getLogger("zero")

BACKEND = "zero-etcd"
RESTARTS = 1_000_000
"""The job's restart budget, which is never reached: torchrun has its own, one for each agent."""
_BACKLOG = 4096
"""Backlog: how many workers may connect to a round's TCPStore at once."""
_CONNECT = timedelta(seconds=5)
"""The longest wait for a connection to the TCPStore of a round; then the job is looked at again."""
_ANSWER = timedelta(seconds=300)
"""The timeout of a connected TCPStore, as torch's own."""
_POLL_S = 0.05
_FINISH_S = 2.0


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Let an error end torchrun with its message: a traceback would show torchrun's own code."""
    try:
        yield
    except (SpecError, RendezvousError) as error:
        # Of a SystemExit Python prints the message alone. It is the error that it was as well, for
        # torchrun's own records and for a program that calls torchrun's launcher as a function.
        kind = type(error)
        raise type(kind.__name__, (SystemExit, kind), {})(str(error)) from error


@_in_one_line()
def create(params: RendezvousParameters) -> RendezvousHandler:
    """Make a handler from torchrun's parameters; nothing is sent before its first use.

    Args:
        params: `endpoint` is etcd, `HOST:PORT[,HOST:PORT...]`; of the settings in --rdzv-conf
            `join_timeout` (600) and `last_call_timeout` (1) have a meaning, both in seconds, and
            for a secure etcd `ca_cert`, `ssl_cert`, `ssl_cert_key`, `user` and `password_file`.

    Raises:
        SpecError: The endpoint is malformed, half of a pair of these is missing, a file cannot be
            read, or a time is no number of seconds.
    """
    spec = JobSpec(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        max_restarts=RESTARTS,
        command=("torchrun",),
    )
    name = socket.gethostname()
    first = parse_endpoints(params.endpoint)[0]
    node = Node(
        # torchrun gives its agents no names, and a restarted one is another node.
        id=f"{name}-{secrets.token_hex(2)}",
        incarnation=secrets.token_hex(4),
        address=params.local_addr or route_towards(first) or socket.getfqdn(),
        slots=1,  # torchrun counts its workers itself: ranks of this job are those of its agents
    )
    password = _file(params, "password_file")  # command lines can be read by every user
    credentials = Credentials(
        user=params.get("user"),
        password=password.read_text().partition("\n")[0] if password else None,
        ca=_file(params, "ca_cert"),
        cert=_file(params, "ssl_cert"),
        key=_file(params, "ssl_cert_key"),
    )
    return EtcdV3Handler(
        EtcdStore(params.endpoint, credentials=credentials),
        check_job_name(params.run_id),
        spec,
        node,
        timing=Timing(settle_s=_seconds(params, "last_call_timeout", Timing.settle_s)),
        join_timeout_s=_seconds(params, "join_timeout", 600),
    )


def _seconds(params: RendezvousParameters, name: str, default: float) -> float:
    value = params.get(name, default)
    with contextlib.suppress(ValueError):
        if math.isfinite(seconds := float(value)) and seconds >= 0:
            return seconds
    raise SpecError(f"--rdzv-conf: {name}={value}: give a number of seconds, such as {default:g}")


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
        clock = SystemClock()
        self._publisher = Publisher(store, job, node.id, node.incarnation, clock)
        self._journal = Journal(node.id, publish=self._publisher.event)
        self._rdzv = Rendezvous(
            store, job, spec, node, clock=clock, journal=self._journal, timing=timing
        )
        self._workers = Workers(self._rdzv, self._journal, self._leave_by_notice)
        self._turn = threading.Lock()
        """Held by whoever uses the rendezvous."""
        self._leaves_with: int | None = None
        """torchrun's exit code, once this node is to leave the job; None: it stays."""
        self._join_timeout_s = join_timeout_s
        self._registered = False
        self._round = 0
        """The round in which this node's workers run, or ran last."""
        self._hosted: tuple[int, Any] = (0, None)
        """The fence of the newest round whose TCPStore is hosted here, and that TCPStore."""

    def get_backend(self) -> str:
        """The name of this handler on torchrun's command line."""
        return BACKEND

    def get_run_id(self) -> str:
        """The job's name."""
        return self._job

    @property
    def use_agent_store(self) -> bool:
        """True: workers use the round's TCPStore, which outlives every worker."""
        return True

    # ---- torchrun's interface ----

    @_in_one_line()
    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the round of the workers that have just ended; wait for the next one.

        Raises:
            RendezvousClosedError: The job is over.
            RendezvousConnectionError: etcd refuses this agent.
            RendezvousTimeoutError: Too few nodes came, or etcd did not answer.
            SystemExit: This node has left the job, which goes on, or the job has been stopped.
        """
        deadline = time.monotonic() + self._join_timeout_s
        reason = ""
        while time.monotonic() < deadline:
            with _as_torchs_errors(), self._turn:
                try:
                    if (info := self._try_to_join()) is not None:
                        return info
                    reason = self._rdzv.reason
                except StoreUnavailable as error:
                    if str(error) != reason:
                        reason = str(error)
                        log.warning("%s", reason)  # torchrun logs nothing while it waits
            time.sleep(_POLL_S)
        raise RendezvousTimeoutError(
            f"no round of job {self._job} began within {self._join_timeout_s:g} s: {reason}; "
            "start more agents, or raise join_timeout in --rdzv-conf"
        )

    @_in_one_line()
    def num_nodes_waiting(self) -> int:
        """1 if torchrun is to restart the workers, which have left or must; else 0."""
        # Restarts for this reason torchrun does not count.
        with contextlib.suppress(StoreUnavailable), _as_torchs_errors(), self._turn:
            job = self._rdzv.poll()
            self._obey(job)
            self._show(job)
            # Not DONE: torchrun ends by itself when its workers have all exited with 0.
            if job.n != self._round or job.state in (State.FORMING, State.FAILED, State.STOPPED):
                self._workers.interrupt(f"round {self._round} is over: {job.cause}")
                return 1
            if job.yielding is None:
                return int(self._workers.have_left)
            return int(self._workers.ask_to_leave(job.yielding))
        return 0  # while etcd does not answer, the workers continue

    def is_closed(self) -> bool:
        """Whether no further round can begin."""
        return self._over(self._rdzv.snapshot)

    def set_closed(self) -> None:
        """Let no further round begin."""
        self._store.put(self._closed_key, "")

    def shutdown(self) -> bool:
        """Report the end of torchrun on this node, and leave; False if etcd did not take it."""
        # torchrun does not say why it ends: its error is being raised at this moment, or there is
        # none.
        failed = sys.exc_info()[1] is not None
        try:
            if self._registered:
                job = self._rdzv.poll()
                if failed:
                    if self._leaves_with is None:  # else the job goes on without this node
                        self.set_closed()
                    self._leave(job)
                else:  # the job is done when the last node has reported it
                    self._rdzv.report_done(self._round)
                    # Not at once away: an agent has to see the last report, and to finish the job.
                    deadline = time.monotonic() + _FINISH_S
                    while not self._over(self._rdzv.poll()) and time.monotonic() < deadline:
                        time.sleep(_POLL_S)
        except StoreError:
            return False  # the lease expires by itself
        finally:
            self._workers.close()
            self._rdzv.close()
            self._publisher.close()
            self._store.close()
        return True

    # ---- this node's part ----

    def _try_to_join(self) -> RendezvousInfo | None:
        if not self._registered:
            self._rdzv.register()
            self._registered = True
        job = self._rdzv.poll()
        self._obey(job)
        self._show(job)
        if job.state is State.STOPPED:
            log.warning("job %s has been stopped: %s", self._job, job.cause)
            raise SystemExit(AgentExit.STOPPED)
        if self._over(job):
            raise RendezvousClosedError(
                f"job {self._job} is over; choose another --rdzv-id for a new one"
            )
        index = job.members.index(self._rdzv.node) if job.state is State.ACTIVE else None
        leaving = self._leaves_with is not None
        if leaving and index is None:
            raise SystemExit(self._leaves_with)
        # torchrun has ended the workers of this round, or has had none of it: it may have ended
        # before its store was there. The next one waits until all have said so.
        if leaving or index is None or job.n == self._round:
            self._leave(job)
            return None
        return self._enter(job, index)

    def _enter(self, job: Snapshot, index: int) -> RendezvousInfo | None:
        """The store of a round, which this node hosts if it is the first; None: not yet."""
        address = self._rdzv.node.address
        # The fence and not the number: a round of this number may have been before etcd was
        # restored.
        if index == 0 and self._hosted[0] != job.fence:
            self._hosted = (job.fence, _host_store(address))
        if index == 0 and job.master is None:
            self._rdzv.publish_master(job, host_port(address, self._hosted[1].port))
        if job.master is None:
            return None
        host, port = split_host_port(job.master)
        store = self._hosted[1]
        if index != 0:
            # The first node may be lost by now, and then this one has to leave the round: it looks
            # at the job again.
            try:
                store = TCPStore(host, port, is_master=False, timeout=_CONNECT)
            except DistError as error:
                log.warning("the store of round %d does not answer: %s", job.n, error)
                return None
            store.set_timeout(_ANSWER)
        self._round = job.n
        self._workers.begin(job, self._job)
        where = RendezvousStoreInfo(host, port)
        return RendezvousInfo(store, index, len(job.members.nodes), where)

    def _leave(self, job: Snapshot) -> None:
        """Report that the workers of this round are gone, as a failure if none was reported."""
        if not job.has_member(self._rdzv.node):
            return
        # Workers that have all left at a step boundary, or were to, have not failed.
        wanted = self._leaves_with is not None or self._workers.have_left
        if job.state is State.ACTIVE and job.yielding is None and not wanted:
            progress = self._workers.progress
            failure = Failure(
                node=self._rdzv.node.id,
                symptom=False,
                summary=f"the workers of node {self._rdzv.node.id} ended",
                step=progress.step if progress is not None else None,
            )
            self._rdzv.report_failure(job.n, failure)
        else:
            self._rdzv.report_quiet(job.n)

    def _obey(self, job: Snapshot) -> None:
        """Begin to leave the job if `zero-ctl drain` asks for it."""
        order = job.drain_order(self._rdzv.node)
        # Again, if the store did not take it.
        if order is not None and not self._rdzv.node.draining:
            self._drain(AgentExit.DRAINED, f"zero-ctl drain by {order.by}")

    def _drain(self, code: int, who: str) -> None:
        self._leaves_with = code
        revision = self._rdzv.drain()
        text = f"{who}: leaving at the next step boundary, if the workers can"
        self._journal.tell("drain", text, revision=revision)

    def _leave_by_notice(self) -> None:
        """Leave with the workers here, which a signal or a notice of the machine has reached."""
        with contextlib.suppress(StoreError), self._turn:
            if self._leaves_with is None:
                self._drain(OF_MACHINE, "a signal, or a notice of this machine")
                # At once: torchrun's thread may be waiting for them to end, and then calls nothing.
                self._leave(self._rdzv.poll())

    def _show(self, job: Snapshot) -> None:
        """Publish what is due, for `zero-ctl`."""
        workers, nodes = self._workers, len(job.members.nodes)
        self._journal.round, self._journal.nodes = job.n, nodes
        self._publisher.alive(nodes=nodes)
        self._publisher.progress(
            workers.progress,
            lease=self._rdzv.lease,
            nodes=nodes,
            preparing=workers.preparing,
            pids=dict(workers.pids),
        )

    @property
    def _closed_key(self) -> str:
        return f"{self._rdzv.keys.prefix}closed"

    def _over(self, job: Snapshot) -> bool:
        running = job.state in (None, State.FORMING, State.ACTIVE)
        return not running or self._store.get(self._closed_key) is not None


@contextlib.contextmanager
def _as_torchs_errors() -> Iterator[None]:
    """Convert errors of etcd to torchrun's, except StoreUnavailable, which may pass by itself."""
    try:
        yield
    except StoreUnavailable:
        raise
    except StoreError as error:
        raise RendezvousConnectionError(str(error)) from error


def _host_store(address: str) -> TCPStore:
    """Host a TCPStore on this address only."""
    # It has no authentication, and torch's own would listen on all addresses.
    family = family_of(address)
    try:
        ipaddress.ip_address(address)  # a name may resolve to the loopback here, and not elsewhere
        listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    except (OSError, ValueError) as error:
        log.warning(
            "cannot listen on %s alone (%s): the round's store listens on all addresses; name an "
            "address of this machine with --local-addr",
            address,
            error,
        )
        six = socket.has_dualstack_ipv6()  # of a host that has IPv6 alone, names lead there
        everywhere = socket.AF_INET6 if six else socket.AF_INET
        listener = socket.create_server(
            ("", 0), family=everywhere, backlog=_BACKLOG, dualstack_ipv6=six
        )
    return TCPStore(
        address,
        int(listener.getsockname()[1]),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        # libuv could not take a socket over before.
        use_libuv=torch.__version__ >= (2, 8),  # type: ignore[operator]
    )
