"""DeepSpeed's `deepspeed.comm`: torch.distributed under the names that scripts use.

Owns nothing but the arguments of `init_distributed`. It is for the exchanges of scripts; those of
the engine are in `zero_comm.exchange.collectives`.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_rank,
    get_world_size,
    irecv,
    is_available,
    is_initialized,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)
from torch.distributed.distributed_c10d import get_global_rank, get_process_group_ranks

from zero_comm.exchange.comms_log import LOG
from zero_comm.exchange.objects import gather_objects_of_group
from zero_comm.worker.agent_link import exit_on_peer_loss
from zero_comm.worker.distributed import group_timeout_s
from zero_comm.worker.distributed import init_distributed as _init_from_environment
from zero_comm.worker.distributed import local_rank as get_local_rank
from zero_deepspeed.engine import Asserted

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "inference_all_reduce",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

_log = logging.getLogger(__name__)

get_all_ranks_from_group = get_process_group_ranks
inference_all_reduce = all_reduce


def get_world_group() -> dist.ProcessGroup | None:
    """The group of all ranks."""
    return dist.group.WORLD


def log_summary(show_straggler: bool = False) -> None:
    """Print what a config's "comms_logger" has counted, on rank 0.

    Args:
        show_straggler: Print also how long each rank has waited; every rank must then call this.
            The rank that has waited least is the straggler.
    """
    lines = LOG.lines()
    if show_straggler and is_initialized():
        waits = gather_objects_of_group(LOG.waited_s, "how long each rank has waited")
        lines += [f"rank {rank} waited {wait_s * 1e3:.1f} ms" for rank, wait_s in enumerate(waits)]
    if not is_initialized() or get_rank() == 0:
        print("\n".join(lines))


def init_distributed(  # noqa: PLR0913 - DeepSpeed's arguments
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
    *,
    timeout_s: float | None = None,
) -> None:
    """Join the default process group, unless this process is in one already.

    Args:
        dist_backend: Used with `init_method` only: otherwise gloo, and with a GPU also NCCL.
        auto_mpi_discovery: Use the environment of mpirun or srun if that of torchrun is missing.
        distributed_port: The port of rank 0's store under mpirun and srun.
        verbose: Log rank, world size and backend.
        timeout: The timeout of a collective.
        init_method: A URL for torch.distributed, with `rank` and `world_size`. None: use the
            environment; without RANK there this process is a world of one.
        dist_init_required: False: the script has made the process group.
        config: Without effect.
        rank: The rank, with `init_method`.
        world_size: The world size, with `init_method`.
        timeout_s: The timeout in seconds.

    Raises:
        Asserted: There is no process group, with `dist_init_required=False`.
    """
    del config
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise Asserted(
            "dist_init_required=False without a process group; call init_distributed() before, or "
            "leave the argument out"
        )
    limit = timeout.total_seconds() if timeout is not None else timeout_s
    if init_method is None:
        port = distributed_port if auto_mpi_discovery else None
        with exit_on_peer_loss():
            _init_from_environment(timeout_s=limit, mpi_port=port)
    else:
        dist.init_process_group(
            dist_backend,
            init_method,
            timeout=timedelta(seconds=limit or group_timeout_s()),
            rank=rank,
            world_size=world_size,
        )
    if verbose:
        _log.info("rank %d of %d, %s", dist.get_rank(), dist.get_world_size(), dist.get_backend())
