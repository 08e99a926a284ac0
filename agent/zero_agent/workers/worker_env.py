"""The environment of a worker: torchrun's variables, and ours beside them.

Source of the names: torch.distributed.elastic.agent.server.local_elastic_agent; scripts written
for torchrun find everything they know.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def nursery_env(environ: Mapping[str, str], slots: int, interface: str | None) -> dict[str, str]:
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
