"""What keeps a job from running on a cluster is named before anything is made there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.test_run import ctl, job_file
from tests.support.kube_api import CERT_MANAGER, KUEUE, KubeApi, Object, served
from tests.support.ports import free_port
from tests.support.programs import works
from tests.unit.jobfile.support import job
from zero_orchestrator.jobfile.start import facts
from zero_orchestrator.jobfile.start.facts import Cluster
from zero_orchestrator.jobfile.start.preflight import DEFAULT_CLASS, check

needs_kubectl = pytest.mark.skipif(not works("kubectl"), reason="needs a kubectl that works")


def storage_class(name: str, provisioner: str, *, default: bool = True) -> Object:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": {DEFAULT_CLASS: str(default).lower()}},
        "provisioner": provisioner,
    }


def machine(name: str, **offers: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "status": {"allocatable": {"cpu": "8", "memory": "33554432Ki", **offers}},
    }


NFS, EBS = storage_class("nfs", "nfs.csi.k8s.io"), storage_class("gp3", "ebs.csi.aws.com")


def cluster(**found: object) -> Cluster:
    """A cluster in which nothing is wrong, but for what is said here."""
    fine: dict[str, object] = {
        "namespace": None, "machines": [machine("a"), machine("b")], "classes": [NFS],
        "claim": None, "secret": None, "bucket_secret": None, "queue": None, "has_kueue": None,
        "has_cert_manager": None, "job": [], "secrets": {}, "priority_class": None,
    }  # fmt: skip
    return Cluster(**{**fine, **found})  # type: ignore[arg-type]


LOGIN = "etcd: {endpoints: e:1, secret: login, user: u, password_file: /x/word, ca: /x/ca.pem}"
WANDB = "secrets: {TOKEN: wandb/key}"
FATAL = [
    (
        WANDB, "secrets", {"wandb": []},
        "secrets.TOKEN: there is no Secret wandb; kubectl create secret generic wandb "
        "--from-file=key=FILE",
    ),
    (
        WANDB, "secrets", {"wandb": [{"data": {"other": ""}}]},
        "secrets.TOKEN: Secret wandb has no key; it has other",
    ),
    (
        "kubernetes: {pull_secrets: registry}", "secrets", {"registry": []},
        "kubernetes.pull_secrets: registry: there is no such Secret; kubectl create secret "
        "docker-registry registry",
    ),
    (
        "kubernetes: {priority_class: high}", "priority_class", [],
        "kubernetes.priority_class: high: there is no such PriorityClass; kubectl get pc",
    ),
    (
        "kubernetes: {namespace: team}", "namespace", [],
        "kubernetes.namespace: team: there is no such namespace; kubectl create namespace team",
    ),
    (
        LOGIN, "secret", [],
        "etcd.secret: login: there is no such Secret; kubectl create secret generic login "
        "--from-file=ca.pem=/x/ca.pem --from-file=word=/x/word",
    ),
    (
        LOGIN, "secret", [{"data": {"word": ""}}],
        "etcd.secret: login has no ca.pem; it has word",
    ),
    (
        "checkpoint: {url: s3://b, secret: s}", "bucket_secret", [],
        "checkpoint.secret: s: there is no such Secret; kubectl create secret generic s "
        "--from-literal=AWS_ACCESS_KEY_ID=... --from-literal=AWS_SECRET_ACCESS_KEY=...",
    ),
    (
        "checkpoint: {claim: c}", "claim", [],
        "checkpoint.claim: c: there is no such claim; name an existing claim, or a size to "
        "create one",
    ),
    (
        "checkpoint: {claim: c}", "claim", [{"spec": {"accessModes": ["ReadWriteOnce"]}}],
        "checkpoint.claim: c is ReadWriteOnce; nodes on several machines need ReadWriteMany",
    ),
    (
        "", "classes", [],
        "checkpoint.storage_class: there is no default class; the cluster has none at all",
    ),
    (
        "checkpoint: {storage_class: fast}", "classes", [NFS],
        "checkpoint.storage_class: fast: there is no such class; the cluster has nfs",
    ),
    (
        "", "classes", [EBS, storage_class("efs", "efs.csi.aws.com", default=False)],
        "checkpoint.storage_class: gp3 (ebs.csi.aws.com) offers no ReadWriteMany, so no pod would "
        "start; name a class of NFS, CephFS, Lustre, Filestore, EFS or Azure Files; the cluster "
        "has efs, gp3",
    ),
    (
        "checkpoint: {access: ReadWriteOnce}", "classes", [EBS],
        "checkpoint.access: ReadWriteOnce: agents on a second machine could not start; write "
        "ReadWriteMany",
    ),
    (
        "kubernetes: {queue: q}", "queue", [],
        "kubernetes.queue: q: there is no such LocalQueue; deploy/kubernetes/kueue has one",
    ),
    (
        "", "job", [{"kind": "Job"}],
        "name: gpt: a job of this name is there, and its configuration cannot change; to start a "
        "new run after its last checkpoint: kubectl delete job gpt-train; kubectl delete "
        "configmap gpt-agent gpt-training",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("more", "fact", "found", "text"), FATAL)
def test_what_would_keep_the_job_from_running_is_named_with_the_remedy(
    tmp_path, more, fact, found, text
):
    [problem] = check(job(tmp_path, more).file, cluster(**{fact: found}))
    assert (f"{problem.key}: {problem.text}", problem.is_fatal) == (text, True)


@pytest.mark.parametrize(
    ("more", "fact", "key"),
    [
        ("kubernetes: {queue: q}", {"has_kueue": False}, "kubernetes.queue"),
        ("etcd: {tls: true}", {"has_cert_manager": False}, "etcd.tls"),
    ],
)
def test_a_part_that_the_cluster_has_not_is_named(tmp_path, more, fact, key):
    [problem] = check(job(tmp_path, more).file, cluster(**fact))
    assert (problem.key, problem.is_fatal) == (key, True)


def test_what_may_not_be_looked_at_is_no_complaint(tmp_path):
    unknown = dict.fromkeys(("machines", "classes", "job"))
    assert check(job(tmp_path, LOGIN).file, cluster(**unknown)) == []


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        ("{cpu: 64}", "64: the largest machine now offers 8"),
        ("{memory: 100Gi}", "100Gi: the largest machine now offers 32.0Gi"),
        ("{gpu: 4}", "4: the largest machine now offers 1"),
    ],
)
def test_a_machine_that_is_too_small_is_only_remarked_as_a_larger_one_may_come(
    tmp_path, resources, text
):
    machines = [machine("a"), machine("b", **{"nvidia.com/gpu": "1"})]
    file = job(tmp_path, f"resources: {resources}").file
    [problem] = check(file, cluster(machines=machines))
    assert (problem.text, problem.is_fatal) == (text, False)


def test_on_a_single_machine_agents_share_any_volume(tmp_path):
    file = job(tmp_path, "checkpoint: {access: ReadWriteOnce}").file
    assert check(file, cluster(machines=[machine("a")], classes=[EBS])) == []


# ---- through kubectl ----


@needs_kubectl
def test_a_job_that_can_run_is_applied(tmp_path):
    api = KubeApi(CERT_MANAGER | KUEUE)
    for one in (machine("a"), machine("b"), NFS):
        api.add(one)
    path = job_file(tmp_path, etcd={"tls": True})
    with served(api, tmp_path) as kubeconfig:
        done = ctl("run", path, KUBECONFIG=str(kubeconfig), HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "on kubernetes, since kubectl has the context test" in done.stderr
    made = [(one["kind"], one["metadata"]["name"]) for one in api.created]
    assert {("Job", "gpt-train"), ("StatefulSet", "gpt-etcd"), ("Certificate", "gpt-etcd-ca")} <= {
        *made
    }


@needs_kubectl
def test_everything_that_is_wrong_with_a_cluster_is_told_at_once_and_nothing_is_made(tmp_path):
    api = KubeApi()
    for one in (machine("a"), machine("b"), EBS):
        api.add(one)
    job_before = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "gpt-train"}}
    api.add(job_before, namespace="team")
    path = job_file(
        tmp_path,
        etcd={"tls": True},
        kubernetes={"namespace": "team", "queue": "q"},
    )
    with served(api, tmp_path) as kubeconfig:
        words = ("run", path, "--on", "kubernetes")
        done = ctl(*words, KUBECONFIG=str(kubeconfig), HOME=str(tmp_path))
    assert done.returncode == 2
    assert api.created == []
    keys = [
        line.removeprefix("zero-ctl: ").removeprefix(f"{path}:").split(": ")[1]
        for line in done.stderr.splitlines()
    ]
    assert keys == [
        "checkpoint.storage_class", "etcd.tls", "kubernetes.namespace", "kubernetes.queue", "name",
    ]  # fmt: skip


@needs_kubectl
def test_a_cluster_that_does_not_answer_is_named(tmp_path):
    api = KubeApi()
    with served(api, tmp_path) as kubeconfig:
        pass
    done = ctl("run", job_file(tmp_path), KUBECONFIG=str(kubeconfig), HOME=str(tmp_path))
    assert done.returncode == 2
    assert "the cluster of kubectl's context does not answer: The connection to the server" in (
        done.stderr
    )
    assert "Traceback" not in done.stderr


# ---- the network ----


@pytest.mark.parametrize(
    ("image", "registry"),
    [
        ("zero-elastic:0.1.0", None),
        ("me/gpt", facts.DOCKER_HUB),
        ("registry.example/gpt:1", "registry.example"),
        ("localhost:5000/gpt", "localhost:5000"),
    ],
)
def test_the_registry_of_an_image_is_known_from_its_name(image, registry):
    assert facts.registry_of(image) == registry


def test_a_registry_is_reached_or_the_reason_is_told(tmp_path):
    api = KubeApi()
    with served(api, tmp_path) as kubeconfig:
        port = int(Path(kubeconfig).read_text().partition("127.0.0.1:")[2].split()[0])
        assert facts.why_no_registry(f"127.0.0.1:{port}") == "it answers 404 to /v2/"
        api.answer = lambda path: {}  # type: ignore[method-assign]
        assert facts.why_no_registry(f"127.0.0.1:{port}") is None
    assert "refused" in str(facts.why_no_registry(f"127.0.0.1:{port}"))


def test_one_member_of_etcd_that_answers_is_enough(tmp_path):
    dead = f"127.0.0.1:{free_port()}"
    with served(KubeApi(), tmp_path) as kubeconfig:
        live = Path(kubeconfig).read_text().partition("http://")[2].split()[0]
        assert facts.why_no_etcd([dead, live]) is None
    assert facts.why_no_etcd([dead]) == f"{dead}: Connection refused"


@pytest.mark.parametrize(
    ("offers", "asked", "enough"),
    [
        ({"memory": "64G"}, "{memory: 59Gi}", True),
        ({"memory": "64G"}, "{memory: 60Gi}", False),
        ({"memory": "8589934592000m"}, "{memory: 8Gi}", True),
        ({"memory": "1e10"}, "{memory: 9Gi}", True),
        ({"memory": "1Ei"}, "{memory: 9Ti}", True),
        ({"memory": "much"}, "{memory: 9Ti}", True),
        ({"cpu": "2k"}, "{cpu: 1999}", True),
        ({"cpu": "7910m"}, "{cpu: 8}", False),
        ({"nvidia.com/gpu": "8k"}, "{gpu: 8}", True),
    ],
)
def test_the_offer_of_a_machine_may_be_any_quantity_of_kubernetes(tmp_path, offers, asked, enough):
    file = job(tmp_path, f"resources: {asked}").file
    found = check(file, cluster(machines=[machine("a", **offers)]))
    assert [one.key for one in found] == (
        [] if enough else [f"resources.{asked[1:].split(':')[0]}"]
    )
