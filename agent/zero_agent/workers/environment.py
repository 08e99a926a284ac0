"""The environment of a worker: torchrun's variables and ours, its files, its CPUs.

Source of the names: torch.distributed.elastic.agent.server.local_elastic_agent; scripts written
for torchrun run unchanged.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path

from zero_agent.workers.exits import fresh_error_file
from zero_agent.workers.output.streams import NAMES, Route, Std, Streams
from zero_contract.signing import Secret
from zero_contract.worker import ENV_HEARTBEAT, ENV_LEAVE
from zero_orchestrator.addresses import split_host_port
from zero_orchestrator.errors import SpecError
from zero_orchestrator.membership.job_state import Node, Snapshot, round_env

log = logging.getLogger("zero")

ENV_TIMERS = "TORCHELASTIC_ENABLE_FILE_TIMER"
ENV_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """The rank of one worker in a round."""

    rank: int
    local_rank: int


def places(job: Snapshot, node: Node) -> list[WorkerPlace]:
    """The places of a member's workers, in local order."""
    index = job.members.index(node)
    assert index is not None, f"{node.id} is no member of round {job.n}"
    first = job.members.first_rank(index)
    return [WorkerPlace(rank=first + local, local_rank=local) for local in range(node.slots)]


def worker_env(
    job: Snapshot,
    node: Node,
    place: WorkerPlace,
    *,
    name: str,
    socket_path: str,
    error_file: str,
    heartbeat_file: str,
    leave_file: str,
    secret: Secret,
) -> dict[str, str]:
    """The variables of a worker, beside those of its agent; the round has its store, or is 0."""
    # In round 0 the address is empty, also if the agent's own environment names a store: a process
    # group cannot be made by mistake.
    assert job.master is not None or not job.n, f"round {job.n} has no master yet"
    host, port = split_host_port(job.master) if job.master is not None else ("", "")
    index = job.members.index(node)
    slots_before = _slots_of_role(job.members.nodes[: index or 0], node.role)
    values: dict[str, object] = {
        "RANK": place.rank,
        "LOCAL_RANK": place.local_rank,
        "WORLD_SIZE": job.members.world_size,
        "LOCAL_WORLD_SIZE": node.slots,
        "GROUP_RANK": index,
        "GROUP_WORLD_SIZE": len(job.members.nodes),
        "ROLE_NAME": node.role,
        "ROLE_RANK": slots_before + place.local_rank,
        "ROLE_WORLD_SIZE": _slots_of_role(job.members.nodes, node.role),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": job.members.restarts,
        "TORCHELASTIC_MAX_RESTARTS": job.spec.max_restarts,
        "TORCHELASTIC_RUN_ID": name,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": error_file,
        # As torchrun: torch's watchdog ends a process whose collective hangs.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ENV_HEARTBEAT: heartbeat_file,
        ENV_LEAVE: leave_file,
    }
    of_round = round_env(job, name, node, secret, socket_path)
    return {key: str(value) for key, value in values.items()} | of_round


def _slots_of_role(nodes: Sequence[Node], role: str) -> int:
    return sum(node.slots for node in nodes if node.role == role)


def own_device(environ: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """The variables of `--virtual-local-rank`: the worker sees only its own GPU, as device 0.

    Raises:
        SpecError: CUDA_VISIBLE_DEVICES shows fewer GPUs.
    """
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    devices = shown.split(",") if shown else [str(n) for n in range(local_rank + 1)]
    if local_rank >= len(devices):
        raise SpecError(
            f"--virtual-local-rank: CUDA_VISIBLE_DEVICES={shown} has no device for local rank "
            f"{local_rank}; start fewer workers with --nproc-per-node"
        )
    # A script chooses its device by LOCAL_RANK, and the only one that this worker sees is device 0.
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices[local_rank]}


def timer_file(environ: Mapping[str, str], default: Path) -> Path | None:
    """The path of torch's file timers; None unless they are enabled, as with torchrun."""
    if environ.get(ENV_TIMERS) != "1":
        return None
    return Path(environ.get(ENV_TIMER_FILE) or default)


def forkserver_env(environ: Mapping[str, str], slots: int, interface: str | None) -> dict[str, str]:
    """The forkserver's environment, which must be set before torch is imported."""
    env = dict(environ)
    if slots > 1:  # as torchrun: each of several workers would otherwise take every core
        env.setdefault("OMP_NUM_THREADS", "1")
    # What a script makes in the order of a set (layers, a list of files) is then the same on all
    # ranks, and in each restart.
    env.setdefault("PYTHONHASHSEED", "0")
    # At level WARNING torch prints thirty lines of C++ stack for each store or peer that is gone.
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Else gloo takes the interface that the host's name resolves to, which may be the loopback.
    if interface is not None:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
    return env


