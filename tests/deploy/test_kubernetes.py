"""The manifests: valid for every Kubernetes we name, and true to each other and to zero-agent."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifests import (
    BASE,
    DEPLOY,
    OVERLAYS,
    RENDERED,
    ROOT,
    Object,
    containers,
    jobs,
    named,
    of_kind,
    pod,
    render,
)
from tests.deploy.policies import POLICIES

VERSIONS = ("1.31", "1.33", "1.35", "1.37")
"""1.31 is the first in which an Indexed Job can be scaled and has a successPolicy by default."""

README = (DEPLOY / "README.md").read_text()

NOT_KUBERNETES = {
    *("JobSet", "ClusterTrainingRuntime", "Certificate", "Issuer"),
    *("PodMonitor", "PrometheusRule"),
}
"""Kinds with a schema of their own project's."""


@pytest.fixture(params=RENDERED)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render(RENDERED[request.param])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.corners(version=VERSIONS[-1:])
def test_every_overlay_is_valid_for_every_version_of_kubernetes(objects, version):
    builtin = [one for one in objects if one["kind"] not in NOT_KUBERNETES]
    for one in (*builtin, *jobs(objects)):
        kubernetes_validate.validate(one, version, strict=True)


def breaches(objects: list[Object]) -> dict[str, list[str]]:
    """Policy -> its complaints, where there are any."""
    complaints = {name: list(check(objects)) for name, check in POLICIES.items()}
    return {name: found for name, found in complaints.items() if found}


def test_every_overlay_keeps_every_policy(objects):
    assert breaches(objects) == {}


def _agent(objects: list[Object]) -> Any:
    return containers(named(objects, "Job", "train"))[0]


def _etcd(objects: list[Object]) -> Any:
    return containers(named(objects, "StatefulSet", "etcd"))[0]


def _flags(objects: list[Object]) -> Any:
    return named(objects, "ConfigMap", "agent")["data"]


def _agent_pod(objects: list[Object]) -> Any:
    return pod(named(objects, "Job", "train"))


