"""The controllers of the local cluster: which pods there should be.

A `Job` and a `StatefulSet` look at their pods on every turn and start what is missing. What a Job
makes of a failed pod is a pure function of its policy (`verdict`). Who calls it: `kubelet`.

Source: the Kubernetes documentation, Jobs and Pod failure policy, StatefulSets.
"""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import TYPE_CHECKING

from tests.support.pods import Object, Pod

if TYPE_CHECKING:
    from tests.support.kubelet import Cluster

BACK_OFF_S = 0.2
"""Before a failed pod is replaced; the real controller waits 10 s, and doubles that."""


class Verdict(StrEnum):
    """What a Job makes of a pod that failed."""

    IGNORE = "Ignore"
    COUNT = "Count"
    FAIL_INDEX = "FailIndex"
    FAIL_JOB = "FailJob"


def verdict(policy: Object, exit_code: int, *, disrupted: bool) -> Verdict:
    """The action of the first rule that matches; without one, the failure counts."""
    for rule in policy.get("rules", []):
        codes = rule.get("onExitCodes")
        if codes is not None:
            among = exit_code in codes["values"]
            matches = exit_code != 0 and among is (codes["operator"] == "In")
        else:
            wanted = {(one["type"], one["status"]) for one in rule["onPodConditions"]}
            matches = disrupted and ("DisruptionTarget", "True") in wanted
        if matches:
            return Verdict(rule["action"])
    return Verdict.COUNT


class Job:
    """The Job controller, for one Indexed Job."""

    def __init__(self, cluster: Cluster, spec: Object) -> None:
        assert spec["spec"]["completionMode"] == "Indexed"
        self.name = spec["metadata"]["name"]
        self.spec = spec["spec"]
        self.ignored: list[int] = []
        """Exit codes that were not counted."""
        self.counted: list[int] = []
        self.state = "running"
        self.uid = secrets.token_hex(16)
        self._cluster = cluster
        self._judged: set[str] = set()
        self._again_s: dict[int, float] = {}
        self._failures: dict[int, int] = {}

    def scale(self, pods: int) -> None:
        """`kubectl patch job`: parallelism and completions together."""
        self.spec = {**self.spec, "parallelism": pods, "completions": pods}

    @property
    def active(self) -> list[Pod]:
        return [pod for pod in self._cluster.pods_of(self.name) if pod.exit_code is None]

    def turn(self, now_s: float) -> None:
        for pod in self._cluster.pods_of(self.name):
            if pod.exit_code is not None and pod.name not in self._judged:
                self._judged.add(pod.name)
                self._judge(pod, now_s)
        if self.state != "running":
            for pod in self.active:
                pod.terminate(now_s)
            return
        for pod in self.active:
            if pod.index >= self.spec["completions"]:
                pod.terminate(now_s)
        running = {pod.index for pod in self.active}
        for index in set(range(self.spec["completions"])) - running:
            failed_too_often = self._failures.get(index, 0) > int(self.spec["backoffLimitPerIndex"])
            if now_s >= self._again_s.get(index, 0.0) and not failed_too_often:
                self._start(index)

    def _judge(self, pod: Pod, now_s: float) -> None:
        assert pod.exit_code is not None
        self._again_s[pod.index] = now_s + BACK_OFF_S
        if pod.exit_code == 0:
            assert self.spec["successPolicy"]["rules"] == [{"succeededCount": 1}]
            self.state = "complete"
            return
        action = verdict(self.spec["podFailurePolicy"], pod.exit_code, disrupted=pod.disrupted)
        if action is Verdict.IGNORE:
            self.ignored.append(pod.exit_code)
            return
        self.counted.append(pod.exit_code)
        self._failures[pod.index] = self._failures.get(pod.index, 0) + 1
        if action is Verdict.FAIL_JOB:
            self.state = "failed"

    def _start(self, index: int) -> None:
        labels = {
            "batch.kubernetes.io/job-name": self.name,
            "batch.kubernetes.io/controller-uid": self.uid,
        }
        name, host = f"{self.name}-{index}-{secrets.token_hex(3)[:5]}", f"{self.name}-{index}"
        self._cluster.start(self.name, index, name, host, self.spec["template"], labels)


class StatefulSet:
    """The StatefulSet controller: pods with names that stay, each with its own volumes."""

    def __init__(self, cluster: Cluster, spec: Object) -> None:
        self.name = spec["metadata"]["name"]
        self.spec = spec["spec"]
        self._cluster = cluster

    def turn(self, now_s: float) -> None:
        running = {p.index for p in self._cluster.pods_of(self.name) if p.exit_code is None}
        for index in set(range(self.spec["replicas"])) - running:
            name = f"{self.name}-{index}"
            claims = {c["metadata"]["name"] for c in self.spec.get("volumeClaimTemplates", [])}
            template = dict(self.spec["template"])
            volumes = [*template["spec"].get("volumes", [])]
            volumes += [
                {"name": claim, "persistentVolumeClaim": {"claimName": f"{claim}-{name}"}}
                for claim in claims
            ]
            template["spec"] = {
                "subdomain": self.spec["serviceName"], **template["spec"], "volumes": volumes
            }  # fmt: skip
            self._cluster.start(self.name, index, name, name, template, {})
