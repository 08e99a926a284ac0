"""The schema of job files: the keys, their defaults, and the values derived from them.

Must always hold: every key has an effect on at least one kind of cluster; a value derived from
several keys (`drain_s`, `threads_per_worker`) is computed here, once, for all kinds of cluster.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import hjson

from zero_contract.values import Size
from zero_orchestrator.jobfile.reading import reader
from zero_orchestrator.jobfile.reading.reader import (
    JobFileError,
    Source,
    either,
    entry,
    scalar,
    section,
    sequence,
    table,
    tree,
)
from zero_orchestrator.jobfile.reading.values import (
    bounds,
    cores,
    cores_number,
    duration,
    endpoint,
    hang,
    more_than_none,
    name,
    one_of,
    parameters,
    positive,
    seconds,
    truth,
    url,
    whole,
    workers,
)

GRACE_S = 120.0
SPOT_GRACE_S = 15.0
"""Grace period of GKE for a pod on a spot machine, the shortest of the clouds."""
CONFIG_NAME = "config.json"
_PLACES = re.compile(r"\$\((CHECKPOINTS|CONFIG)\)")

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The number of nodes."""

    min: int = entry(scalar(positive), "write the minimum: with fewer nodes the job waits")
    max: int = entry(scalar(positive), "write the maximum: further nodes are spares")
    start: int | None = entry(
        scalar(positive), "nodes that the cluster is asked for at first (min)", None
    )


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of one node for its agent and its workers."""

    cpu: str = entry(scalar(cores), "number of cores", "4")
    memory: Size = entry(
        scalar(Size),
        "memory, including shared memory; on machines no limit if left out",
        Size("16Gi"),
    )
    gpu: int = entry(scalar(whole), "number of GPUs", 0)
    gpu_kind: str = entry(scalar(str), "resource name of the GPUs on Kubernetes", "nvidia.com/gpu")
    shm: Size | None = entry(scalar(Size), "size of /dev/shm (4Gi, at most half of memory)", None)
    scratch: Size = entry(scalar(Size), "size of /tmp", Size("10Gi"))

    @property
    def shared_memory(self) -> Size:
        """Size of /dev/shm, which is a part of the memory."""
        half = Size(f"{self.memory.size_bytes // 2**21}Mi")
        return self.shm or min(Size("4Gi"), half)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The place of checkpoints; every node must be able to read and write there."""

    path: str | None = entry(scalar(str), "directory of checkpoints, on machines", None)
    url: str | None = entry(scalar(url), "URL of checkpoints in an object store", None)
    secret: str | None = entry(
        scalar(str), "Secret with the credentials of the object store, on Kubernetes", None
    )
    claim: str | None = entry(scalar(str), "name of an existing PersistentVolumeClaim", None)
    size: Size = entry(scalar(Size), "size of the claim that is created", Size("200Gi"))
    storage_class: str | None = entry(scalar(str), "storage class of that claim", None)
    access: str = entry(
        scalar(one_of("ReadWriteMany", "ReadWriteOnce")),
        "access mode of that claim",
        "ReadWriteMany",
    )
    save_s: float | None = entry(scalar(seconds), "longest time of one save, seconds", None)
    ram_budget: Size | None = entry(scalar(Size), "memory of a node for checkpoints", None)

    @property
    def makes_a_claim(self) -> bool:
        """Whether a PersistentVolumeClaim is created for the job."""
        return self.claim is None and self.url is None


@dataclass(frozen=True, kw_only=True)
class Etcd:
    """The etcd of the job: created for it, or the user's own."""

    members: int = entry(scalar(positive), "members of the etcd that is created, on Kubernetes", 3)
    storage: Size = entry(scalar(Size), "storage of each member", Size("4Gi"))
    tls: bool = entry(
        scalar(truth), "the etcd that is created uses TLS (needs cert-manager)", False
    )
    endpoints: tuple[str, ...] = entry(sequence(endpoint), "endpoints of your own etcd", ())
    user: str | None = entry(scalar(str), "user of your own etcd", None)
    password_file: str | None = entry(scalar(str), "file with the password of that user", None)
    ca: str | None = entry(scalar(str), "CA that signed the certificate of etcd", None)
    cert: str | None = entry(scalar(str), "the agents' certificate", None)
    key: str | None = entry(scalar(str), "private key of that certificate", None)
    secret: str | None = entry(scalar(str), "Secret with these files, on Kubernetes", None)

    @property
    def files(self) -> dict[str, str]:
        """Flag of `zero-agent` -> path of the file that the flag names."""
        found = {
            "ETCD_CA": self.ca,
            "ETCD_CERT": self.cert,
            "ETCD_KEY": self.key,
            "ETCD_PASSWORD_FILE": self.password_file,
        }
        return {flag: path for flag, path in found.items() if path is not None}


