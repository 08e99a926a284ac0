"""The rank, world size and master address of workers that mpirun or srun have started.

Owns the environment variables of these launchers, as a table. Must always hold: the variables of
torchrun or zero-agent win; a place is complete or an error, and is never guessed.

Source: the manuals of Open MPI (OMPI_*), MPICH and Intel MPI (PMI_*, MPI_*), MVAPICH2 (MV2_*) and
Slurm (SLURM_*); DeepSpeed's `mpi_discovery` asks MPI itself, through mpi4py, which is tried here
only for the address of rank 0.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from zero_contract.errors import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The variables of one launcher."""

    name: str
    rank: str
    world: tuple[str, ...]
    """Names of variables, of which the first that is set counts."""
    local_rank: str
    local_world: str = ""
    nodelist: tuple[str, ...] = ()
    """Names of variables with the list of hosts, the first of which runs rank 0."""
    only_with: str = ""
    """The launcher is meant only if this variable is set, too."""


LAUNCHERS = (
    Launcher(
        name="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        world=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        name="MVAPICH2",
        rank="MV2_COMM_WORLD_RANK",
        world=("MV2_COMM_WORLD_SIZE",),
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_world="MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        name="MPICH or Intel MPI",
        rank="PMI_RANK",
        world=("PMI_SIZE",),
        local_rank="MPI_LOCALRANKID",
        local_world="MPI_LOCALNRANKS",
    ),
    Launcher(
        name="Slurm",
        rank="SLURM_PROCID",
        world=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        nodelist=("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"),
        only_with="SLURM_STEP_ID",  # a batch script has the others, too, and is one process
    ),
)


def discover(environ: Mapping[str, str], port: int) -> dict[str, str]:
    """The variables that torchrun would have set; {} if no such launcher has started this process.

    `port` is that of rank 0's store if MASTER_PORT is not set.

    Raises:
        ConfigError: The host of rank 0 is unknown.
    """
    started = (
        launcher
        for launcher in LAUNCHERS
        if launcher.rank in environ and (launcher.only_with or launcher.rank) in environ
    )
    launcher = next(started, None)
    if launcher is None:
        return {}
    world = next((environ[name] for name in launcher.world if name in environ), "1")
    local_world = environ.get(launcher.local_world, world if world == "1" else "")
    address = environ.get("MASTER_ADDR")
    if not address:
        hosts = next((environ[name] for name in launcher.nodelist if name in environ), None)
        if hosts is not None:
            address = first_of(hosts)
        elif local_world == world:
            address = LOOPBACK
        else:
            try:
                from mpi4py import MPI
            except ImportError:
                raise ConfigError(
                    f"{launcher.name} runs this worker on one of several hosts and does not say "
                    "which has rank 0: set MASTER_ADDR (mpirun -x MASTER_ADDR=HOST), or install "
                    "mpi4py"
                ) from None
            mine = socket.gethostbyname(socket.gethostname())
            address = str(MPI.COMM_WORLD.bcast(mine, root=0))
    return {
        "RANK": environ[launcher.rank],
        "WORLD_SIZE": world,
        "LOCAL_RANK": environ.get(launcher.local_rank, "0"),
        "MASTER_ADDR": address,
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }


def first_of(nodelist: str) -> str:
    """The first host of a Slurm list: `gpu[07-12,15],cpu1` -> `gpu07`.

    Source: the hostlist expressions of `scontrol show hostnames`.
    """
    first = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodelist)
    return first.partition(",")[0].strip()
