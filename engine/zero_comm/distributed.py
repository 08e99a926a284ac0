"""The process group and the device of this worker.

Owns how a worker finds its rank: from the environment of torchrun and zero-agent, or of mpirun and
srun (`discovery`), or as a world of one.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from zero_comm.discovery import discover
from zero_comm.waiting import transport_failures
from zero_contract.errors import ConfigError

GROUP_TIMEOUT_S = 600.0
"""The timeout of a collective; DeepSpeed's default as well."""
MPI_PORT = 29500
"""The port of rank 0's store under mpirun and srun; DeepSpeed's default as well."""


def group_timeout_s() -> float:
    """The timeout of a collective: DEEPSPEED_TIMEOUT, in minutes, or the default."""
    minutes = os.environ.get("DEEPSPEED_TIMEOUT", "")
    try:
        return 60 * float(minutes) if minutes else GROUP_TIMEOUT_S
    except ValueError:
        raise ConfigError(f"DEEPSPEED_TIMEOUT={minutes}: not a number of minutes") from None


def init_distributed(*, timeout_s: float | None = None, mpi_port: int | None = MPI_PORT) -> None:
    """Join the default process group, unless this process is in one already.

    With RANK and WORLD_SIZE in the environment, or the variables of mpirun or srun, the group is
    that of all ranks; without them this process is a world of one and needs no network.

    Args:
        timeout_s: The timeout of a collective.
        mpi_port: The port of rank 0's store under mpirun and srun; None: ignore these launchers.

    Raises:
        ConfigError: mpirun has started this worker, and the host of rank 0 is unknown.
        PeerLost: A rank, or the host of the store, is lost.
    """
    if dist.is_initialized():
        return
    if mpi_port is not None and "RANK" not in os.environ:
        os.environ |= discover(os.environ, mpi_port)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_s or group_timeout_s())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        with transport_failures("meeting the other ranks"):
            dist.init_process_group(backend, timeout=timeout)
    else:
        store = HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


class GroupStore(PrefixStore):
    """The part of the default group's store under `path`."""

    def __init__(self, path: str, store: Store) -> None:
        super().__init__(path, store)
        self.path = path


def group_store(name: str) -> GroupStore:
    """A part of the default group's store that nothing else uses.

    Every rank gets the same part for its first, second, ... call with this name.
    """
    store = dist.distributed_c10d._get_default_store()
    turn = store.add(f"zero/{name}/calls/{dist.get_rank()}", 1)
    return GroupStore(f"zero/{name}/{turn}", store)


def local_rank() -> int:
    """This worker's number on its node; 0 outside torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_device() -> torch.device:
    """The device that this worker computes on."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank())
    return torch.device("cpu")
