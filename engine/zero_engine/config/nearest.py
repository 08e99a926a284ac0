"""Errors for unknown config keys, with the nearest known key, and checks of free params."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from zero_contract.errors import ConfigError
from zero_contract.values import nearest

_TYPES = re.compile(r"\b(int|float|bool|str|None|Optional|[tT]uple|Sequence)\b")


def unknown_key(
    where: str, known: Collection[str], *, listed: Collection[str] | None = None
) -> ConfigError:
    """The error for an unknown key.

    Args:
        where: The whole path of the key.
        known: The keys that are possible in its place.
        listed: The keys to list if none is near; by default all.
    """
    near = nearest(where.rpartition(".")[2], known)
    names = ", ".join(sorted(known if listed is None else listed))
    hint = f"; did you mean {near!r}?" if near else f"; known: {names}"
    return ConfigError(f"{where}: unknown config key{hint}")


def check_params(where: str, make: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert params to the arguments of `make` after its first; numbers in quotes are numbers.

    Raises:
        ConfigError: A param is unknown, missing or of another type.
    """
    _, *arguments = inspect.signature(make).parameters.values()
    known = {argument.name for argument in arguments}
    for name in params:
        if name not in known:
            raise unknown_key(f"{where}.{name}", known)
    for argument in arguments:
        if argument.default is inspect.Parameter.empty and argument.name not in params:
            raise ConfigError(f'{where}.{argument.name}: missing, or "auto": give a value')
    return {
        argument.name: _as_argument(f"{where}.{argument.name}", params[argument.name], argument)
        for argument in arguments
        if argument.name in params
    }


def unquoted(value: Any) -> Any:
    """The number or boolean in a string, such as YAML's 1e-4; any other value unchanged."""
    if isinstance(value, list | tuple):
        return type(value)(unquoted(each) for each in value)
    if not isinstance(value, str):
        return value
    for number in (int, float):
        with suppress(ValueError):
            return number(value)
    return {"true": True, "false": False}.get(value.lower(), value)


def _as_argument(where: str, written: Any, argument: inspect.Parameter) -> Any:
    """A value as the type in an argument's annotation. Raises ConfigError if it has another."""
    words = {word.lower() for word in _TYPES.findall(str(argument.annotation))}
    value, default = unquoted(written), argument.default
    if not words:  # of a type that no config can hold, or of none
        return value
    if not isinstance(value, list | tuple):
        if "tuple" in words and value is not None:
            raise ConfigError(f"{where}: {written!r} is not a list of {len(default)} numbers")
        return _as_scalar(where, value, words)
    if not words & {"tuple", "sequence"}:
        raise ConfigError(f"{where}: {written!r} is not {_kind(words)}")
    if isinstance(default, tuple) and len(value) != len(default):
        raise ConfigError(f"{where}: {written!r} is not a list of {len(default)} numbers")
    return [_as_scalar(where, each, words) for each in value]


def _as_scalar(where: str, value: Any, words: Collection[str]) -> Any:
    match value:
        case None:
            good = not {"none", "optional"}.isdisjoint(words)
        case bool():
            good = "bool" in words
        case str():
            good = "str" in words
        case int() | float() if "float" in words:
            good = math.isfinite(value)
        case int() | float() if math.isfinite(value) and value == int(value):
            return int(value)
        case _:
            good = False
    if not good:
        raise ConfigError(f"{where}: {value!r} is not {_kind(words)}")
    return value


def _kind(words: Collection[str]) -> str:
    kinds = {"float": "a number", "int": "an integer", "bool": "true or false"}
    return next((kind for word, kind in kinds.items() if word in words), "text")
