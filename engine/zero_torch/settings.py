"""The `config` of `protect`: the sections "elastic" and "checkpoint" of the engine's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_checkpoint.options import Checkpoint, KeepBest, NodeMemory
from zero_comm.determinism import check as check_deterministic
from zero_comm.reduction_order import check_block
from zero_contract.sections import Parser

Seed = int  # from 0, of 64 bits


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """What the bits of a run depend on, beside its script."""

    seed: Seed = 42
    """The seed of the order of samples, of augmentation and of dropout."""
    reduction_block: int | None = None
    """Micro-batches that are summed in a tree, a power of two. None is 8 in a new run, and what it
    was in one that is resumed."""
    sample_ledger: str | None = None
    """Directory for the record of consumed sample ids. Without it no record is kept."""
    deterministic: str | None = None
    """Whether kernels must repeat themselves and hardware must stay the same: "error", "warn" or
    "off", see docs/determinism.md. None is "warn" with a loader, and "off" without one."""

    def __post_init__(self) -> None:
        check_block(self.reduction_block)
        check_deterministic(self.deterministic)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All sections."""

    elastic: Elastic = field(default_factory=Elastic)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


_PARSER = Parser(
    sections={each.__name__: each for each in (Elastic, Checkpoint, KeepBest, NodeMemory)},
    aliases={"checkpoint.async": "asynchronous"},
)


def read(config: Mapping[str, Any]) -> Settings:
    """The settings from a dict.

    Raises:
        ConfigError: A key is unknown, or a value is wrong; names it.
    """
    settings: Settings = _PARSER.parse(Settings, config)
    return settings
