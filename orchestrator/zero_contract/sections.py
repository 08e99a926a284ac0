"""A config: from a dict to frozen dataclasses, one for each section.

Must always hold: an unknown key is an error that names the nearest known key, and is never ignored;
a value has the type of its field. Whole floats are integers (2e8), and numbers in quotes numbers.

Fields name their types as text: their modules have `from __future__ import annotations`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from zero_contract.decoding import shown_of
from zero_contract.errors import ConfigError
from zero_contract.values import nearest

AUTO = "auto"

Unknown = Callable[[str, str, Any, set[str]], None]
"""Called with a section's path, a key that is no field there, its value and the fields."""


def join(path: str, key: str) -> str:
    """The path of a key in the section at `path`, which is "" at the top."""
    return f"{path}.{key}" if path else key


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


def refuse(path: str, key: str, value: Any, fields: set[str]) -> None:
    """An `Unknown`: every key that is no field is an error."""
    del value
    raise unknown_key(join(path, key), fields)


@dataclass(frozen=True, kw_only=True)
class Parser:
    """What the configs of one program have in common."""

    sections: Mapping[str, type[Any]]
    """The classes of sections by name, as the annotations of fields spell it."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Path of another spelling -> the key."""
    short: Mapping[str, Callable[[bool], Mapping[str, Any]]] = dataclasses.field(
        default_factory=dict
    )
    """Sections for which true or false may stand -> what it means."""
    unknown: Unknown = refuse

    def canonical(self, path: str, key: str) -> str:
        """The key that another spelling means."""
        return self.aliases.get(join(path, key), key)

    def parse(self, cls: type[Any], data: Mapping[str, Any], path: str = "") -> Any:
        """One level of a config as an instance of `cls`; "auto" takes the default.

        Raises:
            ConfigError: Keys are unknown, missing or given twice, or values are wrong: one line
                each.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        wrong = []
        for written, value in data.items():
            try:
                self._take(values, fields, path, written, value)
            except ConfigError as error:
                wrong.append(str(error))
        # A key that is wrong may be the one that is missing.
        wrong = wrong or [
            f"{join(path, f.name)}: missing"
            for f in fields.values()
            if f.name not in values
            and f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING
        ]
        if wrong:  # all at once: each start of a job takes a while
            raise ConfigError("\n".join(wrong))
        return cls(**values)

    def _take(
        self,
        values: dict[str, Any],
        fields: Mapping[str, dataclasses.Field[Any]],
        path: str,
        written: str,
        value: Any,
    ) -> None:
        """Add one key of a level to the values of its fields."""
        key = self.canonical(path, written)
        if key not in fields:
            self.unknown(path, written, value, set(fields))
            return
        if key in values:
            raise ConfigError(f"{join(path, written)}: {key} is given twice; keep one")
        if value != AUTO or "Auto" in str(fields[key].type):
            where = join(path, key), join(path, written)
            values[key] = self._coerce(str(fields[key].type), value, *where)

    def _coerce(self, annotation: str, value: Any, path: str, written: str) -> Any:
        """`value` as the type that a field's annotation names; errors name the key as written."""
        wanted = annotation.removesuffix(" | None")
        if value is None and wanted != annotation:
            return None
        if wanted in self.short and isinstance(value, bool):
            value = self.short[wanted](value)
        if wanted not in self.sections:
            return _scalar(wanted, value, written)
        section = self.sections[wanted]
        if not isinstance(value, Mapping):
            key = {str: "type", bool: "enabled"}.get(type(value))
            known = key in {field.name for field in dataclasses.fields(section)}
            hint = f"; write {json.dumps({key: value})}" if known else ""
            raise ConfigError(f"{written}: {shown_of(value)} is not an object{hint}")
        return self.parse(section, value, path)


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


def _scalar(wanted: str, value: Any, where: str) -> Any:
    name, convert = _COERCE[wanted]
    try:
        made = convert(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where}: {shown_of(value)} is not {name}") from None
    if wanted in _BITS and made is not None:
        least, most = _BITS[wanted]
        for number in made if isinstance(made, tuple) else (made,):
            if not least <= number <= most:
                raise ConfigError(f"{where}: {number} is not from {least} to {most} (64 bits)")
    return made
