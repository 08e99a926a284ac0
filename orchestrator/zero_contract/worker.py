"""The contract between an agent and its workers: names and records, nothing else.

The agent gives a worker its rank and its group through the environment that torchrun's workers
know (RANK, WORLD_SIZE, MASTER_ADDR, ...) plus the `ZERO_*` names below. Agent and worker exchange
messages over a Unix socket, one JSON object a line. A worker changes rounds by two messages:
`Leave` (stop using the process group), then `Join` (the environment of the next round). Starting a
process is one way to deliver `Join`; a worker whose `Left` says that it stays may receive the
message instead, and then keeps its imports, its CUDA context and its state. Unknown fields of a
message are ignored; an unknown kind is refused by name.
"""

from __future__ import annotations

import json
from enum import IntEnum, StrEnum
from typing import Any

import msgspec
from msgspec import Struct, to_builtins

from zero_contract import decoding
from zero_contract.errors import ZeroError

# Environment of a worker under zero-agent, beside torchrun's.
ENV_JOB = "ZERO_JOB"
ENV_NODE = "ZERO_NODE"
ENV_RUN = "ZERO_RUN"
ENV_ROUND = "ZERO_ROUND"
ENV_FENCE = "ZERO_FENCE"
ENV_STORE = "ZERO_STORE"
ENV_COMMITTED = "ZERO_COMMITTED_STEP"
ENV_COMMITTED_ROOT = "ZERO_COMMITTED_ROOT"
ENV_SOCKET = "ZERO_AGENT_SOCKET"
ENV_HEARTBEAT = "ZERO_HEARTBEAT_FILE"
ENV_VOTE_KEY = "ZERO_VOTE_KEY"
"""Key that signs what the ranks of a round write into the TCPStore, which authenticates nobody."""
ENV_LEAVE = "ZERO_LEAVE_FILE"
ENV_LAUNCHER = "ZERO_LAUNCHER"
"""Who starts, signals and ends the workers in the place of an agent, whose socket they have:
"torchrun". Of a worker that ends by itself it would charge a restart, and it reads no exit code."""


class ExitCode(IntEnum):
    """What the end of a worker means to its agent. Anything else non-zero is a failure."""

    OK = 0
    PEER_LOST = 75
    """A healthy worker lost its process group: a symptom, whose cause is on another node."""
    LEFT = 76
    """The worker saved and exited because it was asked to leave."""


class Ability(StrEnum):
    """What a worker supports beyond being killed, announced in its `Hello`."""

    BOUNDARY = "boundary"
    """The worker can leave at the next step boundary with a fresh checkpoint."""
    REJOIN = "rejoin"
    """The worker may wait in its process for the next round when a peer is lost."""


class When(StrEnum):
    """How soon a worker must leave its process group."""

    NOW = "now"
    BOUNDARY = "boundary"
    LOST = "lost"
    """At once, because the round has lost a worker; whoever can waits for a `Join`."""


class ContractError(ZeroError):
    """A line on the socket that is not a message of this contract."""


class _Message(Struct, frozen=True, tag_field="kind", tag=str.lower):
    """One line of JSON, whose "kind" is the name of the class in small letters."""


# ---- agent -> worker ----


class Leave(_Message, frozen=True, kw_only=True):
    """Stop using the process group of `round`."""

    round: int
    when: When
    reason: str
    within_s: float = 0.0
    """Seconds until the agent stops the worker, a last save included. 0: unknown."""


class Join(_Message, frozen=True, kw_only=True):
    """Form the process group of `round` with this environment."""

    round: int
    env: dict[str, str]


class CommitReply(_Message, frozen=True, kw_only=True):
    """The answer to `CommitRequest` number `request`; `reason` is why it was not granted."""

    request: int
    granted: bool
    reason: str
    passing: bool = False
    """The refusal is temporary: etcd does not accept writes, and the agent retries."""


