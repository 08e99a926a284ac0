"""From a dict to a `Config`: converts the values, and names what is wrong.

Must always hold: an unknown key is an error that names the nearest known key, and is never ignored;
a key without effect is logged once; a key that enables a missing feature is an error.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_contract.errors import ConfigError
from zero_contract.sections import AUTO, Decoder, Problem, Wrong, converted, join, unknown_key
from zero_engine.config import keys
from zero_engine.config.elasticity import choose_batch
from zero_engine.config.reading import read_json
from zero_engine.config.refusals import check
from zero_engine.config.schema import Config

_log = logging.getLogger(__name__)


def load_config(source: Mapping[str, Any] | str | Path) -> Config:
    """The configuration from a dict, a JSON string (also in base64) or the path of a JSON file.

    A value of "auto" takes the default. Whole floats are accepted as integers (2e8), and numbers
    in quotes as numbers.

    Raises:
        ConfigError: The config cannot be read, a key is unknown or repeated, or a value is wrong.
    """
    data = source if isinstance(source, Mapping) else read_json(source)
    config: Config = _DECODER.decode(Config, data)
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
    check(config)
    # In one line: a config made for DeepSpeed has many of them.
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
        path = join(parent, _DECODER.canonical(parent, written))
        found.append(path)
        if isinstance(value, Mapping) and path not in keys.WITHOUT_EFFECT:
            found += _paths(value, path)
    return found


def _others(path: str, key: str, value: Any, fields: Collection[str]) -> Iterator[Problem]:
    """Problems of a key that is no field: it is without effect, or of a missing feature."""
    where = join(path, key)
    if key.startswith(keys.COMMENT):
        return
    section, _, inner = key.partition(".")
    if inner and not path and section in fields:
        # Some libraries add such keys to a config that they have read: DeepSpeed does not see them.
        _log.warning("%s: not read; in a config, %r stands in the section %r", key, inner, section)
    elif where in keys.MISSING:
        feature = keys.MISSING[where]
        if value not in (AUTO, None) and feature.asks(value):
            yield where, f"not supported: {feature.why}"
    elif where not in keys.WITHOUT_EFFECT:
        prefix = f"{path}." if path else ""
        others = {*keys.MISSING, *keys.WITHOUT_EFFECT}
        here = {name.removeprefix(prefix) for name in others if name.startswith(prefix)}
        here = {name for name in here if "." not in name}
        yield unknown_key(where, {*fields} | here, listed=fields or here)
    else:
        # A typo is an error all the same: its author believes that the key has an effect.
        inside = value if where in keys.INSIDE and isinstance(value, Mapping) else {}
        for name in inside.keys() - keys.INSIDE.get(where, set()):
            yield unknown_key(join(where, name), keys.INSIDE[where])
        for at, number in {
            where: value,
            **{join(where, one): inside[one] for one in inside},
        }.items():
            if at in keys.INERT_NUMBERS and number not in (None, AUTO):
                try:
                    converted(number, keys.INERT_NUMBERS[at])
                except Wrong as wrong:
                    yield at, str(wrong)


_DECODER = Decoder(aliases=keys.ALIASES, unknown=_others)
