"""What a job file can say: the keys, their defaults, and what follows from them.

Must always hold: every key has an effect on at least one kind of cluster; what follows from
several keys (`drain_s`, `threads_per_worker`) is computed here, once, for all of them. Who calls
it: `command` reads files with `load`; the renderers get the records.
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
"""What GKE gives a pod on a spot machine, which is the least of the clouds."""
CONFIG_NAME = "config.json"
_PLACES = re.compile(r"\$\((CHECKPOINTS|CONFIG)\)")

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How many machines."""

    min: int = entry(scalar(positive), "the job runs with so many, and with no fewer")
    max: int = entry(scalar(positive), "and with no more; further ones are spares")
    start: int | None = entry(scalar(positive), "how many to ask for at first (min)", None)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one node gives to its agent and its workers."""

    cpu: str = entry(scalar(cores), "cores", "4")
    memory: Size = entry(
        scalar(Size),
        "memory, shared memory included; on machines no limit if left out",
        Size("16Gi"),
    )
    gpu: int = entry(scalar(whole), "GPUs", 0)
    gpu_kind: str = entry(scalar(str), "what Kubernetes calls them", "nvidia.com/gpu")
    shm: Size = entry(scalar(Size), "/dev/shm: collectives, loaders, checkpoints", Size("4Gi"))
    scratch: Size = entry(scalar(Size), "/tmp", Size("10Gi"))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where checkpoints go: a place that every node sees."""

    path: str | None = entry(scalar(str), "a directory, on machines", None)
    url: str | None = entry(scalar(url), "in an object store, everywhere", None)
    secret: str | None = entry(
        scalar(str), "a Secret with variables that open it, on Kubernetes", None
    )
    claim: str | None = entry(scalar(str), "a PersistentVolumeClaim that there is, by name", None)
    size: Size = entry(scalar(Size), "of the claim to make", Size("200Gi"))
    storage_class: str | None = entry(scalar(str), "of the claim (the cluster's default)", None)
    access: str = entry(
        scalar(one_of("ReadWriteMany", "ReadWriteOnce")), "of the claim", "ReadWriteMany"
    )
    save_s: float | None = entry(scalar(seconds), "how long one save takes at most", None)
    ram_budget: Size | None = entry(scalar(Size), "of a node's memory for checkpoints", None)

    @property
    def makes_a_claim(self) -> bool:
        """Whether Kubernetes is asked for a volume."""
        return self.claim is None and self.url is None


@dataclass(frozen=True, kw_only=True)
class Etcd:
    """Where the nodes meet: an etcd made for this job, or yours."""

    members: int = entry(scalar(positive), "of the one to make, on Kubernetes", 3)
    storage: Size = entry(scalar(Size), "of each member", Size("4Gi"))
    tls: bool = entry(scalar(truth), "the one to make speaks TLS (needs cert-manager)", False)
    endpoints: tuple[str, ...] = entry(sequence(endpoint), "yours", ())
    user: str | None = entry(scalar(str), "log in to it", None)
    password_file: str | None = entry(scalar(str), "with the password in this file", None)
    ca: str | None = entry(scalar(str), "who signed its certificate", None)
    cert: str | None = entry(scalar(str), "the agents' certificate", None)
    key: str | None = entry(scalar(str), "and its key", None)
    secret: str | None = entry(scalar(str), "the Secret that has these files, on Kubernetes", None)

    @property
    def files(self) -> dict[str, str]:
        """Flag of `zero-agent` -> the file that it names."""
        found = {
            "ETCD_CA": self.ca,
            "ETCD_CERT": self.cert,
            "ETCD_KEY": self.key,
            "ETCD_PASSWORD_FILE": self.password_file,
        }
        return {flag: path for flag, path in found.items() if path is not None}


