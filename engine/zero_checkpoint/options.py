"""The "checkpoint" section: how and when to save, and what to keep.

DeepSpeed's block of that name has none of these keys. `persistence` reads it.
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
class Ram:
    """Checkpoints in the memory of the nodes, between those on disk; needs zero-agent."""

    every_steps: int = 1
    """Every so many steps."""
    replicas: int = 1
    """Other nodes that keep a copy of each node's share: so many neighbours may be lost at once."""
    budget_bytes: int | None = None
    """What they may take of a node's /dev/shm; None: half of what is free there."""

    def __post_init__(self) -> None:
        check_least("checkpoint.ram", self, {"every_steps": 1, "replicas": 0, "budget_bytes": 1})
        if self.replicas > MOST_REPLICAS:
            raise ConfigError(
                f"checkpoint.ram.replicas: {self.replicas} is more than {MOST_REPLICAS}"
            )


@dataclass(frozen=True, kw_only=True)
class KeepBest:
    """Which checkpoints stay for what they are worth."""

    metric: str
    """A number that the script gives in `client_state` when it saves."""
    mode: str = "min"
    """Which is better: "min" or "max"."""
    n: int = 1
    """How many stay."""

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ConfigError(f'checkpoint.keep_best.mode: {self.mode!r} is not "min" or "max"')
        if self.n < 1:
            raise ConfigError(f"checkpoint.keep_best.n: {self.n} is less than 1")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How and when to save, and what to keep."""

    asynchronous: bool = False
    """Written "async": train on while a save is being written."""
    when_busy: str = WAIT
    """What a save does while the one before is being written: "wait" or "skip"."""
    every_steps: int | None = None
    """When `checkpoint_due()` says so: every so many steps,"""
    every_s: SecondsOrAuto | None = None
    """or every so many seconds, or as often as "auto" finds right."""
    keep_last: int | None = None
    """How many of the newest stay, at least 2; None: all."""
    keep_every: int | None = None
    """With `keep_last`: those of steps that this divides stay as well."""
    keep_best: KeepBest | None = None
    """With `keep_last`: the best of all stay as well."""
    weight_hash: bool | None = None
    """Whether the manifest holds the hash of all weights, as `Engine.weight_hash` computes it. At
    stage 3 they are gathered for that; so None means: in saves that training waits for anyway."""
    ram: Ram | None = None
    """Checkpoints in memory; None: none."""
    tag_validation: str = "Warn"
    """What happens when ranks name a checkpoint differently: "Warn", "Ignore" or "Fail"."""

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
