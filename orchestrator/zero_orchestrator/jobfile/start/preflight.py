"""Whether a job can run where it is to run: a table of verdicts on facts.

Each check is a pure function of the job file and the facts (`facts`) and yields its complaints; a
fact that could not be had is no complaint. Who calls it: `run`, before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from zero_contract.values import Size
from zero_orchestrator.jobfile.reading.reader import Problem
from zero_orchestrator.jobfile.reading.schema import JobFile
from zero_orchestrator.jobfile.reading.values import cores_number
from zero_orchestrator.jobfile.start.facts import Cluster, Object

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
"""Provisioners whose file systems one machine at a time can mount (their documentation)."""
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
SHARED_CLASSES = "NFS, CephFS, Lustre, Filestore, EFS or Azure Files"


def check(file: JobFile, cluster: Cluster) -> list[Problem]:
    """All complaints."""
    return [problem for one in CHECKS for problem in one(file, cluster)]


def _the_namespace_is_there(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    if cluster.namespace == []:
        name = file.kubernetes.namespace
        text = f"{name}: there is none of this name; kubectl create namespace {name}"
        yield Problem(key="kubernetes.namespace", text=text)


def _the_secret_has_the_files(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    name, paths = file.etcd.secret, file.etcd.files.values()
    entries = {PurePosixPath(path).name: path for path in paths}
    if cluster.secret == []:
        words = [f"--from-file={entry}={path}" for entry, path in entries.items()]
        remedy = " ".join([f"kubectl create secret generic {name}", *words])
        yield Problem(key="etcd.secret", text=f"{name}: there is no such Secret; {remedy}")
    elif cluster.secret:
        there = cluster.secret[0].get("data", {}).keys()
        if missing := entries.keys() - there:
            text = f"{name} has no {', '.join(sorted(missing))}; it has {', '.join(sorted(there))}"
            yield Problem(key="etcd.secret", text=text)


def _the_bucket_can_be_opened(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    name = file.checkpoint.secret
    if cluster.bucket_secret == []:
        text = (
            f"{name}: there is no such Secret; kubectl create secret generic {name} "
            "--from-literal=AWS_ACCESS_KEY_ID=... --from-literal=AWS_SECRET_ACCESS_KEY=..."
        )
        yield Problem(key="checkpoint.secret", text=text)


def _the_secrets_have_their_entries(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    for name, reference in file.secrets.items():
        secret, entry = reference.split("/")
        found = cluster.secrets.get(secret)
        if found == []:
            text = (
                f"there is no Secret {secret}; kubectl create secret generic {secret} "
                f"--from-file={entry}=FILE"
            )
            yield Problem(key=f"secrets.{name}", text=text)
        elif found and entry not in (there := found[0].get("data", {}).keys()):
            text = f"Secret {secret} has no {entry}; it has {', '.join(sorted(there))}"
            yield Problem(key=f"secrets.{name}", text=text)
    for name in file.kubernetes.pull_secrets:
        if cluster.secrets.get(name) == []:
            text = f"{name}: there is no such Secret; kubectl create secret docker-registry {name}"
            yield Problem(key="kubernetes.pull_secrets", text=text)


def _the_priority_class_is_there(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    if cluster.priority_class == []:
        text = f"{file.kubernetes.priority_class}: there is no such PriorityClass; kubectl get pc"
        yield Problem(key="kubernetes.priority_class", text=text)


def _a_machine_has_the_labels(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    """Only a remark: an autoscaler may add one."""
    wanted = file.kubernetes.node_selector.items()
    labels = [one["metadata"].get("labels", {}) for one in cluster.machines or ()]
    if wanted and labels and not any(wanted <= one.items() for one in labels):
        text = f"no machine now has {', '.join('='.join(pair) for pair in wanted)}"
        yield Problem(key="kubernetes.node_selector", text=text, is_fatal=False)


def _the_claim_can_be_shared(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    name = file.checkpoint.claim
    if cluster.claim == []:
        text = f"{name}: there is no such claim; name one that there is, or a size to make one"
        yield Problem(key="checkpoint.claim", text=text)
    elif cluster.claim and file.nodes.max > 1:
        modes = cluster.claim[0]["spec"]["accessModes"]
        if "ReadWriteMany" not in modes:
            text = f"{name} is {', '.join(modes)}; nodes on several machines need ReadWriteMany"
            yield Problem(key="checkpoint.claim", text=text, is_fatal=_has_several(cluster))


def _the_class_offers_what_is_asked(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    if cluster.classes is None or not file.checkpoint.makes_a_claim:
        return
    wanted = file.checkpoint.storage_class
    found = [one for one in cluster.classes if _is_wanted(one, wanted)]
    names = ", ".join(sorted(one["metadata"]["name"] for one in cluster.classes)) or "none at all"
    if not found:
        what = f"{wanted}: there is no such class" if wanted else "there is no default class"
        text = f"{what}; the cluster has {names}"
        yield Problem(key="checkpoint.storage_class", text=text)
    elif file.checkpoint.access == "ReadWriteMany":
        provisioner = found[0]["provisioner"]
        if provisioner.startswith(BLOCK_PROVISIONERS):
            text = (
                f"{found[0]['metadata']['name']} ({provisioner}) offers no ReadWriteMany, so no "
                f"pod would start; name a class of {SHARED_CLASSES}; the cluster has {names}"
            )
            yield Problem(key="checkpoint.storage_class", text=text)


def _is_wanted(one: Object, name: str | None) -> bool:
    metadata = one["metadata"]
    if name is not None:
        return bool(metadata["name"] == name)
    return bool(metadata.get("annotations", {}).get(DEFAULT_CLASS) == "true")


def _one_machine_can_share_anything(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    wanted = file.checkpoint
    is_single = wanted.makes_a_claim and wanted.access == "ReadWriteOnce"
    if is_single and file.nodes.max > 1 and _has_several(cluster):
        text = "ReadWriteOnce: agents on a second machine could not start; write ReadWriteMany"
        yield Problem(key="checkpoint.access", text=text)


def _has_several(cluster: Cluster) -> bool:
    return cluster.machines is not None and len(cluster.machines) > 1


def _a_machine_is_large_enough(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    """Only a remark: an autoscaler may add larger ones."""
    if not cluster.machines:
        return
    offers = [one["status"]["allocatable"] for one in cluster.machines]
    wanted = file.resources
    largest = {
        "cpu": max(cores_number(one.get("cpu", "0")) for one in offers),
        "memory": max(Size(one.get("memory", "0")).size_bytes for one in offers),
        "gpu": max(int(one.get(wanted.gpu_kind, "0")) for one in offers),
    }
    asked = {"cpu": cores_number(wanted.cpu), "memory": wanted.memory.size_bytes, "gpu": wanted.gpu}
    for name, amount in asked.items():
        if amount > largest[name]:
            shown = Size(f"{largest[name] / 2**30:.1f}Gi") if name == "memory" else largest[name]
            text = f"{getattr(wanted, name)}: the largest machine now has {shown} to give"
            yield Problem(key=f"resources.{name}", text=text, is_fatal=False)


def _kueue_has_the_queue(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    name, remedy = file.kubernetes.queue, "deploy/kubernetes/kueue has one"
    if cluster.has_kueue is False:
        text = f"{name}: this cluster has no Kueue; install it, or leave the queue out"
        yield Problem(key="kubernetes.queue", text=text)
    elif cluster.queue == []:
        yield Problem(key="kubernetes.queue", text=f"{name}: there is no such LocalQueue; {remedy}")


def _cert_manager_is_there(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    if cluster.has_cert_manager is False:
        text = "true needs cert-manager, which this cluster has not; https://cert-manager.io"
        yield Problem(key="etcd.tls", text=text)


def _no_job_has_the_name(file: JobFile, cluster: Cluster) -> Iterator[Problem]:
    if cluster.job:
        name = f"{file.name}-train"
        text = (
            f"{file.name}: a job of this name is there, and its configuration cannot change; to "
            f"start a new run after its last checkpoint: kubectl delete job {name}; "
            f"kubectl delete configmap {file.name}-agent {file.name}-training"
        )
        yield Problem(key="name", text=text)


CHECKS: tuple[Check, ...] = (
    _the_namespace_is_there,
    _the_secret_has_the_files,
    _the_bucket_can_be_opened,
    _the_secrets_have_their_entries,
    _the_priority_class_is_there,
    _a_machine_has_the_labels,
    _the_claim_can_be_shared,
    _the_class_offers_what_is_asked,
    _one_machine_can_share_anything,
    _a_machine_is_large_enough,
    _kueue_has_the_queue,
    _cert_manager_is_there,
    _no_job_has_the_name,
)
