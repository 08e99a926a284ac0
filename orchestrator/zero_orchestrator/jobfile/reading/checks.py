"""Consistency checks: values of a job file that are impossible, or do not fit each other.

Each check is a pure function of the job and yields problems: the key, what is wrong with its value,
and a value that is right. Checks that need facts about a cluster are in `preflight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zero_orchestrator.jobfile.reading.reader import Problem
from zero_orchestrator.jobfile.reading.schema import Job, at_least
from zero_orchestrator.jobfile.reading.settings import FLAGS, variable

Check = Callable[[Job], Iterator[Problem]]

AGENT = "agent"
"""Name of the container with the agent and its workers."""
BYTES_PER_PARAMETER = 12
"""Size in a checkpoint: the fp32 weight and the two moments of Adam."""
SHM_OF_A_WORKER_BYTES = 64 * 2**20
"""Shared memory that collectives and data loaders need, beside copies of the state."""
_REFERENCE = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9._-]+")
_FROM_KEYS = {
    "PET_NNODES": "nodes",
    "PET_NPROC_PER_NODE": "processes_per_node",
    "PET_MAX_RESTARTS": "max_restarts",
    "PET_RDZV_ENDPOINT": "etcd",
    "PET_RDZV_ID": "name",
    "PET_SHUTDOWN_TIMEOUT": "grace_s",
    "OMP_NUM_THREADS": "threads",
    "PET_RAM_BUDGET": "checkpoint.ram_budget",
    **{variable(key): key for key in FLAGS},
}


def check(job: Job) -> list[Problem]:
    """All problems of a job file, without a look at any cluster."""
    return [problem for one in CHECKS for problem in one(job)]


def _nodes_and_workers(job: Job) -> Iterator[Problem]:
    file = job.file
    low, high = file.nodes.min, file.nodes.max
    if low > high:
        text = f"minimum {low} exceeds maximum {high}; write {high}:{low}"
        yield Problem(key="nodes", text=text)
    elif not low <= file.start <= high:
        yield Problem(key="nodes.start", text=f"{file.start} is not within {low}:{high}")
    unit = file.node_unit or 1
    fewest = -(-low // unit) * unit
    if low <= high < fewest:
        text = f"no multiple of {unit} lies within {low}:{high} nodes; write nodes: {low}:{fewest}"
        yield Problem(key="node_unit", text=text)
    if file.processes_per_node == "gpu" and not file.resources.gpu:
        text = "gpu: a node has none; write resources: {gpu: 8}, or a number of processes"
        yield Problem(key="processes_per_node", text=text)
    if 0 < file.resources.gpu < file.processes and file.processes_per_node != "gpu":
        text = f"{file.processes} processes share {file.resources.gpu} GPUs; write gpu"
        yield Problem(key="processes_per_node", text=text)


def _shared_memory(job: Job) -> Iterator[Problem]:
    """Shared memory is a part of the memory, and has room for in-memory checkpoints."""
    file, shm, memory = job.file, job.file.resources.shared_memory, job.file.resources.memory
    if shm.size_bytes * 2 > memory.size_bytes:
        text = (
            f"{shm} is more than half of memory ({memory}), of which it is a part; "
            f"raise memory to {at_least(2 * shm.size_bytes)}, or lower it"
        )
        yield Problem(key="resources.shm", text=text)
    # Of each node's shard of the state: two for its own checkpoints, and two for each replica.
    ram = _checkpoint_config(job).get("ram")
    replicas = _count(ram if isinstance(ram, Mapping) else {}, "replicas", 1)
    copies = 2 * (1 + replicas) if ram else 0
    if file.parameters is not None and copies:
        share = file.parameters * BYTES_PER_PARAMETER / file.nodes.min
        needed = at_least(copies * share + file.processes * SHM_OF_A_WORKER_BYTES)
        # Not fatal: the job runs, without in-memory checkpoints.
        if shm < needed:
            text = (
                f"{shm} is less than the {needed} that {copies} copies of the state "
                f"take on each of {file.nodes.min} nodes, so none would be kept in memory; write "
                f"{needed}, or lower checkpoint.ram.replicas"
            )
            yield Problem(key="resources.shm", text=text, is_fatal=False)
    budget = file.checkpoint.ram_budget
    if budget is not None and budget > shm:
        text = f"{budget} is more than resources.shm ({shm}), of which it is a part; raise that"
        yield Problem(key="checkpoint.ram_budget", text=f"{text}, or write at most {shm}")


def _checkpoints(job: Job) -> Iterator[Problem]:
    """Checkpoints have one place, with enough room, and a save ends within the grace period."""
    file, wanted = job.file, job.file.checkpoint
    if file.parameters is not None and wanted.makes_a_claim:
        # One more than are kept: an old one is deleted after the commit of the new one.
        kept = _count(_checkpoint_config(job), "keep_last", 1) + 1
        needed = at_least(file.parameters * BYTES_PER_PARAMETER * kept)
        if wanted.size < needed:
            text = f"{wanted.size} cannot hold {kept} checkpoints; write {needed}"
            yield Problem(key="checkpoint.size", text=text)
    if wanted.access == "ReadWriteOnce" and file.nodes.max > 1 and wanted.makes_a_claim:
        text = "ReadWriteOnce: agents on a second machine cannot mount it, on Kubernetes"
        yield Problem(key="checkpoint.access", text=text, is_fatal=False)
    if wanted.url is not None and wanted.claim is not None:
        yield Problem(key="checkpoint", text="url and claim are two places; name one")
    if wanted.secret is not None and wanted.url is None:
        text = f"{wanted.secret} opens an object store; name its url"
        yield Problem(key="checkpoint.secret", text=text)
    if file.drain_s <= 0:
        yield Problem(
            key="grace_s", text=f"{file.grace:g} s are too short for an agent to drain; write 10"
        )
    elif wanted.save_s is not None and wanted.save_s >= file.drain_s:
        # More than a save is left of it when `drain_s` has taken its part.
        needed_s = wanted.save_s + max(wanted.save_s / 4, 5)
        text = (
            f"{file.grace:g} s leave {file.drain_s:g} s to drain, and one save takes "
            f"{wanted.save_s:g} s; write {needed_s:.0f}, or save to something faster"
        )
        yield Problem(key="grace_s", text=text, is_fatal=not file.spot)


def _checkpoint_config(job: Job) -> Mapping[str, Any]:
    """The section `checkpoint` of the engine's config."""
    # Empty if it is wrong: the engine says what is wrong with it.
    found = job.engine.get("checkpoint")
    return found if isinstance(found, Mapping) else {}


