"""What somebody probably meant: an unknown key, and the known one that is nearest to it.

Called by `parse`, and by those who read the free params of optimizers and schedules.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from zero_engine.errors import ConfigError

_NUMBER = re.compile(r"\b(int|float)\b")


def unknown_key(
    where: str, known: Collection[str], *, told: Collection[str] | None = None
) -> ConfigError:
    """The error for an unknown key.

    Args:
        where: Its whole path.
        known: The keys that are possible in its place.
        told: Those that are listed if none is near; by default all.
    """
    near = difflib.get_close_matches(where.rpartition(".")[2], known, n=1)
    listed = ", ".join(sorted(known if told is None else told))
    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {listed}"
    return ConfigError(f"{where}: unknown config key{hint}")


def check_params(where: str, make: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Params as the arguments of `make`, after its first one; numbers in quotes as numbers.

    Raises:
        ConfigError: One that it does not have, one missing that it needs, or text or NaN for a
            number.
    """
    _, *arguments = inspect.signature(make).parameters.values()
    known = {argument.name for argument in arguments}
    for name in params:
        if name not in known:
            raise unknown_key(f"{where}.{name}", known)
    for argument in arguments:
        if argument.default is inspect.Parameter.empty and argument.name not in params:
            raise ConfigError(f'{where}.{argument.name}: missing, or "auto": give a value')
    taken = {name: unquoted(value) for name, value in params.items()}
    for argument in arguments:
        _check_number(f"{where}.{argument.name}", taken.get(argument.name), argument)
    return taken


def unquoted(value: Any) -> Any:
    """What is written in quotes and is a number, true or false, as YAML's 1e-4; else the value."""
    if isinstance(value, list | tuple):
        return type(value)(unquoted(each) for each in value)
    if not isinstance(value, str):
        return value
    for number in (int, float):
        with suppress(ValueError):
            return number(value)
    return {"true": True, "false": False}.get(value.lower(), value)


def _check_number(where: str, value: Any, argument: inspect.Parameter) -> None:
    """Raises ConfigError if a value is NaN, or text in the place of a number."""
    default = argument.default
    by_default = isinstance(default, int | float) and not isinstance(default, bool)
    is_text = isinstance(value, str) and (by_default or _NUMBER.search(str(argument.annotation)))
    if is_text or (isinstance(value, float) and math.isnan(value)):
        raise ConfigError(f"{where}: {value!r} is not a number")
