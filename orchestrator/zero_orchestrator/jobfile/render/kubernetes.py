"""A job file as a kustomization of deploy/kubernetes, and as the objects that it makes.

A job is the base, the components that it asks for, and patches with its numbers; kustomize puts
them together. All of a job's objects have its name as a prefix, and its pods and selectors a
label with it, so several jobs live in one namespace.

Must always hold: what deploy/kubernetes says and the job file does not is what is rendered. Who
calls it: `render`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import yaml

from zero_contract.errors import ZeroError
from zero_orchestrator.jobfile.reading.schema import CONFIG_NAME, Job, JobFile
from zero_orchestrator.jobfile.reading.settings import etcd_settings, settings
from zero_orchestrator.jobfile.render.files import KUBERNETES
from zero_orchestrator.jobfile.render.patches import Object, members, named, operations

SECRET_FILES = "/etc/zero-etcd"
INSTANCE = "app.kubernetes.io/instance"
RENDER_TIMEOUT_S = 60.0

_HEAD = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
_PARTS = "parts"
_RENDERERS = (("kubectl", "kustomize"), ("kustomize", "build"))


class ToolMissing(ZeroError):
    """A program that is needed is not on the PATH, or failed."""


def render(job: Job) -> str:
    """The objects, as YAML for `kubectl apply -f`.

    Raises:
        ToolMissing: There is neither kubectl nor kustomize, or it could not do it.
    """
    renderer = next((one for one in _RENDERERS if shutil.which(one[0])), None)
    if renderer is None:
        raise ToolMissing(
            "rendering for Kubernetes needs kubectl or kustomize on the PATH; "
            "https://kubernetes.io/docs/tasks/tools has both"
        )
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory).resolve()
        for name, text in files(job, where).items():
            (where / name).parent.mkdir(exist_ok=True)
            (where / name).write_text(text, encoding="utf-8")
        done = _run(renderer, where)
    if done.returncode:
        raise ToolMissing(f"{' '.join(renderer)} failed: {done.stderr.strip()}")
    return done.stdout


def _run(renderer: Sequence[str], where: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [*renderer, str(where)],
            capture_output=True, text=True, timeout=RENDER_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ToolMissing(
            f"{' '.join(renderer)} did not end within {RENDER_TIMEOUT_S:g} s; try again"
        ) from None


def files(job: Job, directory: Path) -> dict[str, str]:
    """The kustomization that is to lie in `directory`: file name -> text.

    It has two layers, as a component's variables would win over those beside it.
    """
    top = Path(os.path.relpath(KUBERNETES, directory / _PARTS))
    parts = {
        **_HEAD,
        "resources": [str(top / "base")],
        "components": [str(top / "components" / name) for name in _components(job.file)],
    }
    return {
        f"{_PARTS}/kustomization.yaml": yaml.safe_dump(parts, sort_keys=False),
        "kustomization.yaml": yaml.safe_dump(_kustomization(job), sort_keys=False),
        **({CONFIG_NAME: job.config} if job.config is not None else {}),
    }


def _kustomization(job: Job) -> Object:
    file = job.file
    flags = settings(job.file) | _endpoint(job.file)
    agent = {
        "name": "agent",
        "behavior": "merge",
        "literals": [_literal(name, value) for name, value in flags.items()],
    }
    training = {"name": "training", "behavior": "merge", "files": [CONFIG_NAME]}
    return {
        **_HEAD,
        **({"namespace": file.kubernetes.namespace} if file.kubernetes.namespace else {}),
        "namePrefix": f"{file.name}-",
        "labels": [{"pairs": {INSTANCE: file.name}, "includeSelectors": True}],
        "resources": [_PARTS],
        "images": [_image(file.image)],
        "generatorOptions": {"immutable": True},
        "configMapGenerator": ([agent, training] if job.config is not None else [agent]),
        "patches": [{"patch": yaml.safe_dump(one, sort_keys=False)} for one in named(file)]
        + operations(file),
    }


def _image(image: str) -> Object:
    name, at, digest = image.partition("@")
    if at:
        return {"name": "zero-elastic", "newName": name, "digest": digest}
    name, colon, tag = image.rpartition(":")
    if not colon or "/" in tag:  # a port of the registry is no tag
        name, tag = image, "latest"
    return {"name": "zero-elastic", "newName": name, "newTag": tag}


def _components(file: JobFile) -> list[str]:
    asked = {
        "gpu": file.resources.gpu > 0,
        "spot": file.spot,
        "tls": file.etcd.tls,
        "external-etcd": bool(file.etcd.endpoints),
        "etcd-credentials": file.etcd.secret is not None,
        "kueue": file.kubernetes.queue is not None,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def _literal(name: str, value: str) -> str:
    """A variable as kustomize reads it: it takes a pair of quotes around the whole value away."""
    return f'{name}="{value}"' if value[:1] in ("'", '"') else f"{name}={value}"


def _endpoint(file: JobFile) -> dict[str, str]:
    """Where etcd is; its files are those of the Secret, by the same names."""
    if not file.etcd.endpoints:
        return {"PET_RDZV_ENDPOINT": ",".join(f"{host}:2379" for host in members(file).values())}
    flags = etcd_settings(file)
    return {
        **({"PET_ETCD_USER": "", "PET_ETCD_CA": ""} if file.etcd.secret else {}),
        **({"PET_ETCD_PASSWORD_FILE": ""} if file.etcd.secret else {}),
        **flags,
        **{
            f"PET_{flag}": f"{SECRET_FILES}/{PurePosixPath(path).name}"
            for flag, path in file.etcd.files.items()
        },
    }