def _count(values: Mapping[str, Any], name: str, default: int) -> int:
    found = values.get(name)
    return found if isinstance(found, int) else default


def _etcd(job: Job) -> Iterator[Problem]:
    """The keys describe the etcd that is made for the job, or the user's own, and not both."""
    etcd = job.file.etcd
    if etcd.members % 2 == 0:
        text = f"{etcd.members} members survive no more failures than {etcd.members - 1}; "
        yield Problem(key="etcd.members", text=text + f"write {etcd.members + 1}")
    if etcd.endpoints and etcd.tls:
        text = "true is about an etcd made for this job; for yours name its ca, cert and key"
        yield Problem(key="etcd.tls", text=text)
    given = [name for name in ("secret", "user") if getattr(etcd, name)]
    if not etcd.endpoints and (given or etcd.files):
        key = f"etcd.{given[0]}" if given else "etcd"
        yield Problem(key=key, text="is about an etcd of yours; name its endpoints")
    if etcd.user and not etcd.password_file:
        yield Problem(key="etcd.user", text=f"{etcd.user} needs a password_file")
    if (etcd.cert is None) != (etcd.key is None):
        yield Problem(key="etcd", text="cert and key belong together; name both or neither")


def _image_and_variables(job: Job) -> Iterator[Problem]:
    """The image and the config are named; each variable is set once, and secrets are references."""
    file = job.file
    if file.uses("CONFIG") and file.config is None:
        yield Problem(key="args", text="$(CONFIG) stands for a file; name it with config: FILE")
    # All pods must run the same code: one that comes later would get what the tag names by then.
    tag = file.image.rpartition("/")[2].partition(":")[2]
    if "@sha256:" not in file.image and tag in ("", "latest"):
        text = (
            f"{file.image}: may be another one for the next pod; name a version or a digest: "
            "NAME:1.0.0, NAME@sha256:..."
        )
        yield Problem(key="image", text=text)
    for key in ("environment", "secrets"):
        for name, value in getattr(file, key).items():
            where = f"{key}.{name}"
            if not name.isidentifier():
                yield Problem(key=where, text="is not a name of a variable")
            elif name in _FROM_KEYS:
                yield Problem(key=where, text=f"is made from the key {_FROM_KEYS[name]}; set that")
            elif key == "secrets" and name in file.environment:
                yield Problem(key=where, text="is in environment, too; keep one")
            elif key == "secrets" and _REFERENCE.fullmatch(value) is None:
                # The value is not shown: it may be the secret itself.
                text = (
                    "is not a reference; write SECRET/ENTRY, such as wandb/api-key, never the value"
                )
                yield Problem(key=where, text=text)


def _pod(job: Job) -> Iterator[Problem]:
    """A pod template: metadata and spec; a container of its own needs an image."""
    pod, where = job.file.kubernetes.pod, "kubernetes.pod"
    for name in pod.keys() - {"metadata", "spec"}:
        text = f"a pod template has metadata and spec; write spec: {{{name}: ...}}"
        yield Problem(key=f"{where}.{name}", text=text)
    if any(not isinstance(part, Mapping) for part in pod.values()):
        yield Problem(key=where, text="metadata and spec have keys with values")
        return
    if not isinstance(pod.get("spec", {}).get("tolerations", []), list):
        text = "a list is needed here; write [{key: KEY, operator: Exists}], or leave it out"
        yield Problem(key=where, text=f"tolerations: {text}")
    containers = pod.get("spec", {}).get("containers", [])
    for one in containers if isinstance(containers, list) else [containers]:
        name = str(one.get("name") if isinstance(one, Mapping) else one)
        if not isinstance(one, Mapping) or (name != AGENT and "image" not in one):
            text = f"{name}: the container of the agent has the name {AGENT}; others need an image"
            yield Problem(key=where, text=text)


CHECKS: tuple[Check, ...] = (
    _nodes_and_workers,
    _shared_memory,
    _checkpoints,
    _etcd,
    _image_and_variables,
    _pod,
)
