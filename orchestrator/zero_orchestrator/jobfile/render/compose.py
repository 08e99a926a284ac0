"""A job file as a compose file: deploy/compose.yaml with the values of the job."""

from __future__ import annotations

from typing import Any

import yaml

from zero_orchestrator.jobfile.reading.schema import CONFIG_NAME, Job
from zero_orchestrator.jobfile.reading.settings import etcd_settings, settings
from zero_orchestrator.jobfile.render import files

TEMPLATE = "compose.yaml"
CHECKPOINTS = "/checkpoints"
CONFIG = f"/etc/zero/{CONFIG_NAME}"
TLS = "/tls"
_MISSING = "is a secret of this job: set it in the environment, or in .env"


def render(job: Job) -> str:
    """The compose file."""
    file = job.file
    found: dict[str, Any] = yaml.safe_load(files.read(TEMPLATE))
    found["name"] = file.name
    services = found["services"]
    services["volume-owner"]["image"] = services["certificates"]["image"] = file.image
    agent = services["agent"]
    if file.etcd.endpoints:
        _remove_etcd(found)
    del agent["build"]
    agent |= {
        "image": file.image,
        "command": [
            f"--rdzv-id={file.name}",
            file.script,
            *file.arguments(
                config=CONFIG, checkpoints=file.checkpoint.url or f"{CHECKPOINTS}/{file.name}"
            ),
        ],
        "stop_grace_period": f"{file.grace:g}s",
        "shm_size": file.resources.shared_memory.size_bytes,
    }
    if (limit_bytes := job.memory_limit_bytes) is not None:
        agent["mem_limit"] = limit_bytes
    # `$` in a value is a variable of compose unless doubled.
    agent["command"] = [word.replace("$", "$$") for word in agent["command"]]
    agent["environment"] |= {
        name: value.replace("$", "$$")
        for name, value in (settings(file) | etcd_settings(file)).items()
    }
    agent["environment"] |= {name: f"${{{name}:?{_MISSING}}}" for name in file.secrets}
    agent["deploy"] = {"replicas": file.start}
    if file.resources.gpu:
        device = {"driver": "nvidia", "count": file.resources.gpu, "capabilities": ["gpu"]}
        agent["deploy"]["resources"] = {"reservations": {"devices": [device]}}
    # Agents read the files of this machine at the same paths, and the config at CONFIG.
    config = [f"{job.config_path}:{CONFIG}:ro"] if job.config is not None else []
    agent["volumes"] += config + [f"{path}:{path}:ro" for path in job.file.etcd.files.values()]
    return yaml.safe_dump(found, sort_keys=False)


def _remove_etcd(found: dict[str, Any]) -> None:
    """Remove the template's etcd, its certificates, and all references to them."""
    services, volumes = found["services"], found["volumes"]
    agent, owner = services["agent"], services["volume-owner"]
    del services["etcd"], services["certificates"], volumes["etcd"], volumes["tls"]
    del agent["depends_on"]["etcd"]
    for name in ("PET_ETCD_CA", "PET_ETCD_CERT", "PET_ETCD_KEY"):
        del agent["environment"][name]
    agent["volumes"].remove(f"tls:{TLS}:ro")
    owner["volumes"].remove(f"tls:{TLS}")
    owner["entrypoint"].remove(TLS)
