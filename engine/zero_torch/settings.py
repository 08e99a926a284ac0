"""The `config` of `protect`: the sections "elastic" and "checkpoint" of the engine's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from zero_checkpoint.options import Checkpoint, KeepBest, NodeMemory
from zero_contract.errors import ConfigError
from zero_contract.values import nearest

_RENAMED = {"async": "asynchronous"}
"""Keys that Python reserves -> their fields."""
_WITHIN = {("checkpoint", "keep_best"): KeepBest, ("checkpoint", "ram"): NodeMemory}


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """What the bits of a run depend on, beside its script."""

    seed: int = 42
    """The seed of the order of samples, of augmentation and of dropout."""
    reduction_block: int | None = None
    """Micro-batches that are summed in a tree, a power of two. None is 8 in a new run, and what it
    was in one that is resumed."""
    sample_ledger: str | None = None
    """Directory for the record of consumed sample ids. Without it no record is kept."""

    def __post_init__(self) -> None:
        block = self.reduction_block
        if block is not None and (block < 1 or block & (block - 1)):
            raise ConfigError(f"elastic.reduction_block is {block}, which is no power of two")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All sections."""

    elastic: Elastic = field(default_factory=Elastic)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


def read(config: Mapping[str, Any]) -> Settings:
    """The settings from a dict.

    Raises:
        ConfigError: A key is unknown, or a value is wrong; names it.
    """
    _check_known(config, {"elastic", "checkpoint"}, "")
    return Settings(
        elastic=_section(Elastic, config.get("elastic", {}), ("elastic",)),
        checkpoint=_section(Checkpoint, config.get("checkpoint", {}), ("checkpoint",)),
    )


def _section(kind: type[Any], values: Any, path: tuple[str, ...]) -> Any:
    name = ".".join(path)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} is a {type(values).__name__}; it must be a dict of keys")
    back = {field: key for key, field in _RENAMED.items()}
    _check_known(values, {back.get(f.name, f.name) for f in fields(kind)}, f"{name}.")
    arguments: dict[str, Any] = {}
    for key, given in values.items():
        within = _WITHIN.get((*path, key))
        value = given
        if within is not None and given is not None:
            value = _section(within, given, (*path, key))
        arguments[str(_RENAMED.get(key, key))] = value
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}") from None


def _check_known(values: Mapping[str, Any], known: set[str], prefix: str) -> None:
    for key in values:
        if key not in known:
            meant = nearest(key, known)
            hint = f"; did you mean {prefix}{meant}?" if meant else f"; known: {sorted(known)}"
            raise ConfigError(f"unknown config key {prefix}{key}{hint}")
