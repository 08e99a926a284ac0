"""What Kubeflow Trainer and JobSet make of a TrainJob, as far as its one Job of nodes goes.

Pure functions of objects; `kubelet` runs what comes out. Sources: Trainer's plug-ins `torch`
(EnforceMLPolicy) and `jobset` (Build); JobSet's KEP-463, of which `may_change` is the webhook.
"""

from __future__ import annotations

import copy
from typing import Any

Object = dict[str, Any]

NODE = "node"


def jobset_of(trainjob: Object, runtime: Object) -> Object:
    """The JobSet that the Trainer makes."""
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    trainer = trainjob["spec"].get("trainer", {})
    nodes = trainer.get("numNodes", runtime["spec"]["mlPolicy"]["numNodes"])
    [job] = (one for one in spec["replicatedJobs"] if one["name"] == NODE)
    job["template"]["spec"] |= {"parallelism": nodes, "completions": nodes}
    [container] = (
        one for one in job["template"]["spec"]["template"]["spec"]["containers"]
        if one["name"] == NODE
    )  # fmt: skip
    for key, theirs in {
        "command": "command",
        "args": "args",
        "resources": "resourcesPerNode",
    }.items():
        if theirs in trainer:
            container[key] = trainer[theirs]
    name = trainjob["metadata"]["name"]
    processes = str(int(container["resources"]["requests"]["cpu"]))
    for variable in (
        *trainer.get("env", []),
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(trainer.get("numProcPerNode", processes))},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-{NODE}-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": "29400"},
    ):
        container["env"] = [e for e in container["env"] if e["name"] != variable["name"]]
        container["env"].append(variable)
    head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}}
    return {**head, "spec": spec}


_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def job_of(jobset: Object) -> Object:
    """The Job that the JobSet controller makes for the nodes."""
    name = jobset["metadata"]["name"]
    [inside] = jobset["spec"]["replicatedJobs"]
    spec = copy.deepcopy(inside["template"]["spec"])
    spec["template"]["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] = name
    spec["template"]["spec"]["subdomain"] = name
    head = {"apiVersion": "batch/v1", "kind": "Job"}
    return {**head, "metadata": {"name": f"{name}-{inside['name']}-0"}, "spec": spec}


def may_change(before: Object, after: Object, *, over: bool = False) -> str:
    """Why JobSet, with its gate ElasticJobSet, refuses a change; empty: it does not."""
    if over:
        return "cannot mutate a JobSet in a terminal state"
    rests = [copy.deepcopy(before), copy.deepcopy(after)]
    specs = [one["spec"]["replicatedJobs"][0]["template"]["spec"] for one in rests]
    sizes = [(spec.pop("parallelism"), spec.pop("completions")) for spec in specs]
    if rests[0] != rests[1]:
        return "field is immutable"
    parallelism, completions = sizes[1]
    if parallelism != completions or parallelism < 1:
        return "parallelism and completions must be equal, and 1 or more"
    return ""
