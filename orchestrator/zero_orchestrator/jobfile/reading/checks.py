"""What cannot be, or should not: the parts of a job file held against each other.

Each check is a pure function of the job and yields its complaints. Must always hold: a complaint
names the key, what is wrong with its value, and a value that would do. Who calls it: `command`,
before anything is rendered; what needs a cluster to be known is in `preflight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zero_orchestrator.jobfile.reading.reader import Problem
from zero_orchestrator.jobfile.reading.schema import Job
from zero_orchestrator.jobfile.reading.settings import FLAGS, variable
from zero_orchestrator.jobfile.reading.values import at_least

Check = Callable[[Job], Iterator[Problem]]

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: the fp32 weight and Adam's two moments."""
SHM_OF_A_WORKER_BYTES = 64 * 2**20
"""What collectives and loaders need beside a copy of the state."""


def check(job: Job) -> list[Problem]:
    """All complaints."""
    return [problem for one in CHECKS for problem in one(job)]


def _the_start_is_within_the_bounds(job: Job) -> Iterator[Problem]:
    nodes = job.file.nodes
    if nodes.min > nodes.max:
        yield Problem(
            key="nodes",
            text=f"minimum {nodes.min} exceeds maximum {nodes.max}; write {nodes.max}:{nodes.min}",
        )
    elif not nodes.min <= job.file.start <= nodes.max:
        yield Problem(
            key="nodes.start", text=f"{nodes.start} is not within {nodes.min}:{nodes.max}"
        )


