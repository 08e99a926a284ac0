"""What `zero-ctl render` makes of a job file: true to deploy/, and to its own policies."""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.job import job
from tests.deploy.manifests import (
    BASE,
    DEPLOY,
    ROOT,
    Object,
    agent_flags,
    containers,
    jobs,
    named,
    of_kind,
    pod,
    render,
)
from tests.deploy.policies import POLICIES
from tests.support.kubelet import expand
from tests.support.programs import works
from zero_orchestrator.jobfile.reading import checks, schema
from zero_orchestrator.jobfile.reading.schema import Job
from zero_orchestrator.jobfile.render import RENDERERS
from zero_orchestrator.jobfile.render.files import shown

EXAMPLE = DEPLOY / "job.yaml"
INSTANCE = "app.kubernetes.io/instance"
FOREIGN = {"Certificate", "Issuer"}

needs_kustomize = pytest.mark.skipif(
    not (works("kubectl") or works("kustomize")),
    reason="rendering for Kubernetes needs a kubectl or kustomize that works",
)


def objects_of(one: Job) -> list[Object]:
    [text] = RENDERERS["kubernetes"](one).values()
    return list(yaml.safe_load_all(text))


# ---- Kubernetes ----


def _without_names(value: Any) -> Any:
    """An object as the base has it: without the job's prefix and label, named lists in order."""
    if isinstance(value, dict):
        return {key: _without_names(one) for key, one in value.items() if key != INSTANCE}
    if isinstance(value, list):
        found = [_without_names(one) for one in value]
        has_names = all(isinstance(one, dict) and "name" in one for one in found)
        return sorted(found, key=lambda one: str(one["name"])) if has_names else found
    return re.sub(r"\btrain-(?!\d)", "", value) if isinstance(value, str) else value


def _comparable(objects: list[Object]) -> list[Object]:
    for one in objects:
        for labelled in (one, one.get("spec", {}).get("volumeClaimTemplates", [{}])[0]):
            labels = labelled.get("metadata", {}).get("labels", {})
            if labels.keys() == {INSTANCE}:
                del labelled["metadata"]["labels"]
    found = [_without_names(one) for one in objects]
    return sorted(found, key=lambda one: (one["kind"], one["metadata"]["name"]))


@needs_kustomize
def test_the_example_is_the_base_under_a_name_of_its_own():
    ours, base = _comparable(objects_of(schema.load(EXAMPLE))), _comparable(render(BASE))
    for one in (*ours, *base):
        for container in containers(one) if one["kind"] == "Job" else ():
            container["resources"]["limits"].pop("ephemeral-storage")  # 20Gi, and 20480Mi
    assert ours == base


ETCDS = {
    "ours": "etcd: {members: 5}",
    "tls": "etcd: {tls: true}",
    "yours": "etcd: {endpoints: [etcd.example:2379]}",
    "secret": "etcd: {endpoints: [etcd.example:2379], secret: login, user: u, "
    "password_file: /x/word, ca: /x/ca.pem}",
}
MACHINES = {
    "cpu": "",
    "gpu": "processes_per_node: gpu\nresources: {cpu: 64, memory: 512Gi, gpu: 8, shm: 64Gi}",
    "more": "processes_per_node: 4",
    "amd": "processes_per_node: gpu\nresources: {gpu: 4, gpu_kind: amd.com/gpu}",
}
MORE = {
    "spot": "spot: true",
    "queue": "kubernetes: {queue: research, namespace: team}",
    "claim": "checkpoint: {claim: shared}",
    "url": "checkpoint: {url: s3://bucket/gpt, secret: keys}",
}


