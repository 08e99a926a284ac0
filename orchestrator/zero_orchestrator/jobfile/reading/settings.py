"""A job file as variables of `zero-agent`, and as the script's arguments, on any cluster.

Every flag of the agent can be given as `PET_<FLAG>`. Who calls it: the renderers and `run`.
"""

from __future__ import annotations

from pathlib import Path

from zero_orchestrator.jobfile.reading.reader import JobFileError, Problem
from zero_orchestrator.jobfile.reading.schema import Job, JobFile

FLAGS = (
    *("refill_after_steps", "max_restarts_without_progress", "exclude_after", "exclude_for"),
    *("grow_every",),
    *("node_unit", "join_timeout", "etcd_wait", "etcd_grace", "lease_ttl", "preload"),
    *("hang_timeout", "health_check", "health_check_timeout", "numa_binding"),
)
"""Keys that are a flag of the same name; without them, the agent's own default holds."""


def settings(file: JobFile) -> dict[str, str]:
    """What every agent of the job is told, etcd excepted."""
    reproducible = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if file.resources.gpu else {}
    given = {key: getattr(file, key) for key in FLAGS} | {"ram_budget": file.checkpoint.ram_budget}
    return {
        "PET_NNODES": file.nnodes,
        "PET_NPROC_PER_NODE": file.processes_per_node,
        "PET_MAX_RESTARTS": str(file.max_restarts),
        "PET_SHUTDOWN_TIMEOUT": f"{file.drain_s:g}",
        **{variable(key): str(value) for key, value in given.items() if value is not None},
        "OMP_NUM_THREADS": str(file.threads_per_worker),
        **reproducible,  # without it cuBLAS may add in another order from run to run
        **file.environment,
    }


def variable(key: str) -> str:
    """With which `zero-agent` is given the flag of this name."""
    return f"PET_{key.upper()}"


def etcd_settings(file: JobFile) -> dict[str, str]:
    """Which etcd of the user's to meet at, and how to log in; empty if there is none."""
    if not file.etcd.endpoints:
        return {}
    user = {"PET_ETCD_USER": file.etcd.user} if file.etcd.user else {}
    files = {f"PET_{flag}": path for flag, path in file.etcd.files.items()}
    return {"PET_RDZV_ENDPOINT": ",".join(file.etcd.endpoints), **user, **files}


def places(job: Job, default: Path | None = None) -> list[str]:
    """The script's arguments, with the config's and the checkpoints' paths.

    On machines, as opposed to pods, both are in directories that all of them see.

    Args:
        job: The job.
        default: Where checkpoints go if the file does not say.

    Raises:
        JobFileError: They name the checkpoints' place, and the file does not.
    """
    wanted = job.file.checkpoint
    path = wanted.url or wanted.path or default
    if path is None and job.file.uses("CHECKPOINTS"):
        text = (
            "is missing; on machines $(CHECKPOINTS) is a directory that all of them see, or a url"
        )
        raise JobFileError(job.source.tell(Problem(key="checkpoint.path", text=text)))
    return job.file.arguments(config=str(job.config_path), checkpoints=str(path))
