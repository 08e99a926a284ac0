"""The "checkpoint" section of the config: how and when to save, and which checkpoints to keep.

DeepSpeed's block of that name has none of these keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from zero_contract.errors import ConfigError
from zero_contract.sections import MOST, Count, Number

AUTO = "auto"
SKIP = "skip"
IGNORE, FAIL = "ignore", "fail"


@dataclass(frozen=True, kw_only=True)
class NodeMemory:
    """In-memory checkpoints between those on disk. They need zero-agent."""

    every_steps: Count = 1
    """Save into memory every this many steps."""
    # Each costs every node as much memory, and every step as much traffic, as the image itself.
    replicas: Annotated[int, Meta(ge=0, le=2)] = 1
    """Copies of each node's shards on other nodes, 0 to 2. Up to that many adjacent nodes can fail
    at once without falling back to disk."""
    budget_bytes: Count | None = None
    """The most that they take of a node's /dev/shm. Null is half of what is free there."""


@dataclass(frozen=True, kw_only=True)
class KeepBest:
    """The best checkpoints by a number of the script's stay, however old they are."""

    metric: str
    """The key of that number in the `client_state` that the script saves."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller ("min") or a larger ("max") number is better."""
    n: Count = 1
    """How many of the best checkpoints stay."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How and when to save, and which checkpoints to keep."""

    asynchronous: bool = False
    """Training continues while a checkpoint is being written."""
    when_busy: Literal["wait", "skip"] = "wait"
    """Action of a save while the one before it is being written: "wait", or "skip" this save."""
    every_steps: Count | None = None
    """`engine.checkpoint_due()` is true every this many steps."""
    every_s: Number | Literal["auto"] | None = None
    """`engine.checkpoint_due()` is true every this many seconds. "auto" finds the interval that
    loses the least time."""
    keep_last: Annotated[int, Meta(ge=2, le=MOST)] | None = None
    """How many of the newest checkpoints stay, at least 2. Without it all stay."""
    keep_every: Count | None = None
    """With `keep_last`: checkpoints of steps that this number divides stay as well."""
    keep_best: KeepBest | None = None
    """With `keep_last`: the best of all checkpoints stay as well."""
    weight_hash: bool | None = None
    """Whether the manifest holds the hash of all weights, as `Engine.weight_hash` computes it. Null
    is: only in saves that training waits for anyway, because stage 3 gathers the weights for it."""
    ram: NodeMemory | None = None
    """In-memory checkpoints between those on disk."""
    tag_validation: Annotated[
        str, Meta(pattern="(?i)^(warn|ignore|fail)$", description='"Warn", "Ignore" or "Fail"')
    ] = "Warn"
    """The consequence when ranks name a checkpoint differently: "Warn", "Ignore" or "Fail"."""

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_s is not None:
            raise ConfigError("checkpoint: every_steps and every_s are both set; keep one")
        for name in ("keep_every", "keep_best"):
            if self.keep_last is None and getattr(self, name) is not None:
                raise ConfigError(f"checkpoint.{name}: only with keep_last; without it all stay")
