"""The "checkpoint" section of the config: how and when to save, and which checkpoints to keep.

DeepSpeed's block of that name has none of these keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zero_contract.errors import ConfigError
from zero_contract.ranges import check_least

AUTO = "auto"
SecondsOrAuto = float | Literal["auto"]
WAIT, SKIP = "wait", "skip"
WARN, IGNORE, FAIL = "warn", "ignore", "fail"
MOST_REPLICAS = 2
"""Each costs every node as much memory, and every step as much traffic, as the image itself."""


@dataclass(frozen=True, kw_only=True)
class NodeMemory:
    """In-memory checkpoints between those on disk. They need zero-agent."""

    every_steps: int = 1
    """Save into memory every this many steps."""
    replicas: int = 1
    """Copies of each node's shards on other nodes, 0 to 2. Up to that many adjacent nodes can fail
    at once without falling back to disk."""
    budget_bytes: int | None = None
    """The most that they take of a node's /dev/shm. Null is half of what is free there."""

    def __post_init__(self) -> None:
        check_least("checkpoint.ram", self, {"every_steps": 1, "replicas": 0, "budget_bytes": 1})
        if self.replicas > MOST_REPLICAS:
            raise ConfigError(
                f"checkpoint.ram.replicas: {self.replicas} is more than {MOST_REPLICAS}"
            )


@dataclass(frozen=True, kw_only=True)
class KeepBest:
    """The best checkpoints by a number of the script's stay, however old they are."""

    metric: str
    """The key of that number in the `client_state` that the script saves."""
    mode: str = "min"
    """Whether a smaller ("min") or a larger ("max") number is better."""
    n: int = 1
    """How many of the best checkpoints stay."""

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ConfigError(f'checkpoint.keep_best.mode: {self.mode!r} is not "min" or "max"')
        if self.n < 1:
            raise ConfigError(f"checkpoint.keep_best.n: {self.n} is less than 1")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How and when to save, and which checkpoints to keep."""

    asynchronous: bool = False
    """Training continues while a checkpoint is being written."""
    when_busy: str = WAIT
    """Action of a save while the one before it is being written: "wait", or "skip" this save."""
    every_steps: int | None = None
    """`engine.checkpoint_due()` is true every this many steps."""
    every_s: SecondsOrAuto | None = None
    """`engine.checkpoint_due()` is true every this many seconds. "auto" finds the interval that
    loses the least time."""
    keep_last: int | None = None
    """How many of the newest checkpoints stay, at least 2. Without it all stay."""
    keep_every: int | None = None
    """With `keep_last`: checkpoints of steps that this number divides stay as well."""
    keep_best: KeepBest | None = None
    """With `keep_last`: the best of all checkpoints stay as well."""
    weight_hash: bool | None = None
    """Whether the manifest holds the hash of all weights, as `Engine.weight_hash` computes it. Null
    is: only in saves that training waits for anyway, because stage 3 gathers the weights for it."""
    ram: NodeMemory | None = None
    """In-memory checkpoints between those on disk."""
    tag_validation: str = "Warn"
    """The consequence when ranks name a checkpoint differently: "Warn", "Ignore" or "Fail"."""

    def __post_init__(self) -> None:
        if self.tag_validation.lower() not in (WARN, IGNORE, FAIL):
            raise ConfigError(
                f'checkpoint.tag_validation: {self.tag_validation!r} is not "Warn", "Ignore" or '
                '"Fail"'
            )
        if self.when_busy not in (WAIT, SKIP):
            raise ConfigError(f'checkpoint.when_busy: {self.when_busy!r} is not "wait" or "skip"')
        if self.every_steps is not None and self.every_s is not None:
            raise ConfigError("checkpoint: every_steps and every_s are both set; keep one")
        for name in ("keep_every", "keep_best"):
            if self.keep_last is None and getattr(self, name) is not None:
                raise ConfigError(f"checkpoint.{name}: only with keep_last; without it all stay")
        check_least("checkpoint", self, _AT_LEAST)


_AT_LEAST = {"every_steps": 1, "every_s": 0, "keep_last": 2, "keep_every": 1}