@dataclass(frozen=True, kw_only=True)
class Kubernetes:
    """What only Kubernetes has."""

    namespace: str | None = entry(scalar(name), "where (that of the context)", None)
    queue: str | None = entry(scalar(str), "a Kueue LocalQueue that admits the job", None)
    node_selector: Mapping[str, str] = entry(table, "labels of the machines for the agents", {})
    priority_class: str | None = entry(scalar(str), "the agents' PriorityClass", None)
    pull_secrets: tuple[str, ...] = entry(sequence(str), "Secrets that open the registry", ())


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """What only Slurm has."""

    partition: str | None = entry(scalar(str), "--partition", None)
    account: str | None = entry(scalar(str), "--account", None)
    time: str = entry(scalar(str), "--time; the job is requeued before its end", "24:00:00")
    options: Mapping[str, str] = entry(table, "further options of sbatch, without --", {})


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """One job."""

    name: str = entry(scalar(name), "call the job something, such as gpt")
    script: str = entry(scalar(str), "what zero-agent runs, such as train.py")
    args: tuple[str, ...] = entry(
        sequence(str), "of the script; $(CONFIG) and $(CHECKPOINTS) stand for their places", ()
    )
    image: str = entry(scalar(str), "has the script in it", "zero-elastic:0.1.0")
    config: str | None = entry(scalar(str), "the engine's config, beside this file", None)
    parameters: int | None = entry(scalar(parameters), "of the model, to check sizes", None)
    nodes: Nodes = entry(
        either(lambda text: Nodes(**dict(zip(("min", "max"), bounds(text), strict=True))), Nodes),
        "how many: 4, 2:16 or {min: 2, max: 16, start: 4}",
    )
    processes_per_node: str = entry(scalar(workers), "a number, auto, cpu or gpu", "1")
    threads: int | None = entry(
        scalar(positive), "per process; decides the bits (cpu / processes)", None
    )
    max_restarts: int = entry(scalar(whole), "failures the job may survive", 20)
    refill_after_steps: int | None = entry(scalar(whole), "a restart comes back", None)
    max_restarts_without_progress: int | None = entry(scalar(whole), "in a row", None)
    exclude_after: int | None = entry(scalar(whole), "failures in a row of one host", None)
    exclude_for: str | None = entry(scalar(more_than_none), "at first: 60, 10m", None)
    grow_every: str | None = entry(scalar(duration), "between growths: 60, 10m", None)
    node_unit: int | None = entry(scalar(positive), "rounds of a multiple of so many nodes", None)
    join_timeout: str | None = entry(scalar(duration), "to wait for nodes: 600, 10m", None)
    etcd_wait: str | None = entry(scalar(duration), "for etcd at the start: 30, 10m", None)
    etcd_grace: str | None = entry(scalar(duration), "to go on without etcd: 600, 10m", None)
    lease_ttl: int | None = entry(scalar(positive), "a silent node is lost", None)
    preload: str | None = entry(scalar(str), "modules, such as transformers.trainer", None)
    hang_timeout: str | None = entry(scalar(hang), "600, 10m, auto or off", None)
    health_check: str | None = entry(scalar(str), "a command that says a node is fit", None)
    health_check_timeout: str | None = entry(scalar(more_than_none), "60, 10m", None)
    numa_binding: str | None = entry(
        scalar(one_of("node", "socket", "exclusive", "core-complex")), "of each worker", None
    )
    resources: Resources = entry(section(Resources), "of one node", Resources())
    checkpoint: Checkpoint = entry(section(Checkpoint), "where they go", Checkpoint())
    etcd: Etcd = entry(section(Etcd), "where the nodes meet", Etcd())
    environment: Mapping[str, str] = entry(table, "variables of the workers", {})
    secrets: Mapping[str, str] = entry(
        table, "variables whose values are not in this file: NAME: SECRET/ENTRY", {}
    )
    spot: bool = entry(scalar(truth), "on machines that may be taken back", False)
    grace_s: float | None = entry(
        scalar(seconds), "from SIGTERM to SIGKILL (120; 15 with spot)", None
    )
    kubernetes: Kubernetes = entry(section(Kubernetes), "what only it has", Kubernetes())
    slurm: Slurm = entry(section(Slurm), "what only it has", Slurm())

    @property
    def start(self) -> int:
        """How many nodes to ask for at first."""
        return self.nodes.start or self.nodes.min

    @property
    def nnodes(self) -> str:
        """As a flag of `zero-agent`."""
        return f"{self.nodes.min}:{self.nodes.max}"

    @property
    def processes(self) -> int:
        """How many workers a node has; 1 if only the node itself can tell."""
        if self.processes_per_node == "gpu":
            return max(self.resources.gpu, 1)
        return int(self.processes_per_node) if self.processes_per_node.isdecimal() else 1

    @property
    def threads_per_worker(self) -> int:
        """OMP_NUM_THREADS: the same on every node, as it decides the bits."""
        return self.threads or max(int(cores_number(self.resources.cpu)) // self.processes, 1)

    @property
    def grace(self) -> float:
        """Seconds from SIGTERM to SIGKILL."""
        return self.grace_s or (SPOT_GRACE_S if self.spot else GRACE_S)

    @property
    def drain_s(self) -> float:
        """How much of the grace period the workers get; what is left ends the agent.

        A sixth of it, and at least 4 s: 2 for a pod's preStop, 2 for the agent itself.
        """
        return self.grace - max(self.grace // 6, 4)

    def arguments(self, *, config: str, checkpoints: str) -> list[str]:
        """The script's arguments, with the places where these are."""
        places = {"CONFIG": config, "CHECKPOINTS": checkpoints}
        return [_PLACES.sub(lambda found: places[found[1]], word) for word in self.args]

    def uses(self, place: str) -> bool:
        """Whether the arguments name `CONFIG` or `CHECKPOINTS`."""
        return any(place in _PLACES.findall(word) for word in self.args)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job file that has been read, with what it names."""

    file: JobFile
    source: Source
    directory: Path
    """Where the file is; what it names is relative to that."""
    config: str | None
    """The text of the engine's config."""

    @property
    def memory_limit_bytes(self) -> int | None:
        """What a machine is to give a node, if the file says so: only pods need a default."""
        named = "resources.memory" in self.source.lines
        return self.file.resources.memory.size_bytes if named else None

    @property
    def config_path(self) -> Path:
        """Where the config is on this machine."""
        return (self.directory / (self.file.config or "")).resolve()

    @property
    def engine(self) -> Config:
        """What the config says; empty without one."""
        return _parsed(self.config) if self.config else {}


def load(path: Path) -> Job:
    """The job in a file.

    Raises:
        JobFileError: It cannot be read, or something in it cannot be.
    """
    file, source = reader.load(path, JobFile)
    directory = path.resolve().parent
    config = _config(directory, file.config, source) if file.config else None
    return Job(file=file, source=source, directory=directory, config=config)


def _config(directory: Path, named: str, source: Source) -> str:
    try:
        text = (directory / named).read_text(encoding="utf-8")
        _parsed(text)
    except OSError as error:
        what = f"{named} cannot be read: {error.strerror}"
    except ValueError as error:
        what = f"{named} is no config: {error}"
    else:
        return text
    raise JobFileError(source.tell(reader.Problem(key="config", text=what)))


def _parsed(text: str) -> Config:
    """The object of a config: JSON, or JSON with comments and without some commas.

    Raises:
        ValueError: It is neither.
    """
    try:
        found = json.loads(text)
    except ValueError:
        try:
            found = hjson.loads(text)
        except hjson.HjsonDecodeError:
            found = None
        if not isinstance(found, dict):
            raise  # what is wrong with it as JSON
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def keys(cls: type[Any] = JobFile, path: str = "") -> set[str]:
    """Every key that there is, by path: `name`, `resources.cpu`."""
    found = set()
    for one, kind in get_type_hints(cls).items():
        found.add(f"{path}{one}")
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            found |= keys(kind, f"{path}{one}.")
    return found
