"""Settings as people write them, in a config or a job file: from mappings to frozen dataclasses.

The annotation of a field is its type for msgspec: `Meta` has the bounds of a value or its pattern,
and a `description` that says in words what the value has to be. An unknown key is an error that
names the nearest known key; whole floats are integers (2e8), and numbers in quotes numbers.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from zero_contract.decoding import located, shown_of
from zero_contract.errors import ConfigError
from zero_contract.values import nearest

AUTO = "auto"
MOST = (1 << 63) - 1
# Sizes and counts become indices of tensors and records in checkpoints, of 64 bits with a sign.
Integer = Annotated[int, Meta(ge=-MOST - 1, le=MOST)]
Whole = Annotated[int, Meta(ge=0, le=MOST)]
Count = Annotated[int, Meta(ge=1, le=MOST)]
# Is hashed as 64 bits without a sign: -1 would be the same run as 2**64 - 1, not a random one.
Seed = Annotated[int, Meta(ge=0)]
Number = Annotated[float, Meta(ge=0)]
Finite = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Share = Annotated[float, Meta(ge=0, le=1)]

Problem = tuple[str, str]
"""The path of a key, and what is wrong there; the path "" is in the text, or is the whole."""
Unknown = Callable[[str, str, Any, Collection[str]], Iterable[Problem]]
"""Called with a section's path, a key that is no field there, its value and the fields."""


class Wrong(ValueError):
    """The text shows the value and says what it is not; `at` is its path within the whole value."""

    def __init__(self, at: str, text: str) -> None:
        super().__init__(text)
        self.at = at


@dataclass(frozen=True, slots=True)
class Spelled:
    """In the annotation of a field: another spelling of its value.

    `means` returns the value that is meant, or the same; it may raise `Wrong`.
    """

    means: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the annotation and the default of a field say."""

    kind: Any
    """Its type, for msgspec."""
    section: Any
    """Its class if it is a section, else None."""
    means: Callable[[Any], Any]
    is_needed: bool

    @property
    def takes_auto(self) -> bool:
        """Whether "auto" is a value of its own; else it stands for the default."""
        return any(get_origin(one) is Literal and AUTO in get_args(one) for one in parts(self.kind))


@cache
def keys_of(cls: Any) -> Mapping[str, Setting]:
    """The keys of a section by name."""
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        # Those of a type in a union, too: `Truth | None`.
        marks = [mark for one in (kind, *get_args(kind)) for mark in get_args(one)]
        inner: list[Any] = [one for one in parts(kind) if dataclasses.is_dataclass(one)]
        spelled = [mark.means for mark in marks if isinstance(mark, Spelled)]
        found[field.name] = Setting(
            kind=kind,
            section=inner[0] if inner else None,
            means=spelled[0] if spelled else lambda value: value,
            is_needed=field.default is field.default_factory is dataclasses.MISSING,
        )
    return found


def parts(kind: Any) -> list[Any]:
    """The types of a union, without what annotates them; of another type, itself."""
    if get_origin(kind) is Annotated:
        return parts(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [part for one in get_args(kind) for part in parts(one)]
    return [kind]


def words(kind: Any) -> str:
    """What a value of a type is, in words: "an integer", "a list of strings"."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        said = (mark.description for mark in args[1:] if isinstance(mark, Meta))
        return next(filter(None, said), None) or words(args[0])
    if origin in (Union, UnionType):
        return " or ".join(words(one) for one in args if one is not NoneType)
    if origin in (tuple, list):
        return f"a list of {words(args[0]).removeprefix('an ').removeprefix('a ')}s"
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        *most, last = map(json.dumps, args or kind)
        return f"{', '.join(most)} or {last}" if most else last
    plain = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return plain.get(kind, "an object")


def join(path: str, key: str) -> str:
    """The path of a key in the section at `path`, which is "" at the top."""
    return f"{path}.{key}" if path else key


def unknown_key(
    where: str, known: Collection[str], *, listed: Collection[str] | None = None
) -> Problem:
    """The problem of an unknown key, whose whole path is `where`.

    `known` are possible in its place; `listed`, by default all of them, are named if none is near.
    """
    near = nearest(where.rpartition(".")[2], known)
    names = ", ".join(sorted(known if listed is None else listed))
    return where, f"unknown key; did you mean {near!r}?" if near else f"unknown key; known: {names}"


