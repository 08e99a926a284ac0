"""The values of a job file as kustomize patches of deploy/kubernetes.

Most are strategic merge patches: objects with the changed fields alone, in which lists of named
elements are merged by name. JSON patches (RFC 6902) change what kustomize cannot merge.
"""

from __future__ import annotations

from typing import Any

import yaml

from zero_orchestrator.jobfile.reading.checks import AGENT
from zero_orchestrator.jobfile.reading.schema import CONFIG_NAME, JobFile

Object = dict[str, Any]

CHECKPOINTS = "/checkpoints"
CONFIG = f"/etc/zero/{CONFIG_NAME}"

NODE_IS_LOST = tuple(
    {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute",
     "tolerationSeconds": 30}
    for what in ("not-ready", "unreachable")
)  # fmt: skip
"""The tolerations of the base: a pod on a lost machine is replaced after 30 s, not 5 minutes."""
_STORAGE = "/spec/volumeClaimTemplates/0/spec/resources/requests/storage"
_QUEUE = "/metadata/labels/kueue.x-k8s.io~1queue-name"
_LEAST = "/metadata/annotations/kueue.x-k8s.io~1job-min-parallelism"
_IDENTITY = ("--rdzv-id=$(JOB_NAME)-$(JOB_UID)", "--node-id=$(POD_NAME)", "--local-addr=$(POD_IP)")


def members(file: JobFile) -> dict[str, str]:
    """Pod -> its DNS name, for every member of the etcd that is made for the job."""
    service = f"{file.name}-etcd"
    return {f"{service}-{n}": f"{service}-{n}.{service}" for n in range(file.etcd.members)}


def merges(file: JobFile) -> list[Object]:
    """Strategic merge patches: objects that name what they change."""
    found = [_job(file)]
    if file.checkpoint.makes_a_claim:
        wanted = file.checkpoint
        spec: Object = {
            "accessModes": [wanted.access],
            "resources": {"requests": {"storage": str(wanted.size)}},
            **({"storageClassName": wanted.storage_class} if wanted.storage_class else {}),
        }
        found.append(_object("v1", "PersistentVolumeClaim", "checkpoints", spec=spec))
    if not file.etcd.endpoints:
        hosts = ",".join(f"{pod}=$(SCHEME)://{host}:2380" for pod, host in members(file).items())
        # Patched variables move to the front, so all must be here that one of them refers to.
        environment = {
            "SERVICE": f"{file.name}-etcd",
            "SCHEME": "https" if file.etcd.tls else "http",
            "INITIAL_CLUSTER": hosts,
        }
        variables = [{"name": name, "value": value} for name, value in environment.items()]
        pod: Object = {"containers": [{"name": "etcd", "env": variables}]}
        if file.etcd.tls:
            secret = f"{file.name}-etcd-server-tls"
            pod["volumes"] = [{"name": "tls", "secret": {"secretName": secret}}]
        spec = {"replicas": file.etcd.members, "template": {"spec": pod}}
        found.append(_object("apps/v1", "StatefulSet", "etcd", spec=spec))
    budget = {"minAvailable": file.nodes.min}
    found.append(_object("policy/v1", "PodDisruptionBudget", "train", spec=budget))
    if file.kubernetes.pod:
        template = dict(file.kubernetes.pod)
        # A merge replaces a list without names: here it keeps what the base has.
        if "tolerations" in (spec := template.get("spec", {})):
            template["spec"] = {**spec, "tolerations": [*NODE_IS_LOST, *spec["tolerations"]]}
        found.append(_object("batch/v1", "Job", "train", spec={"template": template}))
    return found


def _object(version: str, kind: str, name: str, **more: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **more}


