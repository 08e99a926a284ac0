"""The contract between an agent and its workers: names and records, nothing else.

The agent gives a worker its place in the world through the environment that torchrun's
workers know (RANK, WORLD_SIZE, MASTER_ADDR, ...) plus the `ZERO_*` names below, and talks to
it over a Unix socket, one JSON object a line. A round reaches a worker as a *message*:
`Leave` (the group is going away), then `Join` (here is the environment of the next round).
Starting a process is one way to deliver `Join`; a worker whose `Hello` says it can rejoin in
place may be sent it instead, and then keeps its imports, its CUDA context and its state.

Must always hold: a message is understood by a reader that knows fewer fields (unknown fields
are ignored) and refused by name when its kind is unknown. No pickle crosses the socket.

Who calls it: `zero_agent.workers.channel` writes and reads one end, `zero_comm.agent_link` the
other.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
from enum import IntEnum, StrEnum
from typing import get_args

# Environment of a worker under zero-agent, beside torchrun's.
ENV_JOB = "ZERO_JOB"
ENV_NODE = "ZERO_NODE"
ENV_ROUND = "ZERO_ROUND"
ENV_FENCE = "ZERO_FENCE"
ENV_COMMITTED = "ZERO_COMMITTED_STEP"
ENV_SOCKET = "ZERO_AGENT_SOCKET"
ENV_HEARTBEAT = "ZERO_HEARTBEAT_FILE"
ENV_VOTE_KEY = "ZERO_VOTE_KEY"
"""Signs what the ranks of this round write into its store: anybody can connect to that."""
ENV_LEAVE = "ZERO_LEAVE_FILE"


def derived_key(secret: str, purpose: str) -> str:
    """A key that opens one thing alone, and tells nothing of the secret."""
    return hmac.new(secret.encode(), purpose.encode(), "sha256").hexdigest()


class ExitCode(IntEnum):
    """What the end of a worker means to its agent. Anything else non-zero is a failure."""

    OK = 0
    PEER_LOST = 75
    """The group broke under a healthy worker: a symptom, whose cause is on another node."""
    LEFT = 76
    """The worker has saved and stopped because it was asked to leave."""


class Ability(StrEnum):
    """What a worker can do beyond being killed, announced in its `Hello`."""

    BOUNDARY = "boundary"
    """Leave at the next step boundary with a fresh checkpoint."""
    REJOIN = "rejoin"
    """Join the next round in the same process."""


class When(StrEnum):
    """How soon a worker is to leave its group."""

    NOW = "now"
    BOUNDARY = "boundary"


class ContractError(Exception):
    """A line on the socket that is not a message of this contract."""


# ---- agent -> worker ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leave:
    """Stop using the process group of `round`."""

    round: int
    when: When
    reason: str
    within_s: float = 0.0
    """How long that may take, a last save included: then the worker is stopped. 0: unknown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Join:
    """Form the process group of `round` with this environment."""

    round: int
    env: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitReply:
    """The answer to `CommitRequest` `request`; `reason` says why when it is not granted."""

    request: int
    granted: bool
    reason: str
    passing: bool = False
    """Not granted for now: etcd does not take it, and the agent sees to that."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerMemoryReply:
    """The answer to `PeerMemoryRequest` `request`; without a directory, `reason` says why."""

    request: int
    directory: str = ""
    """On a tmpfs of this node; belongs to the agent and outlives its workers."""
    address: str = ""
    """Where the agent serves it, `host:port`; see `peer_memory`."""
    key: str = ""
    """Opens that, here and at every other agent of the job."""
    budget_bytes: int = 0
    """What may lie in the directory."""
    reason: str = ""


# ---- worker -> agent ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """The first message of a worker."""

    rank: int
    pid: int
    can: tuple[str, ...] = ()
    round: int = 0
    """The round that it was started for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """An optimizer step has ended: the heartbeat, and what a status page shows.

    Of a process with several engines it is the step of the one that is furthest.
    """

    step: int
    samples: int = 0
    """Samples consumed by committed steps since the run began."""
    loss: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitRequest:
    """May the checkpoint of `step` be published? Asked before its manifest is renamed."""

    request: int
    step: int
    tag: str
    digest: str
    samples: int
    in_memory: bool = False
    """It is one in the memory of the nodes, not on disk."""
    patience_s: float = 0.0
    """While etcd is away it may be asked again for so long."""
    round: int = 0
    """The asking worker's: only that round's fence answers. 0: from a worker that does not say."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerMemoryRequest:
    """Where may this worker keep checkpoints in memory?"""

    request: int
    budget_bytes: int | None = None
    """How much the node may give for it; None: as the agent finds right."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Left:
    """The group of `round` is not used any more; `step` is saved."""

    round: int
    step: int


Message = (
    Leave
    | Join
    | CommitReply
    | PeerMemoryReply
    | Hello
    | Progress
    | CommitRequest
    | PeerMemoryRequest
    | Left
)

_KINDS: dict[str, type[Message]] = {kind.__name__.lower(): kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """One line of JSON, ending in a newline."""
    record = {"kind": type(message).__name__.lower(), **dataclasses.asdict(message)}
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in one line.

    Raises:
        ContractError: The line is not JSON, of no known kind, or lacks a field.
    """
    try:
        record = json.loads(line)
        kind = _KINDS[record.pop("kind")]
        known = {f.name for f in dataclasses.fields(kind)}
        values = {name: value for name, value in record.items() if name in known}
        if kind is Leave:
            values["when"] = When(values["when"])
        if kind is Hello:
            values["can"] = tuple(values.get("can", ()))
        return kind(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ContractError(f"not a message of the worker contract: {line[:200]!r}") from error
