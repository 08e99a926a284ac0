"""Checks of free params, such as those of an optimizer."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from zero_contract.errors import ConfigError
from zero_contract.sections import unknown_key

_TYPES = re.compile(r"\b(int|float|bool|str|None|Optional|[tT]uple|Sequence)\b")


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