def _job(file: JobFile) -> Object:
    wanted, scratch = file.resources, str(file.resources.scratch)
    volumes: list[Object] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(wanted.shared_memory)}},
        {"name": "tmp", "emptyDir": {"sizeLimit": scratch}},
    ]
    # With an object store, the agents write nothing but logs here.
    if file.checkpoint.url is not None:
        empty = {"persistentVolumeClaim": None, "emptyDir": {"sizeLimit": scratch}}
        volumes.append({"name": "checkpoints", **empty})
    elif file.checkpoint.claim is not None:
        claim = {"claimName": file.checkpoint.claim}
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": claim})
    secrets = {"etcd-client-tls": f"{file.name}-etcd-client-tls"} if file.etcd.tls else {}
    secrets |= {"etcd-credentials": file.etcd.secret} if file.etcd.secret else {}
    volumes += [{"name": name, "secret": {"secretName": of}} for name, of in secrets.items()]
    asked = file.kubernetes
    placement = {
        "nodeSelector": dict(asked.node_selector),
        "priorityClassName": asked.priority_class,
        "imagePullSecrets": [{"name": name} for name in asked.pull_secrets],
    }
    pod = {
        "subdomain": f"{file.name}-train",
        "terminationGracePeriodSeconds": int(file.grace),
        "containers": [_agent(file)],
        "volumes": volumes,
        **{name: value for name, value in placement.items() if value},
    }
    spec = {"parallelism": file.start, "completions": file.start, "template": {"spec": pod}}
    return _object("batch/v1", "Job", "train", spec=spec)


def _agent(file: JobFile) -> Object:
    """The container with the agent and its workers."""
    wanted, opens = file.resources, file.checkpoint.secret
    each: Object = {"cpu": wanted.cpu, "memory": str(wanted.memory)}
    # None takes the base's own kind away.
    if wanted.gpu:
        each |= {"nvidia.com/gpu": None, wanted.gpu_kind: str(wanted.gpu)}
    # Two volumes may have this size each, and a pod that exceeds its limit is evicted.
    doubled = f"{2 * wanted.scratch.size_bytes // 2**20}Mi"
    checkpoints = file.checkpoint.url or f"{CHECKPOINTS}/{file.name}"
    words = [file.script, *file.arguments(config=CONFIG, checkpoints=checkpoints)]
    found: Object = {
        "name": AGENT,
        # Of `$(NAME)` and `$$` the kubelet would make something else.
        "args": [*_IDENTITY, *(word.replace("$", "$$") for word in words)],
        "resources": {
            "requests": {**each, "ephemeral-storage": str(wanted.scratch)},
            "limits": {**each, "ephemeral-storage": doubled},
        },
    }
    if opens is not None:
        maps = [{"configMapRef": {"name": "agent"}}, {"secretRef": {"name": opens}}]
        found["envFrom"] = maps
    # Variables from Secrets: the pod refers to the entries, so no rendered object has a value.
    references = {name: text.split("/") for name, text in file.secrets.items()}
    variables = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, (secret, key) in references.items()
    ]
    return {**found, **({"env": variables} if variables else {})}


def operations(file: JobFile) -> list[Object]:
    """JSON patches: changes in lists without names, and in kinds of other projects."""
    found = [_replace("StatefulSet", "etcd", _STORAGE, str(file.etcd.storage))]
    if not file.checkpoint.makes_a_claim:
        gone = _object("v1", "PersistentVolumeClaim", "checkpoints") | {"$patch": "delete"}
        found.append({"patch": yaml.safe_dump(gone)})
    if file.kubernetes.queue is not None:
        found += [
            _replace("Job", "train", _QUEUE, file.kubernetes.queue),
            _replace("Job", "train", _LEAST, str(file.nodes.min)),
        ]
    if not file.etcd.tls:
        return found
    # kustomize gives its prefix to the names of cert-manager's objects, not to those inside them.
    of_job = f"{file.name}-"
    secrets = ("etcd-ca", "etcd-server-tls", "etcd-client-tls")
    issuers = {"etcd-ca": "etcd-self-signed", "etcd-server": "etcd-ca", "etcd-client": "etcd-ca"}
    found += [
        _replace("Certificate", secret.removesuffix("-tls"), "/spec/secretName", of_job + secret)
        for secret in secrets
    ]
    found += [
        _replace("Certificate", name, "/spec/issuerRef/name", of_job + issuer)
        for name, issuer in issuers.items()
    ]
    return [
        *found,
        _replace("Issuer", "etcd-ca", "/spec/ca/secretName", f"{of_job}etcd-ca"),
        _replace("Certificate", "etcd-server", "/spec/dnsNames", [*members(file).values()]),
    ]


def _replace(kind: str, name: str, path: str, value: Any) -> Object:
    change = [{"op": "replace", "path": path, "value": value}]
    return {"target": {"kind": kind, "name": name}, "patch": yaml.safe_dump(change)}
