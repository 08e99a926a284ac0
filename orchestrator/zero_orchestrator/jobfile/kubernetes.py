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
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from zero_orchestrator.errors import ZeroError
from zero_orchestrator.jobfile import templates
from zero_orchestrator.jobfile.schema import CONFIG_NAME, Job, JobFile
from zero_orchestrator.jobfile.settings import etcd_settings, settings

Object = dict[str, Any]

CHECKPOINTS = "/checkpoints"
CONFIG = f"/etc/zero/{CONFIG_NAME}"
SECRET_FILES = "/etc/zero-etcd"
INSTANCE = "app.kubernetes.io/instance"
RENDER_TIMEOUT_S = 60.0

_HEAD = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
_PARTS = "parts"
_RENDERERS = (("kubectl", "kustomize"), ("kustomize", "build"))
_IDENTITY = ("--rdzv-id=$(JOB_NAME)-$(JOB_UID)", "--node-id=$(POD_NAME)", "--local-addr=$(POD_IP)")


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
        done = subprocess.run(
            [*renderer, str(where)],
            capture_output=True, text=True, timeout=RENDER_TIMEOUT_S, check=False,
        )  # fmt: skip
    if done.returncode:
        raise ToolMissing(f"{' '.join(renderer)} failed: {done.stderr.strip()}")
    return done.stdout


def files(job: Job, directory: Path) -> dict[str, str]:
    """The kustomization that is to lie in `directory`: file name -> text.

    It has two layers, as a component's variables would win over those beside it.
    """
    top = Path(os.path.relpath(templates.KUBERNETES, directory / _PARTS))
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
    return {
        **_HEAD,
        **({"namespace": file.kubernetes.namespace} if file.kubernetes.namespace else {}),
        "namePrefix": f"{file.name}-",
        "labels": [{"pairs": {INSTANCE: file.name}, "includeSelectors": True}],
        "resources": [_PARTS],
        "images": [_image(file.image)],
        "generatorOptions": {"immutable": True},
        "configMapGenerator": _config_maps(job),
        "patches": [{"patch": yaml.safe_dump(one, sort_keys=False)} for one in _patches(file)]
        + _operations(file),
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


def _config_maps(job: Job) -> list[Object]:
    flags = settings(job.file) | _endpoint(job.file)
    agent = {
        "name": "agent",
        "behavior": "merge",
        "literals": [f"{name}={value}" for name, value in flags.items()],
    }
    training = {"name": "training", "behavior": "merge", "files": [CONFIG_NAME]}
    return [agent, training] if job.config is not None else [agent]


def _endpoint(file: JobFile) -> dict[str, str]:
    """Where etcd is; its files are those of the Secret, by the same names."""
    if not file.etcd.endpoints:
        return {"PET_RDZV_ENDPOINT": ",".join(f"{host}:2379" for host in _members(file).values())}
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


def _members(file: JobFile) -> dict[str, str]:
    """Pod -> its DNS name, of every member of the job's own etcd."""
    service = f"{file.name}-etcd"
    return {f"{service}-{n}": f"{service}-{n}.{service}" for n in range(file.etcd.members)}


# ---- the job's numbers ----


def _patches(file: JobFile) -> list[Object]:
    """Patches that name what they change; lists of named things are merged by name."""
    found = [_job(file)]
    if file.checkpoint.claim is None:
        found.append(_claim(file))
    if not file.etcd.endpoints:
        found.append(_etcd(file))
    budget = {"minAvailable": file.nodes.min}
    return [*found, _object("policy/v1", "PodDisruptionBudget", "train", spec=budget)]


def _object(version: str, kind: str, name: str, **more: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **more}


def _job(file: JobFile) -> Object:
    claim = file.checkpoint.claim
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(file.resources.shm)}},
        {"name": "tmp", "emptyDir": {"sizeLimit": str(file.resources.scratch)}},
        *(
            [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}]
            if claim
            else []
        ),
        *_secrets(file),
    ]
    pod = {
        "subdomain": f"{file.name}-train",
        "terminationGracePeriodSeconds": int(file.grace),
        "containers": [{"name": "agent", "args": _arguments(file), "resources": _resources(file)}],
        "volumes": volumes,
    }
    spec = {"parallelism": file.start, "completions": file.start, "template": {"spec": pod}}
    return _object("batch/v1", "Job", "train", spec=spec)


