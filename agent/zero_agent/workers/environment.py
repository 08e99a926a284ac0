"""What a worker is started with: torchrun's variables and ours beside them, its files, its CPUs.

Source of the names: torch.distributed.elastic.agent.server.local_elastic_agent; scripts written
for torchrun find everything they know.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zero_agent.errors import AgentFailed
from zero_agent.workers.exits import fresh_error_file
from zero_agent.workers.streams import Route, Std, Streams
from zero_contract.exit_codes import AgentExit
from zero_contract.worker import (
    ENV_COMMITTED,
    ENV_FENCE,
    ENV_HEARTBEAT,
    ENV_JOB,
    ENV_LEAVE,
    ENV_NODE,
    ENV_ROUND,
    ENV_SOCKET,
    ENV_VOTE_KEY,
    derived_key,
)
from zero_orchestrator.addresses import split_host_port
from zero_orchestrator.errors import SpecError
from zero_orchestrator.membership.job_state import Node, Snapshot

ENV_TIMERS = "TORCHELASTIC_ENABLE_FILE_TIMER"
ENV_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one worker stands in a round."""

    rank: int
    local_rank: int


def places(job: Snapshot, node: Node) -> list[Place]:
    """The places of a member's workers, in local order."""
    index = job.members.index(node)
    assert index is not None, f"{node.id} is no member of round {job.n}"
    first = job.members.first_rank(index)
    return [Place(rank=first + local, local_rank=local) for local in range(node.slots)]


def worker_env(
    job: Snapshot,
    node: Node,
    place: Place,
    *,
    name: str,
    socket_path: str,
    error_file: str,
    heartbeat_file: str,
    leave_file: str,
    secret: str,
) -> dict[str, str]:
    """What to add to the agent's own environment for one worker of the job's round.

    Args:
        job: The round must be ACTIVE and its master known.
        node: The agent's node, a member.
        place: Which of its workers.
        name: The job's name.
        socket_path: Where the worker reaches its agent.
        error_file: Where it leaves its traceback.
        heartbeat_file: Which it touches to say that it gets on.
        leave_file: Where it looks whether it is to leave.
        secret: The job's, of which the worker gets a key for its round.
    """
    assert job.master is not None, f"round {job.n} has no master yet"
    host, port = split_host_port(job.master)
    world_size = str(job.members.world_size)
    values: dict[str, object] = {
        "RANK": place.rank,
        "LOCAL_RANK": place.local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": node.slots,
        "GROUP_RANK": job.members.index(node),
        "GROUP_WORLD_SIZE": len(job.members.nodes),
        "ROLE_NAME": node.role,
        "ROLE_RANK": _role_rank(job, node, place),
        "ROLE_WORLD_SIZE": _slots_of_role(job.members.nodes, node.role),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": job.members.restarts,
        "TORCHELASTIC_MAX_RESTARTS": job.spec.max_restarts,
        "TORCHELASTIC_RUN_ID": name,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ENV_JOB: name,
        ENV_NODE: node.id,
        ENV_ROUND: job.n,
        ENV_FENCE: job.fence,
        ENV_COMMITTED: job.committed,
        ENV_SOCKET: socket_path,
        ENV_HEARTBEAT: heartbeat_file,
        ENV_LEAVE: leave_file,
        ENV_VOTE_KEY: derived_key(secret, f"votes of round {job.n}"),
    }
    return {key: str(value) for key, value in values.items()}


def _role_rank(job: Snapshot, node: Node, place: Place) -> int:
    """The worker's place among those of its role, in the order of ranks."""
    index = job.members.index(node) or 0
    return _slots_of_role(job.members.nodes[:index], node.role) + place.local_rank


def _slots_of_role(nodes: Sequence[Node], role: str) -> int:
    return sum(node.slots for node in nodes if node.role == role)


def own_device(environ: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """`--virtual-local-rank`: one GPU to see, which is number 0.

    Args:
        environ: The agent's own; it may show only some GPUs.
        local_rank: Which of those is this worker's.
    """
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    devices = shown.split(",") if shown else [str(n) for n in range(local_rank + 1)]
    if local_rank >= len(devices):
        raise SpecError(
            f"--virtual-local-rank: CUDA_VISIBLE_DEVICES={shown} has no device for local rank "
            f"{local_rank}; start fewer workers with --nproc-per-node"
        )
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices[local_rank]}


def timer_file(environ: Mapping[str, str], default: Path) -> Path | None:
    """Where workers reach torch's file timers; None if nobody asks for them, as with torchrun."""
    if environ.get(ENV_TIMERS) != "1":
        return None
    return Path(environ.get(ENV_TIMER_FILE) or default)