class PeerMemoryReply(_Message, frozen=True, kw_only=True):
    """The answer to `PeerMemoryRequest` number `request`; `reason`: why there is no directory."""

    request: int
    directory: str = ""
    """Directory on a tmpfs of this node; the agent owns it, and it outlives the workers."""
    address: str = ""
    """Address at which the agent serves the directory, `host:port`; see `peer_memory`."""
    key: str = ""
    """Key to peer memory, the same at every agent of the job."""
    budget_bytes: int = 0
    """Most bytes that the directory may hold."""
    reason: str = ""


class WaitRequest(_Message, frozen=True, kw_only=True):
    """Asks what the worker waits for; the answer is a `WaitReply` with the same number."""

    request: int


# ---- worker -> agent ----


class Hello(_Message, frozen=True, kw_only=True):
    """The first message of a worker."""

    rank: int
    pid: int
    can: tuple[str, ...] = ()
    round: int = 0
    """The round for which the worker was started."""


class Progress(_Message, frozen=True, kw_only=True):
    """An optimizer step has ended: the worker's heartbeat, and what a status page shows.

    In a process with several engines, `step` is the step of the engine that is furthest.
    """

    step: int
    samples: int = 0
    """Samples consumed by committed steps since the run began."""
    loss: float | None = None
    gradient_norm: float | None = None
    """Norm of the gradient before clipping."""
    loss_scale: float | None = None
    """Loss scale of fp16 training; None in other training."""
    tokens: int = 0
    """Tokens of committed steps since the run began, as the script counts them; 0: it does not."""
    total_steps: int = 0
    """Steps of the whole job; 0: the script does not say, and has no schedule that does."""
    reduction: str = ""
    """How gradients are summed, if not in the fixed order: "native", by the backend."""
    saving_s: float = 0.0
    """Seconds for which saves have blocked training since the last message of this kind."""
    compute_s: float = 0.0
    """Seconds in which this rank computed, since the last message of this kind."""
    wait_s: float = 0.0
    """Seconds in which this rank waited for other ranks, since the last message of this kind."""


SLOW_FACTOR = 1.25
"""A rank is slow in a step that it computes at least so many times as long as half of the ranks."""


class RankTimes(_Message, frozen=True, kw_only=True):
    """Of rank 0: how long each rank has computed and waited since the round's first step."""

    step: int
    """The last step that is counted."""
    steps: int
    """The number of steps that are counted."""
    compute_s: tuple[float, ...]
    """By rank; without saves."""
    wait_s: tuple[float, ...]
    """By rank: waits for other ranks."""
    slow_steps: tuple[int, ...]
    """By rank: the number of steps in which it was slow, as `SLOW_FACTOR` says."""
    write_bytes_per_s: tuple[float, ...] = ()
    """By rank: the rate at which it has written its part of the last checkpoint; 0: of none."""
    write_s: tuple[float, ...] = ()
    """By rank: the seconds of that write."""


class Saved(_Message, frozen=True, kw_only=True):
    """A save of this worker has ended."""

    step: int
    committed: bool
    in_memory: bool = False
    """Whether it was an in-memory checkpoint, rather than one on disk."""
    size_bytes: int = 0
    """This rank's part."""
    write_s: float = 0.0
    """Seconds of its write; in memory, of its seal, its digests and its copies on other nodes."""
    total_s: float = 0.0
    """Seconds from the beginning of the save to its end, in the background of training."""
    began_s: float = 0.0
    """When it began: the wall clock, seconds since the epoch."""
    stall_s: float = 0.0
    """Seconds for which training waited, from the beginning."""
    written_s: float = 0.0
    """Seconds from the beginning to the end of the write."""
    publish_s: float = 0.0
    """On rank 0, seconds in which it checked the parts of all ranks and published the whole."""
    published_s: float = 0.0
    """Seconds from the beginning to the end of that."""
    whole_bytes: int = 0
    """On rank 0, the parts of all ranks."""
    problem: str = ""
    """Why it was not committed."""