DAMAGES: dict[str, Callable[[list[Object]], object]] = {
    "images_are_pinned": lambda o: _agent(o).update(image="zero-elastic:latest"),
    "probes_ask_a_port_that_is_open": lambda o: _agent(o).pop("readinessProbe"),
    "every_container_has_requests_and_limits": lambda o: _etcd(o)["resources"].pop("limits"),
    "shared_memory_fits_the_memory_limit": lambda o: _agent(o)["resources"]["limits"].update(
        memory="5Gi"
    ),
    "pods_have_no_rights": lambda o: _agent_pod(o).pop("automountServiceAccountToken"),
    "selectors_find_their_pods": lambda o: named(o, "Service", "etcd")["spec"].update(
        selector={"app": "etcd"}
    ),
    "ports_are_those_of_the_selected_pods": lambda o: _etcd(o)["ports"].clear(),
    "volumes_and_their_sources_exist": lambda o: o.remove(named(o, "ConfigMap", "training")),
    "the_grace_period_fits_the_drain": lambda o: _agent_pod(o).update(
        terminationGracePeriodSeconds=100
    ),
    "variables_are_defined_before_they_are_used": lambda o: _etcd(o)["env"].reverse(),
    "configuration_cannot_change_under_a_job": lambda o: named(o, "ConfigMap", "agent").pop(
        "immutable"
    ),
    "etcd_members_know_each_other_and_agents_know_them": lambda o: named(o, "StatefulSet", "etcd")[
        "spec"
    ].update(replicas=5),
    "the_sizes_of_the_job_agree": lambda o: _flags(o).update(PET_NNODES="1:16"),
    "the_health_port_is_the_agents": lambda o: _flags(o).update(PET_HEALTH_PORT="9090"),
    "metrics_and_health_can_be_collected": lambda o: named(o, "NetworkPolicy", "etcd")["spec"][
        "ingress"
    ].pop(),
    "budgets_let_go_of_pods_that_are_not_ready": lambda o: named(o, "PodDisruptionBudget", "train")[
        "spec"
    ].pop("unhealthyPodEvictionPolicy"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_the_policy_notices_a_manifest_that_breaks_it(name):
    objects = copy.deepcopy(render(BASE))
    DAMAGES[name](objects)
    assert list(POLICIES[name](objects)) != []


def test_every_flag_of_the_manifests_is_one_of_zero_agent():
    help_text = subprocess.run(
        [sys.executable, "-m", "zero_agent", "--help"],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    known = set(re.findall(r"--([a-z][\w-]*)", help_text))
    for directory in RENDERED.values():
        for data in (one["data"] for one in of_kind(render(directory), "ConfigMap")):
            used = {key[4:].lower().replace("_", "-") for key in data if key.startswith("PET_")}
            assert used <= known, f"{directory.name}: {used - known}"
    assert {"rdzv-id", "node-id", "local-addr"} <= known


def test_the_arguments_before_the_script_are_flags_and_the_script_is_in_the_image():
    arguments = _agent(render(BASE))["args"]
    script = next(index for index, word in enumerate(arguments) if not word.startswith("--"))
    assert (ROOT / arguments[script]).is_file()
    assert "examples" in (DEPLOY / "Dockerfile").read_text()


def test_the_training_config_is_the_examples():
    assert (BASE / "config.json").read_bytes() == (ROOT / "examples" / "gpt.json").read_bytes()


def test_tls_reaches_every_member_and_every_agent():
    objects = render(OVERLAYS["tls"])
    command = " ".join(_etcd(objects)["command"])
    assert "--client-cert-auth=true" in command
    assert "--peer-client-cert-auth=true" in command
    assert {"name": "SCHEME", "value": "https"} in _etcd(objects)["env"]
    mounted = {mount["mountPath"] for mount in _agent(objects)["volumeMounts"]}
    paths = [_flags(objects)[f"PET_ETCD_{name}"] for name in ("CA", "CERT", "KEY")]
    assert {path.rpartition("/")[0] for path in paths} == {"/etc/zero-tls"} <= mounted


@pytest.mark.parametrize(
    ("component", "path"), [("tls", "/etc/zero-tls"), ("etcd-credentials", "/etc/zero-etcd")]
)
def test_the_metrics_of_a_job_reach_etcd_as_its_agents_do(tmp_path, component, path):
    kubernetes = DEPLOY / "kubernetes"
    parts = [kubernetes / "components" / name for name in ("monitoring", component)]
    whole = {
        "resources": [os.path.relpath(BASE, tmp_path)],
        "components": [os.path.relpath(part, tmp_path) for part in parts],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    objects = render(tmp_path)
    [container] = pod(named(objects, "Deployment", "metrics"))["containers"]
    assert container["envFrom"] == [{"configMapRef": {"name": "agent"}}]
    assert path in {mount["mountPath"] for mount in container["volumeMounts"]}
    labels = named(objects, "Deployment", "metrics")["spec"]["template"]["metadata"]["labels"]
    [clients, *_] = named(objects, "NetworkPolicy", "etcd")["spec"]["ingress"]
    assert labels in [one["podSelector"]["matchLabels"] for one in clients["from"]]


def test_an_existing_etcd_leaves_none_of_ours():
    objects = render(OVERLAYS["existing-etcd"])
    assert of_kind(objects, "StatefulSet") == []
    assert {one["metadata"]["name"] for one in objects} == {
        "agent", "training", "checkpoints", "train",
    }  # fmt: skip


def test_a_jobset_runs_the_very_job_of_the_base():
    [inside] = jobs(render(OVERLAYS["jobset"]))
    assert inside["spec"] == named(render(BASE), "Job", "train")["spec"]
    assert of_kind(render(OVERLAYS["jobset"]), "Job") == []


# ---- Kubeflow Trainer and Kueue ----


def test_a_trainjob_runs_the_job_of_the_base_in_the_container_that_trainer_looks_for():
    objects = render(OVERLAYS["trainer"])
    [inside] = jobs(objects)
    [container] = containers(inside)
    assert container["name"] == "node"
    rules = inside["spec"]["podFailurePolicy"]["rules"]
    assert [r["onExitCodes"]["containerName"] for r in rules[1:]] == ["node"] * 3
    base = containers(named(render(BASE), "Job", "train"))[0]
    differ = {"name", "args", "env", "workingDir"}
    assert {k: v for k, v in container.items() if k not in differ} == {
        k: v for k, v in base.items() if k not in differ
    }
    assert "args" not in container, "they are the TrainJob's"
    assert of_kind(objects, "Job") == []


QUEUE_NAME = "kueue.x-k8s.io/queue-name"


@pytest.mark.parametrize("components", [["kueue"], ["gpu", "kueue"], ["kueue-elastic"]])
def test_a_queued_job_names_a_queue_that_covers_all_that_it_asks_for(components, tmp_path):
    objects = combined(tmp_path, *components)
    [owner] = of_kind(objects, "Job")
    assert owner["spec"]["suspend"] is True, "only Kueue lets it begin"
    queue = render(DEPLOY / "kubernetes" / "kueue")
    local = named(queue, "LocalQueue", owner["metadata"]["labels"][QUEUE_NAME])
    cluster = named(queue, "ClusterQueue", local["spec"]["clusterQueue"])
    [group] = cluster["spec"]["resourceGroups"]
    [job] = jobs(objects)
    for container in containers(job):
        assert container["resources"]["requests"].keys() <= set(group["coveredResources"])
    for flavor in group["flavors"]:
        assert named(queue, "ResourceFlavor", flavor["name"])
        assert [one["name"] for one in flavor["resources"]] == group["coveredResources"]


def test_the_readmes_overlay_runs_the_users_script_on_the_users_image(tmp_path):
    [example] = re.findall(r"```yaml\n(apiVersion.*?)```", README, re.DOTALL)
    where = os.path.relpath(DEPLOY, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(example.replace("../deploy", where))
    (tmp_path / "config.json").write_text("{}")
    objects = render(tmp_path)
    assert _agent(objects)["image"] == "registry.example/gpt:1.4.0"
    assert _agent(objects)["args"][3:] == [
        "train.py", "--config=/etc/zero/config.json", "--checkpoints=/checkpoints/train",
    ]  # fmt: skip
    assert named(objects, "ConfigMap", "training")["data"] == {"config.json": "{}"}
    told = {"the_sizes_of_the_job_agree": ["the budget keeps 2 pods; the job needs 4"]}
    assert breaches(objects) == told, "as the text below it says"


def test_the_readme_has_a_row_for_every_overlay():
    assert set(re.findall(r"^\| `([\w-]+)` \|", README, re.MULTILINE)) >= OVERLAYS.keys()


@pytest.mark.parametrize("inner", ["tls", "gpu", "external-etcd"])
@pytest.mark.parametrize("outer", ["spot", "kueue", "jobset", "trainer"])
def test_components_combine(inner, outer, tmp_path):
    objects = combined(tmp_path, inner, outer)
    assert breaches(objects) == {}
    for one in (*jobs(objects), *of_kind(objects, "StatefulSet", "ConfigMap")):
        kubernetes_validate.validate(one, VERSIONS[0], strict=True)


def combined(tmp_path: Path, *components: str) -> list[Object]:
    where = os.path.relpath(DEPLOY / "kubernetes", tmp_path)
    kustomization = {
        "resources": [f"{where}/base"],
        "components": [f"{where}/components/{name}" for name in components],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return render(tmp_path)