@dataclass(frozen=True, kw_only=True)
class Kubernetes:
    """Settings for Kubernetes only."""

    namespace: str | None = entry(scalar(name), "namespace (that of kubectl's context)", None)
    queue: str | None = entry(scalar(str), "Kueue LocalQueue that admits the job", None)
    node_selector: Mapping[str, str] = entry(table, "labels of the machines for the agents", {})
    priority_class: str | None = entry(scalar(str), "the agents' PriorityClass", None)
    pull_secrets: tuple[str, ...] = entry(
        sequence(str), "Secrets with the credentials of the registry", ()
    )
    pod: Mapping[str, Any] = entry(
        tree, "metadata and spec of a pod template, merged into that of the agents", {}
    )


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Settings for Slurm only."""

    partition: str | None = entry(scalar(str), "--partition", None)
    account: str | None = entry(scalar(str), "--account", None)
    time: str = entry(scalar(str), "--time; the job is requeued before its end", "24:00:00")
    options: Mapping[str, str] = entry(table, "further options of sbatch, without --", {})


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """One job."""

    name: str = entry(scalar(name), "call the job something, such as gpt")
    script: str = entry(scalar(str), "name the script that zero-agent runs, such as train.py")
    args: tuple[str, ...] = entry(
        sequence(str), "arguments; $(CONFIG) and $(CHECKPOINTS) stand for the paths", ()
    )
    image: str = entry(
        scalar(str), "container image that contains the script", "zero-elastic:0.1.0"
    )
    config: str | None = entry(
        scalar(str), "config file of the engine, relative to the job file", None
    )
    parameters: int | None = entry(
        scalar(parameters), "parameters of the model, to check sizes", None
    )
    nodes: Nodes = entry(
        either(lambda text: Nodes(**dict(zip(("min", "max"), bounds(text), strict=True))), Nodes),
        "write the number of nodes: 4, 2:16 or {min: 2, max: 16, start: 4}",
    )
    processes_per_node: str = entry(
        scalar(workers), "workers of each node: a number, auto, cpu or gpu", "1"
    )
    threads: int | None = entry(
        scalar(positive), "threads of each worker; the bits depend on it (cpu / processes)", None
    )
    max_restarts: int = entry(
        scalar(whole), "restart budget: failures that the job may survive", 20
    )
    refill_after_steps: int | None = entry(
        scalar(whole), "steps after which the budget gets one restart back", None
    )
    max_restarts_without_progress: int | None = entry(scalar(whole), "restarts in a row", None)
    exclude_after: int | None = entry(
        scalar(whole), "failures of a host in a row before it is excluded", None
    )
    exclude_for: str | None = entry(
        scalar(more_than_none), "duration of the first exclusion: 60, 10m", None
    )
    grow_every: str | None = entry(
        scalar(duration), "time of a round before it can grow: 60, 10m", None
    )
    node_unit: int | None = entry(
        scalar(positive), "the nodes of a round are a multiple of this", None
    )
    join_timeout: str | None = entry(scalar(duration), "wait for enough nodes: 600, 10m", None)
    etcd_wait: str | None = entry(scalar(duration), "wait for etcd at the start: 30, 10m", None)
    etcd_grace: str | None = entry(
        scalar(duration), "time that workers continue without etcd: 600, 10m", None
    )
    lease_ttl: int | None = entry(scalar(positive), "seconds until a silent node is lost", None)
    preload: str | None = entry(scalar(str), "modules that the fork server imports", None)
    hang_timeout: str | None = entry(
        scalar(hang), "time without a step: 600, 10m, auto or off", None
    )
    health_check: str | None = entry(
        scalar(str), "command that exits with 0 on a healthy node", None
    )
    health_check_timeout: str | None = entry(
        scalar(more_than_none), "timeout of health_check: 60, 10m", None
    )
    numa_binding: str | None = entry(
        scalar(one_of("node", "socket", "exclusive", "core-complex")),
        "NUMA binding of each worker",
        None,
    )
    resources: Resources = entry(section(Resources), "resources of one node", Resources())
    checkpoint: Checkpoint = entry(section(Checkpoint), "place of the checkpoints", Checkpoint())
    etcd: Etcd = entry(section(Etcd), "etcd of the job", Etcd())
    environment: Mapping[str, str] = entry(table, "variables of agents and workers", {})
    secrets: Mapping[str, str] = entry(
        table, "variables whose values are not in this file: NAME: SECRET/ENTRY", {}
    )
    spot: bool = entry(scalar(truth), "machines may be preempted at short notice", False)
    grace_s: float | None = entry(
        scalar(seconds), "from SIGTERM to SIGKILL (120; 15 with spot)", None
    )
    kubernetes: Kubernetes = entry(
        section(Kubernetes), "settings for Kubernetes only", Kubernetes()
    )
    slurm: Slurm = entry(section(Slurm), "settings for Slurm only", Slurm())

    @property
    def start(self) -> int:
        """The number of nodes that the cluster is asked for at first."""
        return self.nodes.start or self.nodes.min

    @property
    def nnodes(self) -> str:
        """The value of `--nnodes`: `MIN:MAX`."""
        return f"{self.nodes.min}:{self.nodes.max}"

    @property
    def processes(self) -> int:
        """The number of workers on each node; 1 if it depends on the machine (`auto`, `cpu`)."""
        if self.processes_per_node == "gpu":
            return max(self.resources.gpu, 1)
        return int(self.processes_per_node) if self.processes_per_node.isdecimal() else 1

    @property
    def threads_per_worker(self) -> int:
        """OMP_NUM_THREADS: the same on every node, because the bits of the weights depend on it."""
        return self.threads or max(int(cores_number(self.resources.cpu)) // self.processes, 1)

    @property
    def grace(self) -> float:
        """Seconds from SIGTERM to SIGKILL."""
        return self.grace_s or (SPOT_GRACE_S if self.spot else GRACE_S)

    @property
    def drain_s(self) -> float:
        """The part of the grace period in which workers drain, seconds.

        A sixth of the grace period, and at least 4 s, is left for the end of the agent: 2 s for a
        pod's preStop, 2 s for the agent itself.
        """
        return self.grace - max(self.grace // 6, 4)

    def arguments(self, *, config: str, checkpoints: str) -> list[str]:
        """The script's arguments, with $(CONFIG) and $(CHECKPOINTS) replaced by these paths."""
        places = {"CONFIG": config, "CHECKPOINTS": checkpoints}
        return [_PLACES.sub(lambda found: places[found[1]], word) for word in self.args]

    def uses(self, place: str) -> bool:
        """Whether the arguments name `CONFIG` or `CHECKPOINTS`."""
        return any(place in _PLACES.findall(word) for word in self.args)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job file that was read, with its source and the config that it names."""

    file: JobFile
    source: Source
    directory: Path
    """Directory of the job file; the path of the config is relative to it."""
    config: str | None
    """The text of the engine's config."""

    @property
    def memory_limit_bytes(self) -> int | None:
        """Memory limit of a node on machines; None if the file sets none (pods have a default)."""
        named = "resources.memory" in self.source.lines
        return self.file.resources.memory.size_bytes if named else None

    @property
    def config_path(self) -> Path:
        """Path of the config on this machine."""
        return (self.directory / (self.file.config or "")).resolve()

    @property
    def engine(self) -> Config:
        """The parsed config of the engine; empty without one."""
        return _parsed(self.config) if self.config else {}


