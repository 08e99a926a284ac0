"""The one decoder of what programs write: messages, records of a store, manifests.

A text is JSON as Python writes it, NaN and infinities included. The type of the value is anything
that msgspec knows: a dataclass, a Struct, a union of tagged Structs, a container. Whatever the
text, the outcome is a value of the type or the caller's error, in time and memory proportional to
the text; a field that the type does not know is ignored, so that a format can grow.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import UnionType
from typing import Any, TypeVar

import msgspec

from zero_contract.errors import ZeroError

T = TypeVar("T")

_KINDS: Mapping[str, tuple[str, type[Any]]] = {
    "int": ("an integer", int),
    "float": ("a number", float),
    "str": ("a string", str),
    "bool": ("true or false", bool),
    "null": ("null", type(None)),
    "array": ("a list", list),
    "object": ("an object", dict),
}
"""msgspec's name of a type -> the words for it, and the type of such a value."""
_EXPECTED = re.compile(r"Expected `(.*)`, got `(.*)`")
_SHOWN = 100
"""The most characters of a value that a message shows."""
_BOUND = re.compile(r"Expected `.*` ([<>]=) (.*)")
_LACKS = re.compile(r"Object missing required field `(.*)`")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[(\.\.\.)\]")
"""Of a path in an error of msgspec: a field, a position in a list, any key of an object."""


class MalformedError(ZeroError, ValueError):
    """What came from outside is not what it has to be."""


def decode(
    kind: type[T] | UnionType,
    data: bytes | str | object,
    what: str,
    error: type[Exception] = MalformedError,
    remedy: str = "",
) -> T:
    """The value of a type in a JSON text, or in the objects of one that has been read.

    `what` it is, such as "a message of a worker", begins the message of an error, and `remedy` ends
    it.

    Raises:
        Exception: An `error`: the data is not of this type. Its message has the path of the value
            that is wrong (`records[3].kind`) and the value.
    """
    try:
        found = parse(data) if isinstance(data, bytes | str) else data
        _prepare(kind)
        if isinstance(kind, type):
            return msgspec.convert(found, kind, str_keys=True)
        value: T = msgspec.convert({"": found}, _holder(kind)).value
        return value
    except msgspec.ValidationError as wrong:
        problem = ": ".join(filter(None, located(wrong, found))).removeprefix(".")
    except RecursionError:
        problem = "is nested too deeply"
    except ValueError as wrong:
        problem = f"is not JSON: {str(wrong)[: 2 * _SHOWN]}"
    raise error("; ".join([f"{what}: {problem}", *([remedy] if remedy else [])]))


_prepared: set[type[Any] | UnionType] = set()
_preparing = threading.RLock()


def _prepare(kind: type[Any] | UnionType) -> None:
    """Let msgspec learn a type, on one thread at a time."""
    # It keeps what it knows of a class in that class, from before it knows all of it (types may be
    # recursive): another thread that decodes it then crashes the process. Of what it knows already,
    # any number of threads may decode.
    if kind not in _prepared:
        with _preparing:
            msgspec.json.Decoder(kind if isinstance(kind, type) else _holder(kind))
            _prepared.add(kind)


@lru_cache(maxsize=64)
def _holder(kind: UnionType) -> type[Any]:
    """A class with one field of a type."""
    # msgspec keeps what it has learnt of a class, and nothing of a union.
    return msgspec.defstruct("Holder", [("value", kind)], rename={"value": ""})


def parse(text: bytes | str, *, wide: bool = False) -> Any:
    """The objects in a JSON text, which is UTF-8, in which no key is there twice.

    `wide`: integers may have more than 64 bits, as in the state of a generator.

    Raises:
        ValueError: It is not such a text.
        RecursionError: It is nested deeper than Python can follow.
    """
    return (_WIDE if wide else _JSON).decode(text.decode() if isinstance(text, bytes) else text)


def encode(record: Any) -> str:
    """The JSON text of a record, from which `decode` makes an equal one."""
    return json.dumps(record, default=_members)


def _members(value: Any) -> Any:
    """A value that `json` cannot encode, as one that it can."""
    # Not by `to_builtins`, which leaves out fields that have been decoded as defaults.
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return msgspec.to_builtins(value)


def line_of(record: Any) -> str:
    """A record as one line of JSON for others, in which null stands for NaN and infinities."""
    return json.dumps(json.loads(encode(record), parse_constant=lambda _: None))


def shown_of(value: object) -> str:
    """A value as a message shows it: the beginning, if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def inflate(packed: bytes, limit_bytes: int) -> bytes:
    """What `zlib.compress` has packed. Raises ValueError if it is not, or is larger than that."""
    # Not `zlib.decompress`: a few kilobytes can be made to fill the memory.
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(packed, limit_bytes)
    except zlib.error as wrong:
        raise ValueError(str(wrong)) from wrong
    if not stream.eof:
        raise ValueError(f"it ends too early, or has more than {limit_bytes} bytes")
    return text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {twice!r} is there twice")
    return record


def _int(digits: str) -> int:
    number = int(digits)
    if not -(1 << 63) <= number < 1 << 64:  # whoever makes a float or a field of it would fail
        raise ValueError(f"{shown_of(number)} has more than 64 bits")
    return number


_JSON = json.JSONDecoder(object_pairs_hook=_once, parse_int=_int)
_WIDE = json.JSONDecoder(object_pairs_hook=_once)


def located(wrong: msgspec.ValidationError, data: object, words: str = "") -> tuple[str, str]:
    """An error of msgspec in words: the path of the value, and what is wrong with it.

    `words` say what the value has to be, where they are more than the name of a type.
    """
    problem, _, at = str(wrong).partition(" - at ")
    steps = [next(filter(None, step)) for step in _STEP.findall(at)]
    expected, lacks = _EXPECTED.fullmatch(problem), _LACKS.fullmatch(problem)
    is_key = at.startswith("`key`")
    got = dict if is_key or not expected else _KINDS.get(expected[2], ("", object))[1]
    # msgspec names no key of an object whose keys are any: the first value there that is of the
    # type which it got is meant.
    where, value = next(
        (
            (place, value)
            for place, value in _places(data, steps)
            if (isinstance(value, got) or expected is None)
            and not (lacks and isinstance(value, dict) and lacks[1] in value)
        ),
        ("", data),
    )
    if is_key:
        return where, f"a key: {problem[:_SHOWN]}"
    if lacks:
        return f"{where}.{lacks[1]}", "is missing"
    shown, bound = shown_of(value), _BOUND.fullmatch(problem)
    if bound and value == value and abs(float(bound[2])) < sys.float_info.max:  # noqa: PLR0124
        comparison = "less" if bound[1] == ">=" else "more"
        return where, f"{shown} is {comparison} than {bound[2].removesuffix('.0')}"
    if expected is None and not words:
        return where, f"{shown}: {problem[:_SHOWN]}"
    kinds = (
        [_KINDS[one][0] if one in _KINDS else one for one in expected[1].split(" | ")]
        if expected
        else []
    )
    return where, f"{shown} is not {words or ' or '.join(kinds)}"


def _places(value: Any, steps: Sequence[str], path: str = "") -> Iterator[tuple[str, Any]]:
    """The paths and values to which some steps may lead; "..." is any key of an object."""
    if not steps:
        yield path, value
    elif isinstance(value, list):
        for one in value[int(steps[0]) :][:1]:
            yield from _places(one, steps[1:], f"{path}[{steps[0]}]")
    elif isinstance(value, dict):
        for key in value if steps[0] == "..." else value.keys() & {steps[0]}:
            yield from _places(value[key], steps[1:], f"{path}.{key}")
