"""Checks of free params, such as those of an optimizer."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any

from msgspec import Meta

from zero_contract.errors import ConfigError
from zero_contract.sections import Integer, take, unknown_key

_KINDS: Mapping[str, Any] = {
    "int": Integer,
    "float": Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)],
    "bool": bool,
    "str": str,
    "none": None,
    "optional": None,
}
_TYPES = re.compile(r"\b(int|float|bool|str|None|Optional|[tT]uple|Sequence)\b")


def check_params(where: str, make: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert params to the arguments of `make` after its first; numbers in quotes are numbers.

    Raises:
        ConfigError: A param is unknown, missing or of another type.
    """
    _, *arguments = inspect.signature(make).parameters.values()  # the first are the parameters
    known = {argument.name for argument in arguments}
    for name in params:
        if name not in known:
            raise ConfigError(": ".join(unknown_key(f"{where}.{name}", known)))
    for argument in arguments:
        if argument.default is inspect.Parameter.empty and argument.name not in params:
            raise ConfigError(f'{where}.{argument.name}: missing, or "auto": give a value')
    return {
        argument.name: take(f"{where}.{argument.name}", params[argument.name], _type_of(argument))
        for argument in arguments
        if argument.name in params
    }


def _type_of(argument: inspect.Parameter) -> Any:
    """The type in an argument's annotation, of those that a config can hold; Any without one."""
    # As text: with postponed evaluation an annotation is nothing else.
    words = {word.lower() for word in _TYPES.findall(str(argument.annotation))}
    if not words:
        return Any
    one: Any = reduce(or_, (kind for word, kind in _KINDS.items() if word in words))
    if "tuple" in words:
        size = len(argument.default)
        return Annotated[
            list[one],
            Meta(min_length=size, max_length=size, description=f"a list of {size} numbers"),
        ]
    return one | list[one] if "sequence" in words else one
