"""A job file as environment variables of `zero-agent`, and as arguments of the script.

Each flag of the agent has an environment variable `PET_<FLAG>`.
"""

from __future__ import annotations

from pathlib import Path

from zero_orchestrator.jobfile.reading.reader import JobFileError, Problem
from zero_orchestrator.jobfile.reading.schema import Job, JobFile

FLAGS = (
    *("refill_after_steps", "max_restarts_without_progress", "exclude_after", "exclude_for"),
    *("grow_every", "node_unit", "join_timeout", "etcd_wait", "etcd_grace", "lease_ttl", "preload"),
    *("hang_timeout", "health_check", "health_check_timeout", "numa_binding"),
)
"""Keys that set the flag of the same name; the default of a missing key is the agent's."""


def settings(file: JobFile) -> dict[str, str]:
    """Environment variables of every agent of the job, without those of etcd."""
    # Without it, cuBLAS may add in another order in each run.
    reproducible = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if file.resources.gpu else {}
    given = {key: getattr(file, key) for key in FLAGS} | {"ram_budget": file.checkpoint.ram_budget}
    return {
        "PET_NNODES": file.nnodes,
        "PET_NPROC_PER_NODE": file.processes_per_node,
        "PET_MAX_RESTARTS": str(file.max_restarts),
        # Without an exponent, which the agent does not read.
        "PET_SHUTDOWN_TIMEOUT": f"{file.drain_s:.3f}".rstrip("0").rstrip("."),
        **{variable(key): str(value) for key, value in given.items() if value is not None},
        "OMP_NUM_THREADS": str(file.threads_per_worker),
        **reproducible,
        # Last, so that the user's own variables count.
        **file.environment,
    }


def variable(key: str) -> str:
    """The environment variable that sets the flag of `zero-agent` with this name."""
    return f"PET_{key.upper()}"


def etcd_settings(file: JobFile) -> dict[str, str]:
    """Variables with the user's own etcd and its credentials; empty if the job has its own etcd."""
    if not file.etcd.endpoints:
        return {}
    user = {"PET_ETCD_USER": file.etcd.user} if file.etcd.user else {}
    files = {f"PET_{flag}": path for flag, path in file.etcd.files.items()}
    return {"PET_RDZV_ENDPOINT": ",".join(file.etcd.endpoints), **user, **files}


def places(job: Job, *, config: str, default: Path | None = None) -> list[str]:
    """The script's arguments on machines, with the paths of the config and the checkpoints.

    Pods have other paths; on machines both are in directories that all machines share. `default` is
    that of the checkpoints if the file names no place.

    Raises:
        JobFileError: The arguments use $(CHECKPOINTS), and the file names no place.
    """
    wanted = job.file.checkpoint
    path = wanted.url or wanted.path or default
    if path is None and job.file.uses("CHECKPOINTS"):
        text = (
            "is missing; set it to a directory that all machines share, or set checkpoint.url: "
            "$(CHECKPOINTS) stands for it"
        )
        raise JobFileError(job.source.message(Problem(key="checkpoint.path", text=text)))
    return job.file.arguments(config=config, checkpoints=str(path))
