"""Preflight checks: whether a job can run on a Kubernetes cluster.

Each check is a pure function of the job file and of the facts about the cluster (`facts`), and
yields problems. A fact that could not be read (None) is no problem.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from zero_orchestrator.jobfile.reading.reader import Problem
from zero_orchestrator.jobfile.reading.schema import JobFile, cores_number
from zero_orchestrator.jobfile.start.facts import Cluster

Check = Callable[[JobFile, Cluster], Iterator[Problem]]

BLOCK_PROVISIONERS = (
    "ebs.csi.aws.com",
    "kubernetes.io/aws-ebs",
    "pd.csi.storage.gke.io",
    "kubernetes.io/gce-pd",
    "disk.csi.azure.com",
    "kubernetes.io/azure-disk",
    "cinder.csi.openstack.org",
    "rbd.csi.ceph.com",
    "rancher.io/local-path",
    "k8s.io/minikube-hostpath",
    "docker.io/hostpath",
    "topolvm.io",
    "kubernetes.io/no-provisioner",
)
"""Provisioners of volumes that one machine at a time can mount (their documentation)."""
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
SHARED_CLASSES = "NFS, CephFS, Lustre, Filestore, EFS or Azure Files"


def check(file: JobFile, cluster: Cluster) -> list[Problem]:
    """All problems of this job on this cluster."""
    return [problem for one in CHECKS for problem in one(file, cluster)]


def _objects(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    """The cluster has the objects and the controllers that the job refers to, and no such job."""
    wanted = file.kubernetes
    # Empty: there is none. None: it could not be read, or is not used.
    if cluster.namespace == []:
        text = (
            f"{wanted.namespace}: there is no such namespace; "
            f"kubectl create namespace {wanted.namespace}"
        )
        yield Problem(key="kubernetes.namespace", text=text)
    if cluster.priority_class == []:
        text = f"{wanted.priority_class}: there is no such PriorityClass; kubectl get pc"
        yield Problem(key="kubernetes.priority_class", text=text)
    if cluster.has_kueue is False:
        text = f"{wanted.queue}: this cluster has no Kueue; install it, or leave the queue out"
        yield Problem(key="kubernetes.queue", text=text)
    elif cluster.queue == []:
        text = f"{wanted.queue}: there is no such LocalQueue; deploy/kubernetes/kueue has one"
        yield Problem(key="kubernetes.queue", text=text)
    if cluster.has_cert_manager is False:
        text = "true needs cert-manager, which this cluster does not have; https://cert-manager.io"
        yield Problem(key="etcd.tls", text=text)
    if cluster.job:
        name = f"{file.name}-train"
        text = (
            f"{file.name}: a job of this name is there, and its configuration cannot change; to "
            f"start a new run after its last checkpoint: kubectl delete job {name}; "
            f"kubectl delete configmap {file.name}-agent {file.name}-training"
        )
        yield Problem(key="name", text=text)


def _secrets(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    """Each Secret that the job refers to is in the cluster and has the entries that are used."""
    name = file.etcd.secret
    entries = {PurePosixPath(path).name: path for path in file.etcd.files.values()}
    if cluster.secret == []:
        words = [f"--from-file={entry}={path}" for entry, path in entries.items()]
        remedy = " ".join([f"kubectl create secret generic {name}", *words])
        yield Problem(key="etcd.secret", text=f"{name}: there is no such Secret; {remedy}")
    elif cluster.secret:
        # A Secret without an entry has no `data`.
        there = cluster.secret[0].get("data", {}).keys()
        if missing := entries.keys() - there:
            text = f"{name} has no {', '.join(sorted(missing))}; it has {', '.join(sorted(there))}"
            yield Problem(key="etcd.secret", text=text)
    if cluster.bucket_secret == []:
        name = file.checkpoint.secret
        text = (
            f"{name}: there is no such Secret; kubectl create secret generic {name} "
            "--from-literal=AWS_ACCESS_KEY_ID=... --from-literal=AWS_SECRET_ACCESS_KEY=..."
        )
        yield Problem(key="checkpoint.secret", text=text)
    for variable, reference in file.secrets.items():
        secret, entry = reference.split("/")
        found = cluster.secrets.get(secret)
        if found == []:
            text = (
                f"there is no Secret {secret}; kubectl create secret generic {secret} "
                f"--from-file={entry}=FILE"
            )
            yield Problem(key=f"secrets.{variable}", text=text)
        elif found and entry not in (there := found[0].get("data", {}).keys()):
            text = f"Secret {secret} has no {entry}; it has {', '.join(sorted(there))}"
            yield Problem(key=f"secrets.{variable}", text=text)
    for name in file.kubernetes.pull_secrets:
        if cluster.secrets.get(name) == []:
            text = f"{name}: there is no such Secret; kubectl create secret docker-registry {name}"
            yield Problem(key="kubernetes.pull_secrets", text=text)


def _claim_that_exists(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    """The claim that the job file names exists, and agents on several machines can mount it."""
    name = file.checkpoint.claim
    if cluster.claim == []:
        text = f"{name}: there is no such claim; name an existing claim, or a size to create one"
        yield Problem(key="checkpoint.claim", text=text)
    elif cluster.claim and file.nodes.max > 1:
        modes = cluster.claim[0]["spec"]["accessModes"]
        if "ReadWriteMany" not in modes:
            text = f"{name} is {', '.join(modes)}; nodes on several machines need ReadWriteMany"
            # On one machine all agents can mount it.
            is_fatal = _has_several_machines(cluster)
            yield Problem(key="checkpoint.claim", text=text, is_fatal=is_fatal)


def _claim_to_create(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    """The claim that is created for the job gets a volume which all of its agents can mount."""
    wanted = file.checkpoint
    if not wanted.makes_a_claim:
        return
    if cluster.classes is not None:
        by_name = {one["metadata"]["name"]: one for one in cluster.classes}
        defaults = (
            name
            for name, one in by_name.items()
            if one["metadata"].get("annotations", {}).get(DEFAULT_CLASS) == "true"
        )
        name = wanted.storage_class if wanted.storage_class is not None else next(defaults, "")
        names = ", ".join(sorted(by_name)) or "none at all"
        if name not in by_name:
            what = f"{name}: there is no such class" if name else "there is no default class"
            yield Problem(key="checkpoint.storage_class", text=f"{what}; the cluster has {names}")
        elif wanted.access == "ReadWriteMany":
            provisioner = by_name[name]["provisioner"]
            if provisioner.startswith(BLOCK_PROVISIONERS):
                text = (
                    f"{name} ({provisioner}) offers no ReadWriteMany, so no pod would start; "
                    f"name a class of {SHARED_CLASSES}; the cluster has {names}"
                )
                yield Problem(key="checkpoint.storage_class", text=text)
    is_for_one_machine = wanted.access == "ReadWriteOnce"
    if is_for_one_machine and file.nodes.max > 1 and _has_several_machines(cluster):
        text = "ReadWriteOnce: agents on a second machine could not start; write ReadWriteMany"
        yield Problem(key="checkpoint.access", text=text)


def _has_several_machines(cluster: Cluster) -> bool:
    return cluster.machines is not None and len(cluster.machines) > 1


_QUANTITY = re.compile(r"(\d*\.?\d+|\d+\.)(?:[eE]([+-]?\d{1,2}))?([numkKMGTPE]?)(i?)")


def _quantity(text: str) -> float:
    """A quantity of Kubernetes: `500m`, `64G`, `32Gi`, `1e9`; infinite if it cannot be read."""
    if (match := _QUANTITY.fullmatch(text)) is None:
        return math.inf  # a fact that cannot be read is no problem
    number, exponent, unit, binary = match.groups()
    power = "num kMGTPE".index(unit.replace("K", "k") or " ") - 3
    return float(number) * 10.0 ** int(exponent or 0) * (1024.0 if binary else 1000.0) ** power


def _machines(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    """A machine has the labels and the size for an agent."""
    if not cluster.machines:
        return
    # No problem here is fatal: an autoscaler may add machines.
    selector = file.kubernetes.node_selector.items()
    labels = [one["metadata"].get("labels", {}) for one in cluster.machines]
    if selector and not any(selector <= one.items() for one in labels):
        text = f"no machine now has {', '.join('='.join(pair) for pair in selector)}"
        yield Problem(key="kubernetes.node_selector", text=text, is_fatal=False)
    offers = [one["status"]["allocatable"] for one in cluster.machines]
    wanted = file.resources
    largest = {
        name: max(_quantity(one.get(key, "0")) for one in offers)
        for name, key in {"cpu": "cpu", "memory": "memory", "gpu": wanted.gpu_kind}.items()
    }
    asked = {"cpu": cores_number(wanted.cpu), "memory": wanted.memory.size_bytes, "gpu": wanted.gpu}
    for name, amount in asked.items():
        if amount > largest[name]:
            shown = f"{largest[name]:g}"
            if name == "memory":
                shown = f"{largest[name] / 2**30:.1f}Gi"
            text = f"{getattr(wanted, name)}: the largest machine now offers {shown}"
            yield Problem(key=f"resources.{name}", text=text, is_fatal=False)


CHECKS: tuple[Check, ...] = (_objects, _secrets, _claim_that_exists, _claim_to_create, _machines)