class SaveWaits(_Message, frozen=True, kw_only=True):
    """A save that a script must not end without has failed, and this worker waits to repeat it."""

    step: int
    what: str
    """What it waits for, such as room."""
    left_s: float
    """For how long at most."""


class CommitRequest(_Message, frozen=True, kw_only=True):
    """Asks whether the checkpoint of `step` may be published, before its manifest is renamed."""

    request: int
    step: int
    tag: str
    digest: str
    samples: int
    in_memory: bool = False
    """Whether it is an in-memory checkpoint, rather than one on disk."""
    patience_s: float = 0.0
    """Seconds for which the worker repeats the request while etcd is unavailable."""
    round: int = 0
    """The worker's round: only the fence of that round counts. 0: the worker does not say."""
    written: str = ""
    """Where its files are, if the script ends with it and waits for etcd."""
    root: str = ""
    """What the job resumes from, on disk, if a checkpoint is there with this one."""


class PeerMemoryRequest(_Message, frozen=True, kw_only=True):
    """Asks for a directory for in-memory checkpoints."""

    request: int
    budget_bytes: int | None = None
    """Most bytes that the node may give; None: the agent chooses."""


class WaitReply(_Message, frozen=True, kw_only=True):
    """What the worker waits for, in answer to `WaitRequest` number `request`."""

    request: int
    awaits: str = ""
    """The name of the exchange that it waits for; empty: it does not wait, or a GPU does."""
    turn: int = 0
    """The number of earlier exchanges of that name."""
    waited_s: float = 0.0
    begun: int = 0
    """The number of exchanges that it has begun."""
    last: str = ""
    """The name of the exchange that it has begun last."""
    collectives: tuple[dict[str, Any], ...] = ()
    """The last collectives that torch has recorded, as `zero_comm.worker.agent_link.recorded`."""


class Left(_Message, frozen=True, kw_only=True):
    """The worker no longer uses the process group of `round`; `step` is saved."""

    round: int
    step: int
    stays: bool = False
    """Whether the worker waits for a `Join`, and exits when it gets `Leave` or loses its agent."""
    lost: str = ""
    """How it lost a peer, in the middle of the step after `step`; empty: it left at a boundary."""
    notice: bool = False
    """Whether this worker itself heard a signal or a notice of its machine, without an agent."""


class Restored(_Message, frozen=True, kw_only=True):
    """All ranks have loaded the checkpoint of `step`, and what they read has its digests."""

    step: int
    tag: str
    in_memory: bool = False
    """Whether it was an in-memory checkpoint, rather than one on disk."""
    load_s: float = 0.0
    """Seconds from the beginning of the load to its end."""
    read_bytes: int = 0
    """Bytes that rank 0 has read, and verified."""


BEFORE_FIRST_STEP = "first step: it may compile and warm up"
"""Told of a worker that has an engine and its state, until its first step ends."""


class Preparing(_Message, frozen=True, kw_only=True):
    """What the worker does before its first step of a round."""

    what: str
    part: float | None = None
    """The part of it that is done, 0 to 1; None: not known."""


Message = (
    Leave
    | Join
    | CommitReply
    | PeerMemoryReply
    | WaitRequest
    | Hello
    | Progress
    | RankTimes
    | Saved
    | CommitRequest
    | PeerMemoryRequest
    | WaitReply
    | Left
    | Restored
    | Preparing
    | SaveWaits
)


_MESSAGES = msgspec.json.Decoder[Message](Message)


def encode(message: Message) -> bytes:
    """One line of JSON, ending in a newline."""
    # By Python's JSON: msgspec's own would write null for a loss that is NaN.
    return json.dumps(to_builtins(message), separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message that one line of JSON encodes.

    Raises:
        ContractError: The line is not JSON, its kind is unknown, or a field is missing or of
            another type.
    """
    try:
        message: Message = _MESSAGES.decode(line)
        return message
    except msgspec.DecodeError:  # of NaN as well, which only Python's JSON knows
        return decoding.decode(Message, line, "not a message of the worker contract", ContractError)