# ---- the orders of a round ----


@dataclass(frozen=True, kw_only=True)
class StartOrder:
    """The order to start one worker."""

    rank: int
    local_rank: int
    env: dict[str, str]
    out: Route = field(default_factory=Route)
    err: Route = field(default_factory=Route)
    cpus: Collection[int] = ()
    """The CPUs that the worker is bound to; empty: it is not bound."""


@dataclass(frozen=True)
class Orders:
    """Makes one agent's orders to start workers; no file is made before a round begins."""

    job: str
    log_dir: Path
    environ: Mapping[str, str] = field(repr=False)
    socket_path: str
    _: KW_ONLY
    streams: Streams
    cpus: Sequence[Collection[int]] = ()
    virtual_local_rank: bool = False
    store_host: str = ""
    """The host by which this node reaches a TCPStore that it hosts itself; empty: as the other
    nodes do."""
    process: str = field(default_factory=partial(secrets.token_hex, 4), init=False)
    """Tells the directories of several agent processes apart: none overwrites another's files."""

    def of(self, job: Snapshot, node: Node, secret: Secret) -> list[StartOrder]:
        """The orders of a round's workers on this node, by local rank, given the job's secret."""
        return [self._order(job, node, place, secret) for place in places(job, node)]

    def directory(self, job: Snapshot) -> Path:
        """The directory of this round's files, laid out as torchrun's."""
        # Rounds without a restart between them share it.
        return self.log_dir / f"{self.job}_{self.process}" / f"attempt_{job.members.restarts}"

    def heartbeats(self, job: Snapshot, node: Node) -> dict[int, Path]:
        """The heartbeat file of each of these workers, by rank."""
        return self._files("heartbeat", job, node)

    def askings(self, job: Snapshot, node: Node) -> dict[int, Path]:
        """The leave file of each of these workers, by rank."""
        return self._files("leave", job, node)

    def _files(self, kind: str, job: Snapshot, node: Node) -> dict[int, Path]:
        return {place.rank: self._file(kind, job.n, place.rank) for place in places(job, node)}

    def _file(self, kind: str, n: int, rank: int) -> Path:
        # Beside the socket, on a local disk wherever the logs are: the agent looks at these files
        # ten times a second, and a network file system shows a change late.
        return Path(self.socket_path).with_name(f"{kind}-{n}-{rank}")

    def _order(self, job: Snapshot, node: Node, place: WorkerPlace, secret: Secret) -> StartOrder:
        directory = self.directory(job)
        own = directory / str(place.local_rank)
        try:
            own.mkdir(parents=True, exist_ok=True)
            error_file = fresh_error_file(own)
        except OSError as error:  # a --log-dir that is full, or gone, costs the logs and no job
            spare = self._file("errors", job.n, place.rank)
            log.warning("%s: %s; its errors go to %s", own, error.strerror, spare)
            with suppress(OSError):  # a worker that finds no directory prints its error
                spare.mkdir()
            error_file = spare / "error.json"
        env = worker_env(
            job,
            node,
            place,
            name=self.job,
            socket_path=self.socket_path,
            error_file=str(error_file),
            heartbeat_file=str(self._file("heartbeat", job.n, place.rank)),
            leave_file=str(self._file("leave", job.n, place.rank)),
            secret=secret,
        )
        # The first node hosts the store, and may not reach itself by the address of the others.
        if self.store_host and job.members.index(node) == 0:
            env["MASTER_ADDR"] = self.store_host
        if self.virtual_local_rank:
            env |= own_device(self.environ, place.local_rank)
        facts = {
            "job": self.job,
            "node": node.id,
            "round": job.n,
            "rank": place.rank,
            "local_rank": place.local_rank,
        }
        out, err = (
            replace(
                self.streams.route(std, directory, place.rank, place.local_rank, node.role),
                facts={**facts, "stream": NAMES[std]},
            )
            for std in (Std.OUT, Std.ERR)
        )
        return StartOrder(
            rank=place.rank,
            local_rank=place.local_rank,
            env=env,
            out=out,
            err=err,
            cpus=self.cpus[place.local_rank] if self.cpus else (),
        )
