"""The schema of job files: the keys, their defaults, and the values derived from them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import hjson
from msgspec import Meta

from zero_contract.sections import Count, Finite, Spelled, Whole, Wrong, keys_of
from zero_contract.values import Size
from zero_orchestrator.errors import SpecError
from zero_orchestrator.jobfile.reading import reader
from zero_orchestrator.jobfile.reading.reader import JobFileError, JobSource, Tree
from zero_orchestrator.membership.spec import parse_nnodes

GRACE_S = 120.0
SPOT_GRACE_S = 15.0
"""Grace period of GKE for a pod on a spot machine, the shortest of the clouds."""
CONFIG_NAME = "config.json"
_PLACES = re.compile(r"\$\((CHECKPOINTS|CONFIG)\)")

Config = Mapping[str, Any]

# ---- types of values ----


def _number_of_parameters(text: Any) -> Any:
    match = (
        re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)([MBT]?)", text) if isinstance(text, str) else None
    )
    return round(float(match[1]) * _MILLIONS[match[2]]) if match else text


def _bounds(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        low, high = parse_nnodes(text)
    except SpecError as error:
        # Its text begins with the flag --nnodes, which nobody has typed here.
        raise Wrong("", f"{text}: {str(error).partition(': ')[2]}") from None
    return {"min": low, "max": high}


_16GI, _200GI, _10GI, _4GI = map(Size, ("16Gi", "200Gi", "10Gi", "4Gi"))
_MILLIONS = {"": 1, "M": 10**6, "B": 10**9, "T": 10**12}
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
Parameters = Annotated[
    int,
    Meta(ge=0, description="a number of parameters; write 125M or 7B"),
    Spelled(_number_of_parameters),
]
Truth = Annotated[bool, Spelled(lambda text: _TRUTH.get(str(text).lower(), text))]
ONE_OR_MORE = Spelled(lambda value: value if isinstance(value, list) else [value])
Words = Annotated[tuple[str, ...], ONE_OR_MORE]
Bytes = Annotated[Size, Meta(description="a size; write 512Mi, 16Gi or 2Ti")]
Name = Annotated[
    str,
    Meta(
        pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?\Z",
        description="a name that every kind of cluster accepts; use at most 40 of a-z, 0-9 and "
        "'-', a letter first",
    ),
]
Script = Annotated[str, Meta(description="a script that zero-agent runs, such as train.py")]
Seconds = Annotated[Finite, Meta(description="a length of time; write seconds, such as 120")]
# As `values.parse_seconds` reads it; `_SOME` has a digit that is no zero.
_SPAN = r"(\d{1,15}\.?\d{0,9}|\.\d{1,9})[smhd]?"
_SOME = rf"(?=.*[1-9]){_SPAN}"
Duration = Annotated[
    str,
    Meta(
        pattern=rf"^{_SPAN}\Z",
        description="a length of time; write seconds, such as 30, or 10m, or 2h, or 7d",
    ),
]
MoreThanNone = Annotated[
    str,
    Meta(
        pattern=rf"^{_SOME}\Z", description="more than 0 seconds; write seconds, such as 30, or 10m"
    ),
]
Hang = Annotated[
    str,
    Meta(
        pattern=rf"^({_SOME}|auto|off)\Z",
        description="a limit; write seconds, such as 600, or 10m, or auto, or off",
    ),
]
Cores = Annotated[
    str,
    Meta(
        pattern=r"^(?=.*[1-9])\d{1,9}(\.\d{1,9}|m)?\Z",
        description="a number of cores; write 4, or 500m for half of one",
    ),
]
Workers = Annotated[
    str,
    Meta(
        pattern=r"^(auto|cpu|gpu|(?=0*[1-9])\d{1,9})\Z",
        description="a number of workers; write a number from 1, or auto, cpu or gpu",
    ),
]
# 1 to 65535.
_PORT = r"(?!0+\Z)([0-5]?\d{1,4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
Endpoint = Annotated[
    str,
    Meta(
        pattern=rf"^(\[[0-9a-fA-F:]+\]|[\w.-]+):{_PORT}\Z",
        description="an address of etcd; write HOST:PORT, such as etcd-0:2379",
    ),
]
Url = Annotated[
    str,
    Meta(
        pattern=r"^(s3|gs)://[^/\s]+(/\S*)?\Z",
        description="a URL in an object store; write s3://BUCKET/PREFIX or gs://...",
    ),
]


def at_least(size_bytes: float) -> Size:
    """The smallest whole number of Mi or Gi that is at least `size_bytes`."""
    gibibytes = -(-size_bytes // 2**30)
    return Size(f"{gibibytes:.0f}Gi" if size_bytes > 2**30 else f"{-(-size_bytes // 2**20):.0f}Mi")


def cores_number(text: str) -> float:
    """The number of cores: `"500m"` -> 0.5."""
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


# ---- the sections; docs/job-files.md says what each key means ----


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The number of nodes."""

    min: Count
    max: Count
    start: Count | None = None


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of one node for its agent and its workers."""

    cpu: Cores = "4"
    memory: Bytes = _16GI
    gpu: Whole = 0
    gpu_kind: str = "nvidia.com/gpu"
    shm: Bytes | None = None
    scratch: Bytes = _10GI

    @property
    def shared_memory(self) -> Size:
        """Size of /dev/shm, which is a part of the memory."""
        # What is in it counts against the memory limit of the node.
        half = Size(f"{self.memory.size_bytes // 2**21}Mi")
        return self.shm or min(Size("4Gi"), half)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The place of checkpoints; every node must be able to read and write there."""

    path: str | None = None
    url: Url | None = None
    secret: str | None = None
    claim: str | None = None
    size: Bytes = _200GI
    storage_class: str | None = None
    access: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    save_s: Seconds | None = None
    ram_budget: Bytes | None = None

    @property
    def makes_a_claim(self) -> bool:
        """Whether a PersistentVolumeClaim is created for the job."""
        return self.claim is None and self.url is None


