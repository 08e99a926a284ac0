"""The numbers of a job file as patches of deploy/kubernetes.

Most are objects with the changed fields alone, in which lists of named things are merged by name;
what kustomize cannot merge so is a list of operations. Who calls it: `kubernetes`.
"""

from __future__ import annotations

from typing import Any

import yaml

from zero_orchestrator.jobfile.reading.schema import CONFIG_NAME, JobFile

Object = dict[str, Any]

CHECKPOINTS = "/checkpoints"
CONFIG = f"/etc/zero/{CONFIG_NAME}"

_IDENTITY = ("--rdzv-id=$(JOB_NAME)-$(JOB_UID)", "--node-id=$(POD_NAME)", "--local-addr=$(POD_IP)")


def members(file: JobFile) -> dict[str, str]:
    """Pod -> its DNS name, of every member of the job's own etcd."""
    service = f"{file.name}-etcd"
    return {f"{service}-{n}": f"{service}-{n}.{service}" for n in range(file.etcd.members)}


def named(file: JobFile) -> list[Object]:
    """Patches that name what they change; lists of named things are merged by name."""
    found = [_job(file)]
    if file.checkpoint.makes_a_claim:
        wanted = file.checkpoint
        spec = {
            "accessModes": [wanted.access],
            "resources": {"requests": {"storage": str(wanted.size)}},
            **({"storageClassName": wanted.storage_class} if wanted.storage_class else {}),
        }
        found.append(_object("v1", "PersistentVolumeClaim", "checkpoints", spec=spec))
    if not file.etcd.endpoints:
        found.append(_etcd(file))
    budget = {"minAvailable": file.nodes.min}
    return [*found, _object("policy/v1", "PodDisruptionBudget", "train", spec=budget)]


def _object(version: str, kind: str, name: str, **more: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **more}


def _job(file: JobFile) -> Object:
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(file.resources.shm)}},
        {"name": "tmp", "emptyDir": {"sizeLimit": str(file.resources.scratch)}},
        *_checkpoints(file),
        *_secrets(file),
    ]
    # The variables that Secrets hold: pods refer to them, and no object of ours has a value
    references = {name: text.split("/") for name, text in file.secrets.items()}
    found = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, (secret, key) in references.items()
    ]
    place = file.checkpoint.url or f"{CHECKPOINTS}/{file.name}"
    pod = {
        "subdomain": f"{file.name}-train",
        "terminationGracePeriodSeconds": int(file.grace),
        "containers": [
            {
                "name": "agent",
                "args": [
                    *_IDENTITY,
                    file.script,
                    *file.arguments(config=CONFIG, checkpoints=place),
                ],
                "resources": _resources(file),
                **_opening(file),
                **({"env": found} if found else {}),
            }
        ],
        "volumes": volumes,
        **_placement(file),
    }
    spec = {"parallelism": file.start, "completions": file.start, "template": {"spec": pod}}
    return _object("batch/v1", "Job", "train", spec=spec)


def _checkpoints(file: JobFile) -> list[Object]:
    """The volume, where it is not the base's: a claim that there is, or logs beside a bucket."""
    if file.checkpoint.url is not None:
        scratch = {"sizeLimit": str(file.resources.scratch)}
        return [{"name": "checkpoints", "persistentVolumeClaim": None, "emptyDir": scratch}]
    if file.checkpoint.claim is not None:
        claim = {"claimName": file.checkpoint.claim}
        return [{"name": "checkpoints", "persistentVolumeClaim": claim}]
    return []


def _opening(file: JobFile) -> Object:
    """The variables with which the object store lets the agents in."""
    if file.checkpoint.secret is None:
        return {}
    secret = {"secretRef": {"name": file.checkpoint.secret}}
    return {"envFrom": [{"configMapRef": {"name": "agent"}}, secret]}


def _placement(file: JobFile) -> Object:
    """On which machines the agents run, and with which rights."""
    asked = file.kubernetes
    found = {
        "nodeSelector": dict(asked.node_selector),
        "priorityClassName": asked.priority_class,
        "imagePullSecrets": [{"name": name} for name in asked.pull_secrets],
    }
    return {name: value for name, value in found.items() if value}


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


def _etcd(file: JobFile) -> Object:
    cluster = ",".join(f"{pod}=$(SCHEME)://{host}:2380" for pod, host in members(file).items())
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


def operations(file: JobFile) -> list[Object]:
    """Patches of what kustomize cannot merge: lists without names, and other projects' kinds."""
    found = [_target("StatefulSet", "etcd", _STORAGE, str(file.etcd.storage))]
    if not file.checkpoint.makes_a_claim:
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
        _target("Certificate", "etcd-server", "/spec/dnsNames", [*members(file).values()]),
    ]


_STORAGE = "/spec/volumeClaimTemplates/0/spec/resources/requests/storage"
_QUEUE = "/metadata/labels/kueue.x-k8s.io~1queue-name"
_LEAST = "/metadata/annotations/kueue.x-k8s.io~1job-min-parallelism"
