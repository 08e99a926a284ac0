"""The `config` of `protect`: the sections "elastic" and "checkpoint" of the engine's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_checkpoint.options import Checkpoint
from zero_contract.sections import Decoder, Seed
from zero_step import options


@dataclass(frozen=True, kw_only=True)
class Elastic(options.Elastic):
    """The settings that the bits of a run depend on, beside its script."""

    seed: Seed = 42
    """The seed of the order of samples, of augmentation and of dropout."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All sections."""

    elastic: Elastic = field(default_factory=Elastic)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


_DECODER = Decoder(aliases={"checkpoint.async": "asynchronous"})


def read(config: Mapping[str, Any]) -> Settings:
    """The settings from a dict.

    Raises:
        ConfigError: A key is unknown, or a value is wrong; names it.
    """
    settings: Settings = _DECODER.decode(Settings, config)
    return settings