@dataclass(frozen=True, kw_only=True)
class Etcd:
    """The etcd of the job: created for it, or the user's own."""

    members: Count = 3
    storage: Bytes = _4GI
    tls: Truth = False
    endpoints: Annotated[tuple[Endpoint, ...], ONE_OR_MORE] = ()
    user: str | None = None
    password_file: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    secret: str | None = None

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

    namespace: Name | None = None
    queue: str | None = None
    node_selector: dict[str, str] = field(default_factory=dict)
    priority_class: str | None = None
    pull_secrets: Words = ()
    pod: Tree = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Settings for Slurm only."""

    partition: str | None = None
    account: str | None = None
    time: str = "24:00:00"
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """One job."""

    name: Name
    script: Script
    args: Words = ()
    image: str = "zero-elastic:0.1.0"
    config: str | None = None
    parameters: Parameters | None = None
    nodes: Annotated[
        Nodes,
        Meta(description="a number of nodes: 4, 2:16 or {min: 2, max: 16, start: 4}"),
        Spelled(_bounds),
    ]
    processes_per_node: Workers = "1"
    threads: Count | None = None
    max_restarts: Whole = 20
    refill_after_steps: Whole | None = None
    max_restarts_without_progress: Whole | None = None
    exclude_after: Whole | None = None
    exclude_for: MoreThanNone | None = None
    grow_every: Duration | None = None
    node_unit: Count | None = None
    join_timeout: Duration | None = None
    etcd_wait: Duration | None = None
    etcd_grace: Duration | None = None
    lease_ttl: Count | None = None
    preload: str | None = None
    hang_timeout: Hang | None = None
    health_check: str | None = None
    health_check_timeout: MoreThanNone | None = None
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = None
    resources: Resources = Resources()
    checkpoint: Checkpoint = Checkpoint()
    etcd: Etcd = Etcd()
    environment: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    spot: Truth = False
    grace_s: Seconds | None = None
    kubernetes: Kubernetes = Kubernetes()
    slurm: Slurm = Slurm()

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
        """The part of the grace period in which workers drain, seconds."""
        # A sixth, and at least 4 s, is left for the end of the agent: 2 s for a pod's preStop, 2 s
        # for the agent itself.
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
    source: JobSource
    directory: Path
    """Directory of the job file; the path of the config is relative to it."""
    config: str | None
    """The text of the engine's config."""
    engine: Config = field(default_factory=dict)
    """The parsed config of the engine; empty without one."""

    @property
    def memory_limit_bytes(self) -> int | None:
        """Memory limit of a node on machines; None if the file sets none (pods have a default)."""
        named = "resources.memory" in self.source.lines
        return self.file.resources.memory.size_bytes if named else None

    @property
    def config_path(self) -> Path:
        """Path of the config on this machine."""
        return (self.directory / (self.file.config or "")).resolve()


def load(path: Path) -> Job:
    """The job in a file.

    Raises:
        JobFileError: The file or its config cannot be read, or is wrong.
    """
    file, source = reader.load(path, JobFile)
    directory = path.resolve().parent
    config, wrong = None, ""
    engine: Config = {}
    if file.config:
        try:
            config = (directory / file.config).read_text(encoding="utf-8")
            engine = _parsed(config)
        except OSError as error:
            wrong = f"{file.config} cannot be read: {error.strerror}"
        except ValueError as error:
            wrong = f"{file.config} is not a config: {error}"
        except RecursionError:
            wrong = f"{file.config} is not a config: it is nested too deeply"
    if wrong:
        raise JobFileError(source.message(reader.Problem(key="config", text=wrong)))
    return Job(file=file, source=source, directory=directory, config=config, engine=engine)


def _parsed(text: str) -> Config:
    """A config: JSON, or Hjson, which has comments. Raises ValueError: it is neither."""
    try:
        found = json.loads(text)
    except ValueError:
        try:
            found = hjson.loads(text)
        except hjson.HjsonDecodeError:
            found = None
        # Hjson reads nearly any text as a string: then the error of the JSON parser says more.
        if not isinstance(found, dict):
            raise
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def keys(cls: Any = JobFile, path: str = "") -> set[str]:
    """All keys of a job file, by path: `name`, `resources.cpu`."""
    found = set()
    for name, key in keys_of(cls).items():
        found.add(f"{path}{name}")
        if key.section is not None:
            found |= keys(key.section, f"{path}{name}.")
    return found