def converted(value: Any, kind: Any) -> Any:
    """A value as a type. Raises Wrong."""
    try:
        # First as it is: a text that is wanted stays one, even if it looks like a number.
        with suppress(msgspec.ValidationError):
            return _of_64_bits(msgspec.convert(value, kind, dec_hook=lambda cls, text: cls(text)))
        return _of_64_bits(msgspec.convert(_plain(value), kind))
    except msgspec.ValidationError as wrong:
        # msgspec's message has "$[" where an element is wrong, and not the whole: the type to name
        # is then that of the elements, the last one in the brackets of list[...] or dict[str, ...].
        inner = [get_args(one) for one in parts(kind) if get_origin(one) in (tuple, list, dict)]
        wanted = [*inner[0]][0 if ... in inner[0] else -1] if "$[" in str(wrong) else kind
        raise Wrong(*located(wrong, value, words(wanted))) from None
    except RecursionError:
        raise Wrong("", "is nested too deeply") from None
    except UnicodeEncodeError as wrong:  # JSON can name half of a character
        raise Wrong("", f"{shown_of(wrong.object)} is no text of UTF-8") from None


def _of_64_bits(value: Any) -> Any:
    # No bound of msgspec's own has more than 63.
    if isinstance(value, int) and value >= 1 << 64:
        raise Wrong("", f"{value} is more than {(1 << 64) - 1}")
    return value


def take(where: str, value: Any, kind: Any) -> Any:
    """The value of the key `where` as a type. Raises ConfigError."""
    try:
        return converted(value, kind)
    except Wrong as wrong:
        raise ConfigError(f"{where}{wrong.at}: {wrong}") from None


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


def _plain(value: Any) -> Any:
    """A value as msgspec takes it: no whole float for an integer, and none of numpy's at all."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    value = unquoted(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(value)
    return value


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What the settings of one program have in common."""

    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Path of another spelling -> the key."""
    unknown: Unknown = lambda path, key, value, known: [unknown_key(join(path, key), known)]

    def canonical(self, path: str, key: str) -> str:
        """The key that another spelling means."""
        return self.aliases.get(join(path, key), key)

    def decode(self, cls: Any, data: Mapping[str, Any]) -> Any:
        """A config as an instance of `cls`; "auto" takes the default.

        Raises:
            ConfigError: Keys are unknown, missing or given twice, or values are wrong: one line
                each.
        """
        made, wrong = self.read(cls, data)
        if wrong:  # all at once: each start of a job takes a while
            raise ConfigError("\n".join(": ".join(filter(None, one)) for one in wrong))
        return made

    def read(self, cls: Any, data: Any, path: str = "") -> tuple[Any, Any]:
        """The section at `path`, or None, with all that is wrong there."""
        if not isinstance(data, Mapping):
            return None, [(path, f"{shown_of(data)} is not an object")]
        keys, values = keys_of(cls), {}
        wrong: list[Problem] = []
        has_unknown = False
        for key, value in data.items():
            written = f"{key}"  # in a dict of a script it may be a number
            name, where = self.canonical(path, written), join(path, written)
            if name not in keys:
                found = [*self.unknown(path, written, value, keys)]
                wrong, has_unknown = wrong + found, has_unknown or bool(found)
            elif name in values:
                wrong.append((where, f"{name} is given twice; keep one"))
            elif value != AUTO or keys[name].takes_auto:
                try:
                    values[name], inner = self._value(keys[name], value, join(path, name))
                    wrong += inner
                except Wrong as problem:
                    values[name] = None
                    wrong.append((f"{where}{problem.at}", str(problem)))
        if not has_unknown:  # else the unknown key may be a misspelling of the missing one
            wrong += [
                (join(path, name), f"is missing; write {words(key.kind)}")
                for name, key in keys.items()
                if key.is_needed and name not in values
            ]
        try:
            return (None, wrong) if wrong else (cls(**values), [])
        except ConfigError as problem:
            return None, [("", str(problem))]

    def _value(self, key: Setting, value: Any, path: str) -> tuple[Any, list[Problem]]:
        value = key.means(value)
        if key.section is None or (value is None and NoneType in parts(key.kind)):
            return converted(value, key.kind), []
        # Such as `"fp16": true` in the place of `"fp16": {"enabled": true}`.
        name = {str: "type", bool: "enabled"}.get(type(value))
        if name in keys_of(key.section):
            hint = json.dumps({name: value})
            raise Wrong("", f"{shown_of(value)} is not an object; write {hint}")
        return self.read(key.section, value, path)
