"""A local stand-in for a Kubernetes cluster: runs rendered manifests for real on this machine.

It reads the objects that `kubectl kustomize` makes and does with them what the API server, the
controllers (`controllers`) and the kubelets would: pods (`pods`) with names, labels, addresses
and DNS names (a hosts file), their environment and volumes, probes, preStop, SIGTERM and the
grace period, replacement of pods by the Job's policies. A container is a process in namespaces
(`sandbox`); its image is looked up in a table. What it does not have: scheduling, network
policies, resource limits.

Must always hold: everything happens in `Cluster.reconcile`, in the thread of the test; `close`
leaves no process, network or mount behind. An object that it does not understand is an error,
never ignored.
"""

from __future__ import annotations

import base64
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.controllers import Job, StatefulSet
from tests.support.pods import Object, Pod, probes_of
from tests.support.sandbox import Bridge, Container, Image, Mount, Sandbox
from tests.support.waiting import wait_for

DECLARATIONS = {"ConfigMap", "Secret", "PersistentVolumeClaim", "Service"}
WITHOUT_EFFECT = {"NetworkPolicy", "PodDisruptionBudget"}
"""Understood; nothing here schedules, evicts or filters by them."""

_MAKERS: Mapping[str, type[Job] | type[StatefulSet]] = {"Job": Job, "StatefulSet": StatefulSet}
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes expands it, and `$$`: an unknown name stays as it is written."""
    known = {f"$({name})": value for name, value in variables.items()} | {"$$": "$"}
    return re.sub(r"\$\$|\$\(\w+\)", lambda found: known.get(found[0], found[0]), text)


class Cluster:
    """Objects applied to this machine."""

    def __init__(self, objects: list[Object], images: Mapping[str, Image], directory: Path) -> None:
        self.directory = directory
        self.pods: list[Pod] = []
        self._images = images
        self._declared = {(o["kind"], o["metadata"]["name"]): o for o in objects}
        self._bridge = Bridge()
        self._hosts = directory / "hosts"
        self._write_hosts()
        unknown = {o["kind"] for o in objects} - DECLARATIONS - WITHOUT_EFFECT - _MAKERS.keys()
        assert not unknown, f"this cluster does not know {unknown}"
        self.controllers = {
            o["metadata"]["name"]: _MAKERS[o["kind"]](self, o)
            for o in objects
            if o["kind"] in _MAKERS
        }

    # ---- what a test does ----

    def reconcile(self) -> None:
        """One turn of everything."""
        now_s = time.monotonic()
        for pod in self.pods:
            if pod.exit_code is None:
                pod.turn(now_s)
        for controller in self.controllers.values():
            controller.turn(now_s)

    def until(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Let the cluster work until something is so."""

        def holds() -> object:
            self.reconcile()
            return condition()

        wait_for(holds, timeout_s, what)

    def pods_of(self, owner: str) -> list[Pod]:
        """All pods that a controller has started, the ended ones included."""
        return [pod for pod in self.pods if pod.owner == owner]

    def delete(self, pod: Pod) -> None:
        """`kubectl delete pod`."""
        pod.terminate(time.monotonic())

    def evict(self, pod: Pod) -> None:
        """`kubectl drain`, or a spot machine that is taken back."""
        pod.disrupted = True
        pod.terminate(time.monotonic())

    def lose_node(self, pod: Pod) -> None:
        """The machine loses power: silence on the network, no process, later a new machine."""
        self._bridge.cut(pod.namespace)
        pod.disrupted = True
        pod.sandbox.kill()

    def claim(self, name: str) -> Path:
        """Where a PersistentVolumeClaim keeps its files."""
        return self.directory / "claims" / name

    def close(self) -> None:
        for pod in self.pods:
            pod.sandbox.kill()
        try:
            wait_for(lambda: not self._bridge.processes, 60, "every process of every pod is gone")
        finally:
            self._bridge.close()

    # ---- what a kubelet does ----

    def start(
        self, owner: str, index: int, name: str, host: str, template: Object, labels: Object
    ) -> None:
        """Start a pod from a template."""
        spec, labels = template["spec"], {**template["metadata"]["labels"], **labels}
        assert len(spec["containers"]) == 1, "this cluster runs pods of one container"
        container = spec["containers"][0]
        namespace, address = self._bridge.attach()
        facts = {"metadata.name": name, "status.podIP": address, "spec.nodeName": host}
        facts |= {f"metadata.labels['{key}']": value for key, value in labels.items()}
        facts["metadata.annotations['batch.kubernetes.io/job-completion-index']"] = str(index)
        directory = self.directory / "pods" / namespace
        inside = self._container(host, spec, facts, directory)
        sandbox = Sandbox(inside, namespace, directory)
        probes = probes_of(container, address)
        self.pods.append(Pod(name, owner, index, spec, labels, namespace, address, sandbox, probes))
        self._write_hosts()

    def _container(
        self, host: str, spec: Object, facts: Mapping[str, str], directory: Path
    ) -> Container:
        container = spec["containers"][0]
        environment = self._environment(container, facts)
        image = self._images[container["image"].rpartition(":")[0]]
        start = container.get("command", image.entrypoint)
        at = container.get("workingDir")
        within = ("/usr/bin/env", f"--chdir={at}") if at else ()
        words = (*within, *start, *container.get("args", []))
        hosts = Mount(target="/etc/hosts", source=self._hosts, read_only=True)
        return Container(
            hostname=host,
            image=image,
            command=[expand(word, environment) for word in words],
            environment={"HOSTNAME": host, "PATH": image.path, **environment},
            mounts=[hosts, *self._mounts(spec, container, directory)],
            user=spec["securityContext"]["runAsUser"],
            group=spec["securityContext"]["runAsGroup"],
            read_only_root=container["securityContext"]["readOnlyRootFilesystem"],
        )

    def _environment(self, container: Object, facts: Mapping[str, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            found |= self._declared["ConfigMap", source["configMapRef"]["name"]]["data"]
        for variable in container.get("env", []):
            if "valueFrom" in variable:
                path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                found[variable["name"]] = facts.get(path, "")  # as of a label that is not there
            else:
                found[variable["name"]] = expand(variable["value"], found)
        return found

    def _mounts(self, spec: Object, container: Object, directory: Path) -> list[Mount]:
        volumes = {one["name"]: one for one in spec.get("volumes", [])}
        group = spec["securityContext"]["fsGroup"]
        return [
            self._mount(volumes[one["name"]], one, group, directory)
            for one in container.get("volumeMounts", [])
        ]

    def _mount(self, volume: Object, mount: Object, group: int, directory: Path) -> Mount:
        target, read_only = mount["mountPath"], mount.get("readOnly", False)
        kind = next(key for key in volume if key != "name")
        options = volume[kind]
        if options.get("medium") == "Memory":
            return Mount(target=target, size_bytes=_size_bytes(options["sizeLimit"]))
        if kind == "emptyDir":
            source = _directory(directory / volume["name"], group)
        elif kind == "persistentVolumeClaim":
            source = _directory(self.claim(options["claimName"]), group)
        else:
            source = self._files(kind, options, directory / volume["name"], group)
        return Mount(target=target, source=source, read_only=read_only)

    def _files(self, kind: str, options: Object, directory: Path, group: int) -> Path:
        """A directory with the entries of a ConfigMap or a Secret as files."""
        names = {"configMap": ("ConfigMap", "name"), "secret": ("Secret", "secretName")}
        declared, key = names[kind]
        data = self._declared[declared, options[key]]["data"]
        _directory(directory, group)
        for name, text in data.items():
            path = directory / name
            path.write_bytes(base64.b64decode(text) if kind == "secret" else text.encode())
            path.chmod(options.get("defaultMode", 0o644))
            os.chown(path, 0, group)
        return directory

    def _write_hosts(self) -> None:
        """The names that headless Services give to pods; in place, as it is mounted."""
        lines = ["127.0.0.1 localhost"]
        services = [o for (kind, _), o in self._declared.items() if kind == "Service"]
        for pod in self.pods:
            if pod.exit_code is None and self._has_name(pod, services):
                domain = pod.spec["subdomain"]
                lines.append(f"{pod.address} {pod.owner}-{pod.index}.{domain}")
        self._hosts.write_text("\n".join(lines) + "\n")

    @staticmethod
    def _has_name(pod: Pod, services: list[Object]) -> bool:
        return any(
            service["metadata"]["name"] == pod.spec.get("subdomain")
            and service["spec"]["clusterIP"] == "None"
            and service["spec"]["selector"].items() <= pod.labels.items()
            and (pod.is_ready or service["spec"].get("publishNotReadyAddresses"))
            for service in services
        )


def _directory(path: Path, group: int) -> Path:
    """A directory that a pod's fsGroup may write to."""
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, 0, group)
    path.chmod(0o2775)
    return path


def _size_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)(\w*)", text)
    assert found is not None, text
    return int(found[1]) * _UNITS[found[2]]
