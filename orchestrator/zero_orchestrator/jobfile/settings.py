"""A job file as variables of `zero-agent`: what all kinds of clusters have in common.

Every flag of the agent can be given as `PET_<FLAG>`. Who calls it: the renderers and `local`.
"""

from __future__ import annotations

from zero_orchestrator.jobfile.schema import JobFile


def settings(file: JobFile) -> dict[str, str]:
    """What every agent of the job is told, etcd excepted."""
    reproducible = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if file.resources.gpu else {}
    return {
        "PET_NNODES": file.nnodes,
        "PET_NPROC_PER_NODE": file.processes_per_node,
        "PET_MAX_RESTARTS": str(file.max_restarts),
        "PET_SHUTDOWN_TIMEOUT": f"{file.drain_s:g}",
        "OMP_NUM_THREADS": str(file.threads_per_worker),
        **reproducible,  # without it cuBLAS may add in another order from run to run
        **file.environment,
    }


def etcd_settings(file: JobFile) -> dict[str, str]:
    """Which etcd of the user's to meet at, and how to log in; empty if there is none."""
    if not file.etcd.endpoints:
        return {}
    user = {"PET_ETCD_USER": file.etcd.user} if file.etcd.user else {}
    files = {f"PET_{flag}": path for flag, path in file.etcd.files.items()}
    return {"PET_RDZV_ENDPOINT": ",".join(file.etcd.endpoints), **user, **files}
