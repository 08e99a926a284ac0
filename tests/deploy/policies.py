"""What must be true of the manifests beyond their schema: a table of pure functions.

A policy gets all objects of one kustomization and returns its complaints; none is good. Each
names the object and what is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tests.deploy.manifests import (
    Object,
    agent_flags,
    containers,
    environment,
    jobs,
    named,
    of_kind,
    pod,
    quantity,
    workloads,
)

Policy = Callable[[list[Object]], Iterator[str]]
POLICIES: dict[str, Policy] = {}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
FROM_ELSEWHERE = {("secret", "etcd-credentials")}
"""What the user creates before applying; the overlay that needs it says so at its top."""

TIME_TO_END_S = 2
"""What an agent needs after its last worker is gone."""


def policy(check: Policy) -> Policy:
    POLICIES[check.__name__] = check
    return check


def _all_containers(objects: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    for workload in workloads(objects):
        for container in containers(workload):
            yield f"{workload['kind']}/{workload['metadata']['name']}", workload, container


@policy
def images_are_pinned(objects: list[Object]) -> Iterator[str]:
    for where, _, container in _all_containers(objects):
        if not re.search(r":v?\d+\.\d+\.\d+[\w.-]*$|@sha256:\w{64}$", container["image"]):
            yield f"{where}: image {container['image']} has no version"


@policy
def probes_ask_a_port_that_is_open(objects: list[Object]) -> Iterator[str]:
    for where, _, container in _all_containers(objects):
        ports = {port["name"] for port in container.get("ports", [])}
        for probe in PROBES:
            asked = container.get(probe, {})
            target = (asked.get("httpGet") or asked.get("tcpSocket", {})).get("port")
            if target not in ports:
                yield f"{where}: {probe} asks port {target}; there are {sorted(ports)}"


@policy
def every_container_has_requests_and_limits(objects: list[Object]) -> Iterator[str]:
    for where, _, container in _all_containers(objects):
        for kind in ("requests", "limits"):
            missing = {"cpu", "memory"} - container["resources"].get(kind, {}).keys()
            if missing:
                yield f"{where}: no {kind} of {sorted(missing)}"


@policy
def shared_memory_fits_the_memory_limit(objects: list[Object]) -> Iterator[str]:
    for where, workload, container in _all_containers(objects):
        limit = quantity(container["resources"]["limits"]["memory"])
        volumes = [volume.get("emptyDir", {}) for volume in pod(workload).get("volumes", [])]
        shm = sum(quantity(v["sizeLimit"]) for v in volumes if v.get("medium") == "Memory")
        if shm > limit / 2:
            yield f"{where}: {shm:.0f} bytes of shared memory in a limit of {limit:.0f}"


@policy
def pods_have_no_rights(objects: list[Object]) -> Iterator[str]:
    for where, workload, container in _all_containers(objects):
        spec, context = pod(workload), container.get("securityContext", {})
        wanted = {
            "a service account token": spec.get("automountServiceAccountToken") is False,
            "root": spec.get("securityContext", {}).get("runAsNonRoot") is True,
            "every system call": "seccompProfile" in spec.get("securityContext", {}),
            "a writable root": context.get("readOnlyRootFilesystem") is True,
            "set-uid programs": context.get("allowPrivilegeEscalation") is False,
            "capabilities": context.get("capabilities", {}).get("drop") == ["ALL"],
            "the host": not any(spec.get(f"host{name}") for name in ("Network", "PID", "IPC")),
        }
        yield from (f"{where}: has {what}" for what, is_right in wanted.items() if not is_right)


def _selected(objects: list[Object], selector: Object) -> list[Object]:
    labels = selector.get("matchLabels", selector).items()
    return [
        one for one in workloads(objects)
        if labels <= one["spec"]["template"]["metadata"]["labels"].items()
    ]  # fmt: skip


def _selectors(one: Object) -> Iterator[Object]:
    spec = one["spec"]
    if one["kind"] == "NetworkPolicy":
        yield spec["podSelector"]
        for rule in spec["ingress"]:
            yield from (s["podSelector"] for s in rule["from"] if "podSelector" in s)
    else:
        yield spec["selector"]


@policy
def selectors_find_their_pods(objects: list[Object]) -> Iterator[str]:
    for one in of_kind(objects, "Service", "PodDisruptionBudget", "NetworkPolicy", "StatefulSet"):
        for selector in _selectors(one):
            if not _selected(objects, selector):
                yield f"{one['kind']}/{one['metadata']['name']}: {selector} selects no pod"


def _target_ports(one: Object) -> Iterator[str]:
    if one["kind"] == "Service":
        yield from (port["targetPort"] for port in one["spec"]["ports"])
    else:
        for rule in one["spec"]["ingress"]:
            yield from (port["port"] for port in rule.get("ports", []))


@policy
def ports_are_those_of_the_selected_pods(objects: list[Object]) -> Iterator[str]:
    for one in of_kind(objects, "Service", "NetworkPolicy"):
        pods = _selected(objects, next(_selectors(one)))
        names = {p["name"] for w in pods for c in containers(w) for p in c.get("ports", [])}
        for port in _target_ports(one):
            if port not in names:
                yield f"{one['kind']}/{one['metadata']['name']}: port {port}, not of {names}"


@policy
def volumes_and_their_sources_exist(objects: list[Object]) -> Iterator[str]:
    there = FROM_ELSEWHERE | {
        *(("configMap", one["metadata"]["name"]) for one in of_kind(objects, "ConfigMap")),
        *(("secret", one["metadata"]["name"]) for one in of_kind(objects, "Secret")),
        *(("secret", one["spec"]["secretName"]) for one in of_kind(objects, "Certificate")),
        *(
            ("persistentVolumeClaim", one["metadata"]["name"])
            for one in of_kind(objects, "PersistentVolumeClaim")
        ),
    }
    for where, workload, container in _all_containers(objects):
        volumes = pod(workload).get("volumes", [])
        claims = workload["spec"].get("volumeClaimTemplates", [])
        names = {one["name"] for one in volumes} | {one["metadata"]["name"] for one in claims}
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        yield from (f"{where}: {name} is mounted or defined, not both" for name in names ^ mounted)
        yield from (f"{where}: {kind}/{name} is not there"
                    for kind, name in map(_source, volumes)
                    if kind != "emptyDir" and (kind, name) not in there)  # fmt: skip


def _source(volume: Object) -> tuple[str, str]:
    kind = next(key for key in volume if key != "name")
    keys = {"secret": "secretName", "persistentVolumeClaim": "claimName", "configMap": "name"}
    return kind, volume[kind].get(keys.get(kind, ""), "")


@policy
def the_grace_period_fits_the_drain(objects: list[Object]) -> Iterator[str]:
    for where, workload, container in _all_containers(objects):
        variables = environment(objects, container)
        if container["name"] == "agent" and "PET_SHUTDOWN_TIMEOUT" in variables:
            hook_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            needed_s = hook_s + float(variables["PET_SHUTDOWN_TIMEOUT"]) + TIME_TO_END_S
            given_s = pod(workload)["terminationGracePeriodSeconds"]
            if given_s < needed_s:
                yield f"{where}: {given_s} s of grace, {needed_s:g} s are needed to drain"


@policy
def variables_are_defined_before_they_are_used(objects: list[Object]) -> Iterator[str]:
    for where, _, container in _all_containers(objects):
        known = {
            name
            for source in container.get("envFrom", [])
            if "configMapRef" in source
            for name in named(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
        }
        texts = []
        for variable in container.get("env", []):
            texts.append((variable.get("value", ""), set(known)))
            known.add(variable["name"])
        texts += [(t, known) for key in ("command", "args") for t in container.get(key, [])]
        for text, defined in texts:
            missing = set(re.findall(r"\$\((\w+)\)", text)) - defined
            if missing:
                yield f"{where}: {text} needs {sorted(missing)}"


@policy
def configuration_cannot_change_under_a_job(objects: list[Object]) -> Iterator[str]:
    for one in of_kind(objects, "ConfigMap"):
        if one.get("immutable") is not True:
            yield f"ConfigMap/{one['metadata']['name']}: can be changed while agents read it"


@policy
def etcd_members_know_each_other_and_agents_know_them(objects: list[Object]) -> Iterator[str]:
    for etcd in of_kind(objects, "StatefulSet"):
        spec = etcd["spec"]
        if spec["replicas"] % 2 == 0:
            yield f"{spec['replicas']} members survive no more failures than one fewer"
        names = [f"{etcd['metadata']['name']}-{index}" for index in range(spec["replicas"])]
        hosts = [f"{name}.{spec['serviceName']}" for name in names]
        cluster = environment(objects, containers(etcd)[0])["INITIAL_CLUSTER"]
        peers = [f"{n}=$(SCHEME)://{h}:2380" for n, h in zip(names, hosts, strict=True)]
        if cluster.split(",") != peers:
            yield f"INITIAL_CLUSTER={cluster}; the members are {peers}"
        agents = agent_flags(objects)["PET_RDZV_ENDPOINT"]
        if agents.split(",") != [f"{host}:2379" for host in hosts]:
            yield f"PET_RDZV_ENDPOINT={agents}; the members are {hosts}"


@policy
def the_sizes_of_the_job_agree(objects: list[Object]) -> Iterator[str]:
    flags = agent_flags(objects)
    low, high = map(int, flags["PET_NNODES"].split(":"))
    for job in jobs(objects):
        pods = job["spec"]["parallelism"]
        if pods != job["spec"]["completions"]:
            yield "parallelism and completions differ: the job could not be scaled"
        if not low <= pods <= high:
            yield f"{pods} pods; PET_NNODES={low}:{high}"
        minimum = job["metadata"].get("annotations", {}).get("kueue.x-k8s.io/job-min-parallelism")
        if minimum not in (None, str(low)):
            yield f"Kueue may start {minimum} pods; PET_NNODES={low}:{high}"
    for budget in of_kind(objects, "PodDisruptionBudget"):
        if budget["spec"].get("minAvailable", low) != low:
            yield f"the budget keeps {budget['spec']['minAvailable']} pods; the job needs {low}"


@policy
def the_health_port_is_the_agents(objects: list[Object]) -> Iterator[str]:
    for where, _, container in _all_containers(objects):
        port = environment(objects, container).get("PET_HEALTH_PORT")
        opened = {p["name"]: str(p["containerPort"]) for p in container["ports"]}
        if container["name"] == "agent" and port is not None and opened.get("health") != port:
            yield f"{where}: PET_HEALTH_PORT={port}; the container opens {opened}"


@policy
def metrics_and_health_can_be_collected(objects: list[Object]) -> Iterator[str]:
    for one in of_kind(objects, "NetworkPolicy"):
        pods = _selected(objects, one["spec"]["podSelector"])
        named = {p["name"] for w in pods for c in containers(w) for p in c.get("ports", [])}
        admitted = {
            port["port"]
            for rule in one["spec"]["ingress"]
            if any("namespaceSelector" in source for source in rule["from"])
            for port in rule.get("ports", [])
        }
        if admitted != named & {"metrics", "health"}:
            yield f"NetworkPolicy/{one['metadata']['name']}: collectors reach {admitted}"


@policy
def budgets_let_go_of_pods_that_are_not_ready(objects: list[Object]) -> Iterator[str]:
    for budget in of_kind(objects, "PodDisruptionBudget"):
        if budget["spec"].get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield f"PodDisruptionBudget/{budget['metadata']['name']}: may block a drain for ever"