@needs_kustomize
@pytest.mark.parametrize(
    ("etcd", "machines", "more"),
    [(etcd, *two) for two in zip(MACHINES, MORE, strict=True) for etcd in ETCDS],
)
def test_whatever_a_job_file_asks_for_is_valid_and_keeps_the_policies(
    tmp_path, monkeypatch, etcd, machines, more
):
    monkeypatch.setattr(
        "tests.deploy.policies.FROM_ELSEWHERE",
        {("secret", "login"), ("persistentVolumeClaim", "shared")},
    )
    objects = objects_of(job(tmp_path, f"{ETCDS[etcd]}\n{MACHINES[machines]}\n{MORE[more]}"))
    complaints = {name: list(check(objects)) for name, check in POLICIES.items()}
    complaints["images_are_pinned"] = []
    assert not any(complaints.values()), complaints
    for one in objects:
        if one["kind"] not in FOREIGN:
            kubernetes_validate.validate(one, "1.31", strict=True)


@needs_kustomize
def test_the_numbers_of_a_job_file_are_those_of_its_objects(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({"train_batch_size": 8}))
    objects = objects_of(
        job(
            tmp_path,
            """\
image: r.example:5000/gpt@sha256:0123456789012345678901234567890123456789012345678901234567890123
config: c.json
processes_per_node: 2
resources: {cpu: 16, memory: 64Gi, shm: 8Gi, scratch: 20Gi}
checkpoint: {size: 1Ti, storage_class: nfs}
environment: {NCCL_DEBUG: INFO}
grace_s: 300
""",
            nodes="{min: 3, max: 9, start: 6}",
        )
    )
    train = named(objects, "Job", "gpt-train")
    [agent] = containers(train)
    assert (train["spec"]["parallelism"], train["spec"]["completions"]) == (6, 6)
    assert agent["image"].startswith("r.example:5000/gpt@sha256:0123")
    assert agent["args"][3:] == ["train.py", "--checkpoints=/checkpoints/gpt"]
    assert agent["resources"]["limits"] == {
        "cpu": "16", "memory": "64Gi", "ephemeral-storage": "40960Mi",
    }  # fmt: skip
    assert pod(train)["terminationGracePeriodSeconds"] == 300
    flags = agent_flags(objects)
    wanted = {
        "PET_NNODES": "3:9",
        "PET_NPROC_PER_NODE": "2",
        "PET_SHUTDOWN_TIMEOUT": "250",
        "OMP_NUM_THREADS": "8",
        "NCCL_DEBUG": "INFO",
    }
    assert wanted.items() <= flags.items()
    claim = named(objects, "PersistentVolumeClaim", "gpt-checkpoints")["spec"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("nfs", "1Ti")
    assert named(objects, "PodDisruptionBudget", "gpt-train")["spec"]["minAvailable"] == 3
    assert named(objects, "ConfigMap", "gpt-training")["data"] == {
        "config.json": '{"train_batch_size": 8}'
    }


@needs_kustomize
@pytest.mark.parametrize("value", ["it's", '"a b" && "c"', "'c'", '"', "a=b, c", "  d  ", "$HOME"])
def test_a_variable_reaches_the_pods_as_it_is_written(tmp_path, value):
    more = yaml.safe_dump({"environment": {"A": value}, "health_check": value})
    flags = agent_flags(objects_of(job(tmp_path, more)))
    assert (flags["A"], flags["PET_HEALTH_CHECK"]) == (value, value)


@needs_kustomize
@pytest.mark.parametrize("word", ["--at=$(HOME)", "^a$$", "$$(JOB_NAME)", "$HOME", "it's", "a\nb"])
def test_an_argument_reaches_the_script_as_it_is_written(tmp_path, word):
    """As on machines, where `$(HOME)` is no variable."""
    written = job(tmp_path)
    written = replace(written, file=replace(written.file, args=("--first", word)))
    [agent] = containers(next(jobs(objects_of(written))))
    known = {"HOME": "/tmp", "JOB_NAME": "gpt-train"}
    assert [expand(each, known) for each in agent["args"][3:]] == ["train.py", "--first", word]


@needs_kustomize
def test_what_a_job_file_says_wins_over_what_its_machines_bring(tmp_path):
    more = "spot: true\ngrace_s: 60\nthreads: 3\nresources: {gpu: 1}"
    objects = objects_of(job(tmp_path, more))
    flags = agent_flags(objects)
    assert (flags["PET_SHUTDOWN_TIMEOUT"], flags["OMP_NUM_THREADS"]) == ("50", "3")
    assert flags["PET_NPROC_PER_NODE"] == "1"
    assert pod(next(jobs(objects)))["terminationGracePeriodSeconds"] == 60


@needs_kustomize
def test_secrets_are_referred_to_and_pods_go_where_the_job_file_says(tmp_path):
    one = job(
        tmp_path,
        """\
environment: {PLAIN: "1"}
secrets: {WANDB_API_KEY: wandb/api-key}
spot: true
kubernetes:
  node_selector: {pool: h200}
  priority_class: training
  pull_secrets: [registry, other]
""",
    )
    objects = objects_of(one)
    spec = pod(named(objects, "Job", "gpt-train"))
    assert spec["nodeSelector"]["pool"] == "h200"
    assert spec["priorityClassName"] == "training"
    assert spec["imagePullSecrets"] == [{"name": "registry"}, {"name": "other"}]
    [agent] = spec["containers"]
    found = {variable["name"]: variable for variable in agent["env"]}
    reference = {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
    assert found["WANDB_API_KEY"]["valueFrom"] == reference
    assert {"POD_NAME", "JOB_UID", "HOME"} <= found.keys()
    maps = [o["data"] for o in of_kind(objects, "ConfigMap")]
    assert [data.keys() & {"PLAIN", "WANDB_API_KEY"} for data in maps if "PLAIN" in data] == [
        {"PLAIN"}
    ]


@needs_kustomize
def test_two_jobs_of_one_namespace_share_nothing(tmp_path):
    one = objects_of(job(tmp_path, "etcd: {tls: true}"))
    other = objects_of(schema.load(EXAMPLE))
    assert not {(o["kind"], o["metadata"]["name"]) for o in one} & {
        (o["kind"], o["metadata"]["name"]) for o in other
    }
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy", "StatefulSet"):
        for selecting in of_kind(one, kind):
            assert f"'{INSTANCE}': 'gpt'" in str(selecting["spec"])
    secrets = {c["spec"]["secretName"] for c in of_kind(one, "Certificate")}
    assert all(name.startswith("gpt-") for name in secrets)


@needs_kustomize
def test_checkpoints_in_an_object_store_need_no_volume_that_is_shared(tmp_path):
    objects = objects_of(job(tmp_path, MORE["url"]))
    assert of_kind(objects, "PersistentVolumeClaim") == []
    [agent] = containers(next(jobs(objects)))
    assert agent["args"][-1] == "--checkpoints=s3://bucket/gpt"
    assert agent["envFrom"] == [
        {"configMapRef": {"name": "gpt-agent"}}, {"secretRef": {"name": "keys"}},
    ]  # fmt: skip
    text = shown(RENDERERS["slurm"](job(tmp_path, MORE["url"].replace(", secret: keys", ""))))
    assert "--checkpoints=s3://bucket/gpt\n" in text


@needs_kustomize
def test_the_files_of_a_secret_are_named_as_on_machines(tmp_path):
    objects = objects_of(job(tmp_path, ETCDS["secret"]))
    flags = agent_flags(objects)
    assert flags["PET_ETCD_CA"] == "/etc/zero-etcd/ca.pem"
    assert flags["PET_ETCD_PASSWORD_FILE"] == "/etc/zero-etcd/word"
    assert flags["PET_ETCD_USER"] == "u"
    volumes = pod(next(jobs(objects)))["volumes"]
    [secret] = [one["secret"] for one in volumes if one["name"] == "etcd-credentials"]
    assert secret["secretName"] == "login"


def test_without_kubectl_and_kustomize_rendering_for_kubernetes_says_what_is_needed(
    tmp_path, monkeypatch
):
    from zero_orchestrator.jobfile.render.kubernetes import ToolMissing

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissing, match="needs kubectl or kustomize on the PATH"):
        RENDERERS["kubernetes"](job(tmp_path))


# ---- the package ----


def test_the_package_takes_along_all_that_it_renders_from():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = ROOT / "orchestrator" / "zero_orchestrator"
    taken = {
        path.resolve()
        for pattern in settings["package-data"]["zero_orchestrator"]
        for path in package.glob(pattern)
    }
    parts = [DEPLOY / "kubernetes" / name for name in ("base", "components")]
    needed = [path for part in parts for path in part.rglob("*") if path.is_file()]
    assert set(needed) <= taken


# ---- the documentation ----


DOCUMENT = (ROOT / "docs" / "job-files.md").read_text()


@needs_kustomize
def test_whatever_else_a_pod_needs_is_merged_into_that_of_the_agents(tmp_path):
    [example] = re.findall(r"<!-- pod -->\n```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    before = pod(named(objects_of(job(tmp_path)), "Job", "gpt-train"))
    objects = objects_of(job(tmp_path, example))
    for one in objects:
        kubernetes_validate.validate(one, "1.31", strict=True)
    template = named(objects, "Job", "gpt-train")["spec"]["template"]
    after, wanted = template["spec"], yaml.safe_load(example)["kubernetes"]["pod"]
    assert template["metadata"]["annotations"] == wanted["metadata"]["annotations"]
    assert after["serviceAccountName"] == "trainer"
    assert after["affinity"] == wanted["spec"]["affinity"]
    assert after["tolerations"] == before["tolerations"] + wanted["spec"]["tolerations"]
    assert _added(before, after, "volumes") == wanted["spec"]["volumes"]
    [agent], [plain], [asked] = (p["containers"] for p in (after, before, wanted["spec"]))
    assert _added(plain, agent, "volumeMounts") == asked["volumeMounts"]
    for kind in ("requests", "limits"):
        assert agent["resources"][kind] == {
            **plain["resources"][kind], "rdma/hca": 1, "hugepages-2Mi": "1Gi",
        }  # fmt: skip
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


@needs_kustomize
def test_the_label_of_a_rack_takes_the_place_of_that_of_the_zone(tmp_path):
    document = (ROOT / "docs" / "clusters.md").read_text()
    [example] = re.findall(r"<!-- rack -->\n *```yaml\n(.*?)```", document, re.DOTALL)
    found = {}
    for name, file in (("zone", job(tmp_path)), ("rack", job(tmp_path, textwrap.dedent(example)))):
        [agent] = pod(named(objects_of(file), "Job", "gpt-train"))["containers"]
        [found[name]] = [one for one in agent["env"] if one["name"] == "ZERO_TOPOLOGY"]
    labels = {name: one["valueFrom"]["fieldRef"]["fieldPath"] for name, one in found.items()}
    assert labels == {
        "zone": "metadata.labels['topology.kubernetes.io/zone']",
        "rack": "metadata.labels['example.com/rack']",
    }


def _added(before: Object, after: Object, name: str) -> list[Object]:
    assert all(one in after[name] for one in before[name])
    return [one for one in after[name] if one not in before[name]]


@pytest.mark.parametrize("memory", ["1Gi", "6Gi", "64Gi"])
def test_shared_memory_that_a_file_does_not_name_fits_into_its_memory(tmp_path, memory):
    resources = job(tmp_path, f"resources: {{memory: {memory}}}").file.resources
    assert str(resources.shared_memory) == {"1Gi": "512Mi", "6Gi": "3072Mi", "64Gi": "4Gi"}[memory]


def test_the_document_lists_the_keys_of_a_job_file_and_no_others():
    listed = set(re.findall(r"^\| `([\w.]+)` \|", DOCUMENT, re.MULTILINE))
    assert listed == schema.keys()


def test_the_example_of_the_document_is_right(tmp_path):
    example, *_ = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    (tmp_path / "config.json").write_text('{"checkpoint": {"async": true, "keep_last": 3}}')
    (tmp_path / "gpt.yaml").write_text(example)
    assert checks.check(schema.load(tmp_path / "gpt.yaml")) == []


def test_the_example_is_right_as_it_is():
    assert checks.check(schema.load(EXAMPLE)) == []
    assert (ROOT / schema.load(EXAMPLE).file.script).is_file()