def load(path: Path) -> Job:
    """The job in a file.

    Raises:
        JobFileError: The file or its config cannot be read, or is wrong.
    """
    file, source = reader.load(path, JobFile)
    directory = path.resolve().parent
    config, wrong = None, ""
    if file.config:
        try:
            config = (directory / file.config).read_text(encoding="utf-8")
            _parsed(config)
        except OSError as error:
            wrong = f"{file.config} cannot be read: {error.strerror}"
        except ValueError as error:
            wrong = f"{file.config} is not a config: {error}"
    if wrong:
        raise JobFileError(source.message(reader.Problem(key="config", text=wrong)))
    return Job(file=file, source=source, directory=directory, config=config)


def _parsed(text: str) -> Config:
    """Parse a config: JSON, or Hjson (with comments, and without some commas).

    Raises:
        ValueError: The text is neither, or is not an object.
    """
    try:
        found = json.loads(text)
    except ValueError:
        try:
            found = hjson.loads(text)
        except hjson.HjsonDecodeError:
            found = None
        if not isinstance(found, dict):
            raise  # the error of the JSON parser
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def keys(cls: type[Any] = JobFile, path: str = "") -> set[str]:
    """All keys of a job file, by path: `name`, `resources.cpu`."""
    found = set()
    for one, kind in get_type_hints(cls).items():
        found.add(f"{path}{one}")
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            found |= keys(kind, f"{path}{one}.")
    return found