def _some_number_of_nodes_is_a_multiple_of_the_unit(job: Job) -> Iterator[Problem]:
    low, high, unit = job.file.nodes.min, job.file.nodes.max, job.file.node_unit or 1
    fewest = -(-low // unit) * unit
    if low <= high < fewest:
        text = f"no multiple of {unit} lies within {low}:{high} nodes; write nodes: {low}:{fewest}"
        yield Problem(key="node_unit", text=text)


def _the_workers_have_gpus(job: Job) -> Iterator[Problem]:
    file = job.file
    if file.processes_per_node == "gpu" and not file.resources.gpu:
        text = "gpu: a node has none; write resources: {gpu: 8}, or a number of processes"
        yield Problem(key="processes_per_node", text=text)
    if 0 < file.resources.gpu < file.processes and file.processes_per_node != "gpu":
        text = f"{file.processes} processes share {file.resources.gpu} GPUs; write gpu"
        yield Problem(key="processes_per_node", text=text)


def _shared_memory_is_part_of_the_memory(job: Job) -> Iterator[Problem]:
    resources = job.file.resources
    if resources.shm.size_bytes * 2 > resources.memory.size_bytes:
        enough = at_least(2 * resources.shm.size_bytes)
        text = (
            f"{resources.shm} is more than half of memory ({resources.memory}), of which it is "
            f"a part; raise memory to {enough}, or lower it"
        )
        yield Problem(key="resources.shm", text=text)


def _shared_memory_holds_the_checkpoints(job: Job) -> Iterator[Problem]:
    """Without room nothing is kept in memory: the job works."""
    file = job.file
    # Of a node's share of the state: two for checkpoints in memory, and two for each replica.
    ram = _saving(job).get("ram")
    replicas = _count(ram if isinstance(ram, Mapping) else {}, "replicas", 1)
    copies = 2 * (1 + replicas) if ram else 0
    if file.parameters is None or not copies:
        return
    share = file.parameters * BYTES_PER_PARAMETER / file.nodes.min
    needed = at_least(copies * share + file.processes * SHM_OF_A_WORKER_BYTES)
    if file.resources.shm < needed:
        text = (
            f"{file.resources.shm} is less than the {needed} that {copies} copies of the state "
            f"take on each of {file.nodes.min} nodes, so none would be kept in memory; write "
            f"{needed}, or lower checkpoint.ram.replicas"
        )
        yield Problem(key="resources.shm", text=text, is_fatal=False)


def _saving(job: Job) -> Mapping[str, Any]:
    """What the config says of checkpoints; the engine tells what is wrong with that."""
    found = job.engine.get("checkpoint")
    return found if isinstance(found, Mapping) else {}


def _count(values: Mapping[str, Any], name: str, default: int) -> int:
    found = values.get(name)
    return found if isinstance(found, int) else default


def _shared_memory_holds_the_budget(job: Job) -> Iterator[Problem]:
    shm, budget = job.file.resources.shm, job.file.checkpoint.ram_budget
    if budget is not None and budget > shm:
        text = f"{budget} is more than resources.shm ({shm}), of which it is a part; raise that"
        yield Problem(key="checkpoint.ram_budget", text=f"{text}, or write at most {shm}")


def _the_volume_holds_the_checkpoints(job: Job) -> Iterator[Problem]:
    file = job.file
    if file.parameters is None or not file.checkpoint.makes_a_claim:
        return
    kept = _count(_saving(job), "keep_last", 1) + 1
    needed = at_least(file.parameters * BYTES_PER_PARAMETER * kept)
    if file.checkpoint.size < needed:
        text = f"{file.checkpoint.size} cannot hold {kept} checkpoints; write {needed}"
        yield Problem(key="checkpoint.size", text=text)


def _all_nodes_reach_the_volume(job: Job) -> Iterator[Problem]:
    checkpoint = job.file.checkpoint
    if checkpoint.access == "ReadWriteOnce" and job.file.nodes.max > 1 and checkpoint.makes_a_claim:
        text = "ReadWriteOnce: agents on a second machine cannot mount it, on Kubernetes"
        yield Problem(key="checkpoint.access", text=text, is_fatal=False)


def _checkpoints_have_one_place(job: Job) -> Iterator[Problem]:
    checkpoint = job.file.checkpoint
    if checkpoint.url is not None and checkpoint.claim is not None:
        yield Problem(key="checkpoint", text="url and claim are two places; name one")
    if checkpoint.secret is not None and checkpoint.url is None:
        text = f"{checkpoint.secret} opens an object store; name its url"
        yield Problem(key="checkpoint.secret", text=text)


def _a_save_fits_the_grace_period(job: Job) -> Iterator[Problem]:
    file = job.file
    save_s = file.checkpoint.save_s
    if file.drain_s <= 0:
        yield Problem(key="grace_s", text=f"{file.grace:g} s end no agent in order; write 10")
    elif save_s is not None and save_s >= file.drain_s:
        needed_s = save_s + max(save_s / 4, 5)
        text = (
            f"{file.grace:g} s leave {file.drain_s:g} s to drain, and one save takes {save_s:g} s; "
            f"write {needed_s:.0f}, or save to something faster"
        )
        yield Problem(key="grace_s", text=text, is_fatal=not file.spot)


def _etcd_is_ours_or_yours(job: Job) -> Iterator[Problem]:
    etcd = job.file.etcd
    if etcd.members % 2 == 0:
        text = f"{etcd.members} members survive no more failures than {etcd.members - 1}; "
        yield Problem(key="etcd.members", text=text + f"write {etcd.members + 1}")
    if etcd.endpoints and etcd.tls:
        text = "true is about an etcd made for this job; for yours name its ca, cert and key"
        yield Problem(key="etcd.tls", text=text)
    given = sorted({"user", "secret"} & {n for n in ("user", "secret") if getattr(etcd, n)})
    if not etcd.endpoints and (given or etcd.files):
        key = f"etcd.{given[0]}" if given else "etcd"
        yield Problem(key=key, text="is about an etcd of yours; name its endpoints")
    if etcd.user and not etcd.password_file:
        yield Problem(key="etcd.user", text=f"{etcd.user} needs a password_file")
    if (etcd.cert is None) != (etcd.key is None):
        yield Problem(key="etcd", text="cert and key belong together; name both or neither")


def _places_that_are_used_are_named(job: Job) -> Iterator[Problem]:
    if job.file.uses("CONFIG") and job.file.config is None:
        yield Problem(key="args", text="$(CONFIG) stands for a file; name it with config: FILE")


def _the_image_stays_what_it_is(job: Job) -> Iterator[Problem]:
    image = job.file.image
    tag = image.rpartition("/")[2].partition(":")[2]
    if "@sha256:" not in image and tag in ("", "latest"):
        text = (
            f"{image}: may be another one for the next pod; name a version or a digest: "
            "NAME:1.0.0, NAME@sha256:..."
        )
        yield Problem(key="image", text=text)


def _variables_are_not_the_agents(job: Job) -> Iterator[Problem]:
    for name in job.file.environment:
        where = f"environment.{name}"
        if not name.isidentifier():
            yield Problem(key=where, text="is no name of a variable")
        elif name in _FROM_KEYS:
            yield Problem(key=where, text=f"is made from the key {_FROM_KEYS[name]}; set that")


def _secrets_are_references(job: Job) -> Iterator[Problem]:
    for name, reference in job.file.secrets.items():
        where = f"secrets.{name}"
        if not name.isidentifier():
            yield Problem(key=where, text="is no name of a variable")
        elif name in _FROM_KEYS:
            yield Problem(key=where, text=f"is made from the key {_FROM_KEYS[name]}; set that")
        elif name in job.file.environment:
            yield Problem(key=where, text="is in environment, too; keep one")
        elif _REFERENCE.fullmatch(reference) is None:  # not shown: it may be the secret itself
            text = "is no reference; write SECRET/ENTRY, such as wandb/api-key, never the value"
            yield Problem(key=where, text=text)


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

CHECKS: tuple[Check, ...] = (
    _the_start_is_within_the_bounds,
    _some_number_of_nodes_is_a_multiple_of_the_unit,
    _the_workers_have_gpus,
    _shared_memory_is_part_of_the_memory,
    _shared_memory_holds_the_checkpoints,
    _shared_memory_holds_the_budget,
    _the_volume_holds_the_checkpoints,
    _all_nodes_reach_the_volume,
    _checkpoints_have_one_place,
    _a_save_fits_the_grace_period,
    _etcd_is_ours_or_yours,
    _places_that_are_used_are_named,
    _the_image_stays_what_it_is,
    _variables_are_not_the_agents,
    _secrets_are_references,
)
