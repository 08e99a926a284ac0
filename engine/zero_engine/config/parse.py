"""From a dict to a `Config`: converts the values, and names what is wrong.

Must always hold: an unknown key is an error that names the nearest known key, and is never ignored;
a key without effect is logged once; a key that enables a missing feature is an error.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zero_contract.errors import ConfigError
from zero_contract.ranges import check_range
from zero_engine.config import keys
from zero_engine.config.elasticity import choose_batch
from zero_engine.config.nearest import unknown_key
from zero_engine.config.reading import read_json
from zero_engine.config.schema import SECTIONS, Config

_log = logging.getLogger(__name__)

AUTO = "auto"


def load_config(source: Mapping[str, Any] | str | Path) -> Config:
    """The configuration from a dict, a JSON string (also in base64) or the path of a JSON file.

    A value of "auto" takes the default. Whole floats are accepted as integers (2e8), and numbers
    in quotes as numbers.

    Raises:
        ConfigError: The config cannot be read, a key is unknown or repeated, or a value is wrong.
    """
    data = source if isinstance(source, Mapping) else read_json(source)
    config: Config = _parse(Config, data, "")
    if config.elasticity.enabled:
        sizes = (config.train_batch_size, config.train_micro_batch_size_per_gpu)
        given = any(size is not None for size in (*sizes, config.gradient_accumulation_steps))
        if given and not config.elasticity.ignore_non_elastic_batch_info:
            raise ConfigError(
                "elasticity decides the batch: remove train_batch_size, "
                "train_micro_batch_size_per_gpu and gradient_accumulation_steps, or set "
                "elasticity.ignore_non_elastic_batch_info"
            )
        chosen = choose_batch(config.elasticity)
        config = dataclasses.replace(
            config,
            train_batch_size=chosen.samples,
            train_micro_batch_size_per_gpu=chosen.micro_batch,
            gradient_accumulation_steps=None,
        )
    if inert := without_effect(data):
        _log.info(
            "config keys without effect here: %s; python -m zero_engine FILE shows why",
            ", ".join(inert),
        )
    return config


def without_effect(data: Mapping[str, Any]) -> dict[str, str]:
    """The keys of a config that have no effect, by path, with the reason."""
    return {
        path: keys.WITHOUT_EFFECT[path]
        for path in sorted(_paths(data, ""))
        if path in keys.WITHOUT_EFFECT
    }


def _paths(data: Mapping[str, Any], parent: str) -> list[str]:
    found = []
    for written, value in data.items():
        path = _join(parent, _canonical(parent, written))
        found.append(path)
        if isinstance(value, Mapping) and path not in keys.WITHOUT_EFFECT:
            found += _paths(value, path)
    return found


# ---- one level ----


def _parse(cls: type[Any], data: Mapping[str, Any], path: str) -> Any:
    """One level of the config as an instance of `cls`; `path` is "" at the top."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for written, value in data.items():
        key = _canonical(path, written)
        if key in fields:
            if key in values:
                raise ConfigError(f"{_join(path, written)}: {key} is given twice; keep one")
            if value != AUTO or "Auto" in str(fields[key].type):
                values[key] = _coerce(str(fields[key].type), value, _join(path, key))
        else:
            _check_other(path, written, value, set(fields))
    missing = [
        f.name
        for f in fields.values()
        if f.name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{_join(path, missing[0])}: missing")
    return cls(**values)


def _check_other(path: str, key: str, value: Any, fields: set[str]) -> None:
    """Check a key that is no field: without effect, a missing feature that is off, or an error."""
    where = _join(path, key)
    if key.startswith(keys.COMMENT):
        return
    section, _, inner = key.partition(".")
    if inner and not path and section in fields:
        # Some libraries add such keys to a config that they have read: DeepSpeed does not see them.
        _log.warning("%s: not read; in a config, %r stands in the section %r", key, inner, section)
        return
    if where in keys.MISSING:
        feature = keys.MISSING[where]
        if value not in (AUTO, None) and feature.asks(value):
            raise ConfigError(f"{where}: not supported: {feature.why}")
    elif where not in keys.WITHOUT_EFFECT:
        raise _unknown(path, key, fields)
    elif where in keys.INSIDE and isinstance(value, Mapping):
        for inner in value.keys() - keys.INSIDE[where]:
            raise _unknown(where, inner, set(keys.INSIDE[where]))
        for inner in value:
            _check_inert_number(_join(where, inner), value[inner])
    else:
        _check_inert_number(where, value)


def _check_inert_number(where: str, value: Any) -> None:
    """Check the range of a number in a key without effect: a typo is still an error."""
    if where in keys.INERT_NUMBERS and value not in (None, AUTO):
        check_range(where, value, keys.INERT_NUMBERS[where])


def _canonical(path: str, key: str) -> str:
    return keys.ALIASES.get(_join(path, key), key)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _unknown(path: str, key: str, fields: set[str]) -> ConfigError:
    prefix = f"{path}." if path else ""
    others = {*keys.MISSING, *keys.WITHOUT_EFFECT}
    here = {name.removeprefix(prefix) for name in others if name.startswith(prefix)}
    here = {name for name in here if "." not in name}
    return unknown_key(_join(path, key), fields | here, listed=fields or here)


# ---- one value ----


def _number(value: Any) -> int | float:
    if isinstance(value, str):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise TypeError  # NaN would pass every comparison that checks a range
    return value


def _as_int(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise TypeError
    return int(number)


def _as_bool(value: Any) -> bool:
    spelled = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    return bool(_exactly(bool)(spelled))


def _exactly(cls: type[Any]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, cls):
            raise TypeError
        return value

    return check


def _each(convert: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: tuple(convert(each) for each in _exactly(list)(value))


_SIGNED = (-(1 << 63), (1 << 63) - 1)

_BITS: Mapping[str, tuple[int, int]] = {
    "int": _SIGNED,
    "Interval": _SIGNED,
    "tuple[int, ...]": _SIGNED,
    "Seed": (0, (1 << 64) - 1),
}
"""A field's annotation -> the smallest and the largest integer that it holds.

Sizes and counts become indices of tensors and records in checkpoints, of 64 bits with a sign. A
seed is hashed as 64 bits without one: -1 would be the same run as 2**64 - 1, not a random one.
"""


_COERCE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "int": ("an integer", _as_int),
    "Seed": ("an integer", _as_int),
    "Interval": ("an integer", lambda value: None if value == math.inf else _as_int(value)),
    "float": ("a number", lambda value: float(_number(value))),
    "SecondsOrAuto": (
        'a number or "auto"',
        lambda value: AUTO if value == AUTO else float(_number(value)),
    ),
    "bool": ("true or false", _as_bool),
    "str": ("a string", _exactly(str)),
    "tuple[str, ...]": ("a list of strings", _each(_exactly(str))),
    "tuple[int, ...]": ("a list of integers", _each(_as_int)),
    "dict[str, Any]": ("an object", lambda value: dict(_exactly(Mapping)(value))),
}


_OFFLOAD = ("OffloadOptimizer", "OffloadParam")


def _coerce(annotation: str, value: Any, where: str) -> Any:
    """`value` as the type that a field's annotation names."""
    wanted = annotation.removesuffix(" | None")
    if value is None and wanted != annotation:
        return None
    if wanted == "ZeroOptimization" and isinstance(value, bool):
        value = {"stage": int(value)}  # DeepSpeed: true means stage 1
    if wanted in _OFFLOAD and isinstance(value, bool):
        value = {"device": "cpu" if value else "none"}  # DeepSpeed's older "cpu_offload"
    if wanted in SECTIONS:
        section = SECTIONS[wanted]
        if not isinstance(value, Mapping):
            key = {str: "type", bool: "enabled"}.get(type(value))
            known = key in {field.name for field in dataclasses.fields(section)}
            hint = f"; write {json.dumps({key: value})}" if known else ""
            raise ConfigError(f"{where}: {value!r} is not an object{hint}")
        return _parse(section, value, where)
    name, convert = _COERCE[wanted]
    try:
        made = convert(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where}: {value!r} is not {name}") from None
    if wanted in _BITS and made is not None:
        least, most = _BITS[wanted]
        for number in made if isinstance(made, tuple) else (made,):
            if not least <= number <= most:
                raise ConfigError(f"{where}: {number} is not from {least} to {most} (64 bits)")
    return made