def _arguments(file: JobFile) -> list[str]:
    places = file.arguments(config=CONFIG, checkpoints=f"{CHECKPOINTS}/{file.name}")
    return [*_IDENTITY, file.script, *places]


def _resources(file: JobFile) -> Object:
    wanted = file.resources
    one: Object = {"cpu": wanted.cpu, "memory": str(wanted.memory)}
    if wanted.gpu:
        one |= {"nvidia.com/gpu": None, wanted.gpu_kind: str(wanted.gpu)}
    scratch = str(wanted.scratch)
    doubled = f"{2 * wanted.scratch.size_bytes // 2**20}Mi"
    return {
        "requests": {**one, "ephemeral-storage": scratch},
        "limits": {**one, "ephemeral-storage": doubled},
    }


def _secrets(file: JobFile) -> list[Object]:
    names = {"etcd-client-tls": f"{file.name}-etcd-client-tls"} if file.etcd.tls else {}
    names |= {"etcd-credentials": file.etcd.secret} if file.etcd.secret else {}
    return [{"name": volume, "secret": {"secretName": secret}} for volume, secret in names.items()]


def _claim(file: JobFile) -> Object:
    wanted = file.checkpoint
    spec = {
        "accessModes": [wanted.access],
        "resources": {"requests": {"storage": str(wanted.size)}},
        **({"storageClassName": wanted.storage_class} if wanted.storage_class else {}),
    }
    return _object("v1", "PersistentVolumeClaim", "checkpoints", spec=spec)


def _etcd(file: JobFile) -> Object:
    cluster = ",".join(f"{pod}=$(SCHEME)://{host}:2380" for pod, host in _members(file).items())
    # Patched variables move to the front, so all must be here that one of them refers to.
    environment = {
        "SERVICE": f"{file.name}-etcd",
        "SCHEME": "https" if file.etcd.tls else "http",
        "INITIAL_CLUSTER": cluster,
    }
    variables = [{"name": name, "value": value} for name, value in environment.items()]
    pod: Object = {"containers": [{"name": "etcd", "env": variables}]}
    if file.etcd.tls:
        secret = f"{file.name}-etcd-server-tls"
        pod["volumes"] = [{"name": "tls", "secret": {"secretName": secret}}]
    spec = {"replicas": file.etcd.members, "template": {"spec": pod}}
    return _object("apps/v1", "StatefulSet", "etcd", spec=spec)


def _operations(file: JobFile) -> list[Object]:
    """Patches of what kustomize cannot merge: lists without names, and other projects' kinds."""
    found = [_target("StatefulSet", "etcd", _STORAGE, str(file.etcd.storage))]
    if file.checkpoint.claim is not None:
        gone = _object("v1", "PersistentVolumeClaim", "checkpoints") | {"$patch": "delete"}
        found.append({"patch": yaml.safe_dump(gone)})
    if file.kubernetes.queue is not None:
        found += [
            _target("Job", "train", _QUEUE, file.kubernetes.queue),
            _target("Job", "train", _LEAST, str(file.nodes.min)),
        ]
    return found + (_certificates(file) if file.etcd.tls else [])


def _target(kind: str, name: str, path: str, value: Any) -> Object:
    change = [{"op": "replace", "path": path, "value": value}]
    return {"target": {"kind": kind, "name": name}, "patch": yaml.safe_dump(change)}


def _certificates(file: JobFile) -> list[Object]:
    """cert-manager's objects: kustomize knows no names inside of them."""
    prefix = f"{file.name}-"
    secrets = ("etcd-ca", "etcd-server-tls", "etcd-client-tls")
    found = [
        _target("Certificate", secret.removesuffix("-tls"), "/spec/secretName", prefix + secret)
        for secret in secrets
    ]
    signers = {"etcd-ca": "etcd-self-signed", "etcd-server": "etcd-ca", "etcd-client": "etcd-ca"}
    found += [
        _target("Certificate", name, "/spec/issuerRef/name", prefix + signer)
        for name, signer in signers.items()
    ]
    return [
        *found,
        _target("Issuer", "etcd-ca", "/spec/ca/secretName", f"{prefix}etcd-ca"),
        _target("Certificate", "etcd-server", "/spec/dnsNames", [*_members(file).values()]),
    ]


_STORAGE = "/spec/volumeClaimTemplates/0/spec/resources/requests/storage"
_QUEUE = "/metadata/labels/kueue.x-k8s.io~1queue-name"
_LEAST = "/metadata/annotations/kueue.x-k8s.io~1job-min-parallelism"