def forkserver_env(environ: Mapping[str, str], slots: int, interface: str | None) -> dict[str, str]:
    """The environment that must be right before torch is imported, the same for all rounds.

    Args:
        environ: The agent's own.
        slots: Workers on this node.
        interface: The network interface that has the node's address, if it is known; gloo
            would otherwise take the one that the host's name resolves to.
    """
    env = dict(environ)
    if slots > 1:  # as torchrun: several workers must not each take every core
        env.setdefault("OMP_NUM_THREADS", "1")
    # At its warnings torch prints thirty lines of C++ stack for each store or peer that is gone.
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if interface is not None:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
    return env


# ---- the orders of a round ----


@dataclass(frozen=True, kw_only=True)
class Order:
    """One worker to start."""

    rank: int
    local_rank: int
    env: dict[str, str]
    out: Route = field(default_factory=Route)
    err: Route = field(default_factory=Route)
    cpus: Collection[int] = ()
    """Those it is bound to; none: all."""


class Orders:
    """Writes the orders of one agent."""

    def __init__(
        self,
        job: str,
        log_dir: Path,
        environ: Mapping[str, str],
        socket_path: str,
        *,
        streams: Streams,
        cpus: Sequence[Collection[int]] = (),
        virtual_local_rank: bool = False,
        store_host: str = "",
    ) -> None:
        """Nothing is made before a round begins.

        Args:
            job: The job's name.
            log_dir: Below it the workers leave their error files, and their output if it is kept.
            environ: What the workers inherit.
            socket_path: Where they reach the agent.
            streams: Where their output goes.
            cpus: Which each of them is bound to, by local rank; empty: all of them to all.
            virtual_local_rank: Each sees its own GPU alone, as number 0.
            store_host: How this node reaches a round's store that it hosts, if not as others do.
        """
        self._streams = streams
        self._cpus = cpus
        self._virtual_local_rank = virtual_local_rank
        self._store_host = store_host
        self._job = job
        self._run_dir = log_dir / f"{job}_{secrets.token_hex(4)}"
        self._environ = environ
        self._socket_path = socket_path

    def of(self, job: Snapshot, node: Node, secret: str) -> list[Order]:
        """The orders of a round's workers on this node, in local order, given the job's secret.

        Raises:
            AgentFailed: There is no directory to be had for their files.
        """
        return [self._order(job, node, place, secret) for place in places(job, node)]

    def directory(self, job: Snapshot) -> Path:
        """Of this round's files, where torchrun has them; rounds without a new restart share it.

        Each agent process has a directory of its own, so that none writes over what another left.
        """
        return self._run_dir / f"attempt_{job.members.restarts}"

    def heartbeats(self, job: Snapshot, node: Node) -> dict[int, Path]:
        """Where each of these workers may show its pulse, by rank."""
        return self._files("heartbeat", job, node)

    def askings(self, job: Snapshot, node: Node) -> dict[int, Path]:
        """Where each of these workers may look whether it is to leave, by rank."""
        return self._files("leave", job, node)

    def _files(self, kind: str, job: Snapshot, node: Node) -> dict[int, Path]:
        return {place.rank: self._file(kind, job.n, place.rank) for place in places(job, node)}

    def _file(self, kind: str, n: int, rank: int) -> Path:
        """Beside the socket: that is a local disk, wherever the logs go."""
        return Path(self._socket_path).with_name(f"{kind}-{n}-{rank}")

    def _order(self, job: Snapshot, node: Node, place: Place, secret: str) -> Order:
        directory = self.directory(job)
        env = worker_env(
            job,
            node,
            place,
            name=self._job,
            socket_path=self._socket_path,
            error_file=str(_error_file(directory / str(place.local_rank))),
            heartbeat_file=str(self._file("heartbeat", job.n, place.rank)),
            leave_file=str(self._file("leave", job.n, place.rank)),
            secret=secret,
        )
        if self._store_host and job.members.index(node) == 0:
            env["MASTER_ADDR"] = self._store_host
        if self._virtual_local_rank:
            env |= own_device(self._environ, place.local_rank)
        out, err = (
            self._streams.route(std, directory, place.rank, place.local_rank, node.role)
            for std in (Std.OUT, Std.ERR)
        )
        return Order(
            rank=place.rank,
            local_rank=place.local_rank,
            env=env,
            out=out,
            err=err,
            cpus=self._cpus[place.local_rank] if self._cpus else (),
        )


def _error_file(own: Path) -> Path:
    try:
        own.mkdir(parents=True, exist_ok=True)
        return fresh_error_file(own)
    except OSError as error:
        raise AgentFailed(
            AgentExit.UNHEALTHY,
            f"{own}: {error.strerror}; the workers have nowhere to leave their errors. Make room "
            "there, or name another --log-dir",
        ) from error
