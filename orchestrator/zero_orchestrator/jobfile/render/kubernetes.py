"""A job file as a kustomization of deploy/kubernetes, and as Kubernetes objects.

kustomize combines the base, the components that the job asks for, and patches with the values of
the job. What the job file does not set is rendered as deploy/kubernetes has it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from zero_contract.errors import ZeroError
from zero_orchestrator.jobfile.reading.schema import CONFIG_NAME, Job
from zero_orchestrator.jobfile.reading.settings import etcd_settings, settings
from zero_orchestrator.jobfile.render.files import KUBERNETES
from zero_orchestrator.jobfile.render.patches import members, merges, operations

SECRET_FILES = "/etc/zero-etcd"
INSTANCE = "app.kubernetes.io/instance"
RENDER_TIMEOUT_S = 60.0

_HEAD = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
_PARTS = "parts"
_RENDERERS = (("kubectl", "kustomize"), ("kustomize", "build"))


class ToolMissing(ZeroError):
    """A program that is needed is not on the PATH, failed, or did not end in time."""


def render(job: Job) -> str:
    """The objects, as YAML for `kubectl apply -f`.

    Raises:
        ToolMissing: Neither kubectl nor kustomize is on the PATH, or it failed.
    """
    renderer = next((one for one in _RENDERERS if shutil.which(one[0])), None)
    if renderer is None:
        raise ToolMissing(
            "rendering for Kubernetes needs kubectl or kustomize on the PATH; "
            "https://kubernetes.io/docs/tasks/tools has both"
        )
    with tempfile.TemporaryDirectory() as directory:
        # Without links, as the path from here to the base is relative.
        where = Path(directory).resolve()
        for name, text in files(job, where).items():
            (where / name).parent.mkdir(exist_ok=True)
            (where / name).write_text(text, encoding="utf-8")
        try:
            done = subprocess.run(
                [*renderer, str(where)],
                capture_output=True, text=True, timeout=RENDER_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ToolMissing(
                f"{' '.join(renderer)} did not end within {RENDER_TIMEOUT_S:g} s; try again"
            ) from None
    if done.returncode:
        raise ToolMissing(f"{' '.join(renderer)} failed: {done.stderr.strip()}")
    return done.stdout


def files(job: Job, directory: Path) -> dict[str, str]:
    """The kustomization for a directory: file name -> text."""
    file = job.file
    # Two layers: the variables of a component would win over those beside it.
    top = Path(os.path.relpath(KUBERNETES, directory / _PARTS))
    components = {
        "gpu": file.resources.gpu > 0,
        "spot": file.spot,
        "tls": file.etcd.tls,
        "external-etcd": bool(file.etcd.endpoints),
        "etcd-credentials": file.etcd.secret is not None,
        "kueue": file.kubernetes.queue is not None,
    }
    asked = [name for name, is_asked in components.items() if is_asked]
    parts = {
        **_HEAD,
        "resources": [str(top / "base")],
        "components": [str(top / "components" / name) for name in asked],
    }
    whole = {
        **_HEAD,
        **({"namespace": file.kubernetes.namespace} if file.kubernetes.namespace else {}),
        # Prefix and label of the job: several jobs can run in one namespace.
        "namePrefix": f"{file.name}-",
        "labels": [{"pairs": {INSTANCE: file.name}, "includeSelectors": True}],
        "resources": [_PARTS],
        "images": [{"name": "zero-elastic", **_image(file.image)}],
        "generatorOptions": {"immutable": True},
        "configMapGenerator": _config_maps(job),
        "patches": [{"patch": yaml.safe_dump(one, sort_keys=False)} for one in merges(file)]
        + operations(file),
    }
    return {
        f"{_PARTS}/kustomization.yaml": yaml.safe_dump(parts, sort_keys=False),
        "kustomization.yaml": yaml.safe_dump(whole, sort_keys=False),
        **({CONFIG_NAME: job.config} if job.config is not None else {}),
    }


def _image(image: str) -> dict[str, str]:
    name, at, digest = image.partition("@")
    if at:
        return {"newName": name, "digest": digest}
    name, colon, tag = image.rpartition(":")
    if not colon or "/" in tag:  # a port of the registry is no tag
        name, tag = image, "latest"
    return {"newName": name, "newTag": tag}


def _config_maps(job: Job) -> list[dict[str, Any]]:
    """The agents' variables, and the config of the engine if there is one."""
    file = job.file
    flags = settings(file)
    if not file.etcd.endpoints:
        hosts = members(file).values()
        flags["PET_RDZV_ENDPOINT"] = ",".join(f"{host}:2379" for host in hosts)
    else:
        # Without these, the component's own values would hold.
        if file.etcd.secret:
            flags |= {"PET_ETCD_USER": "", "PET_ETCD_CA": "", "PET_ETCD_PASSWORD_FILE": ""}
        flags |= etcd_settings(file)
        # Pods have the files of the Secret, under their names without directories.
        for flag, path in file.etcd.files.items():
            flags[f"PET_{flag}"] = f"{SECRET_FILES}/{PurePosixPath(path).name}"
    # kustomize takes away a pair of quotes around a whole value.
    literals = [
        f'{name}="{value}"' if value[:1] in ("'", '"') else f"{name}={value}"
        for name, value in flags.items()
    ]
    found: list[dict[str, Any]] = [{"name": "agent", "behavior": "merge", "literals": literals}]
    if job.config is not None:
        found.append({"name": "training", "behavior": "merge", "files": [CONFIG_NAME]})
    return found
