"""The script's own state (client_state), as JSON and back.

JSON cannot hold some values that scripts keep: a best loss that is a tensor, random states, tuples,
keys that are no text. Such a value is written as a dictionary whose only key is a *mark*. A value
is restored as it was stored, tensors on the CPU, mappings as dictionaries; plain JSON stays as it
is.
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.dtypes import DTYPES, byte_view, elements, name_of

LARGEST_BYTES = 1 << 20
"""The largest tensor or array: it is stored in the manifest, which every rank reads."""
_PLAIN = frozenset({type(None), bool, int, float, str})
_MARKS = frozenset(
    {
        "$tensor",
        "$array",
        "$scalar",
        "$bytes",
        "$file",
        "$tuple",
        "$size",
        "$items",
        "$counter",
        "$stored",
    }
)
_ARRAYS = (np.ndarray, np.memmap)
"""Other classes of arrays have more than their elements, such as a mask."""


class Stored(str):
    """Stands for a tensor in the checkpoint's files: its name there."""

    __slots__ = ()


def pack(value: Any, path: str = "client_state") -> Any:
    """A value as JSON. Infinities and NaN pass, as Python's JSON writes and reads them.

    Raises:
        CheckpointError: The value, or the value at the path in the message, cannot be restored.
    """
    if type(value) in _PLAIN:
        return value
    match value:
        case list() if type(value) is list:
            return [pack(inner, f"{path}[{number}]") for number, inner in enumerate(value)]
        # A key that is a mark would be read as one, and a defaultdict has more than its items.
        case Mapping() if all(
            type(key) is str and key not in _MARKS for key in value
        ) and not hasattr(value, "__missing__"):
            return {key: pack(inner, f"{path}.{key}") for key, inner in value.items()}
        case _:
            return _marked(value, path)


def unpack(value: Any) -> Any:
    """The inverse of `pack`. Raises CheckpointError if the value was not made by `pack`."""
    try:
        return _unpacked(value)
    # Of base64; of numpy and torch, for bytes of another size; for a dtype of a later release.
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"client_state of the checkpoint is not as it was written: {error}; load another one"
        ) from error


def _unpacked(value: Any) -> Any:
    match value:
        case list():
            return [_unpacked(inner) for inner in value]
        case dict() if value.keys() & _MARKS:
            return _unmarked(value)
        case dict():
            return {key: _unpacked(inner) for key, inner in value.items()}
        case _:
            return value


def _marked(value: Any, path: str) -> dict[str, Any]:
    content: Any
    match value:
        case Stored():
            mark, content = "$stored", str(value)
        case Tensor():
            check_dense(value, path)
            data = byte_view(elements(value.cpu()).flatten()).numpy()
            mark, content = "$tensor", [name_of(value.dtype), [*value.shape], _text(data, path)]
        case bytes() if not isinstance(value, np.bytes_):
            mark, content = "$bytes", _text(np.frombuffer(value, np.uint8), path)
        case io.BytesIO():  # what some modules return as their extra state
            mark, content = "$file", _text(np.frombuffer(value.getvalue(), np.uint8), path)
        # Of an array of objects the elements are pointers, of another class they are not all.
        case np.ndarray() | np.generic() if not value.dtype.hasobject and (
            isinstance(value, np.generic) or type(value) in _ARRAYS
        ):
            described = np.lib.format.dtype_to_descr(value.dtype)
            mark = "$array" if isinstance(value, np.ndarray) else "$scalar"
            content = [described, [*value.shape], _text(value, path)]
        case torch.Size():  # a tuple, too
            mark, content = "$size", [*value]
        # Not a named one, whose class would be lost.
        case tuple() if type(value) is tuple:
            mark, content = "$tuple", pack([*value], path)
        case Mapping() if type(value) is Counter or not hasattr(value, "__missing__"):
            mark = "$counter" if type(value) is Counter else "$items"
            content = [[pack(k, path), pack(v, f"{path}[{k!r}]")] for k, v in value.items()]
        case _:
            raise CheckpointError(
                f"{path} is a {type(value).__name__}, which no checkpoint can hold; convert it to "
                "numbers, text, tensors, or lists, tuples and dictionaries of them"
            )
    return {mark: content}


def check_dense(value: Tensor, path: str) -> None:
    """Refuse a tensor that is not its elements in memory: raises CheckpointError."""
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
        raise _of_another_kind(path, type(value).__name__)
    check_elements(value, path)


def check_elements(value: Tensor, path: str) -> None:
    """Refuse a tensor that does not have all elements, whatever its class: CheckpointError."""
    kinds = {
        "quantized": value.is_quantized,
        "meta": value.is_meta,
        "nested": value.is_nested,
        str(value.layout).removeprefix("torch."): value.layout is not torch.strided,
    }
    if kind := next((name for name, holds in kinds.items() if holds), ""):
        raise _of_another_kind(path, kind)


def _of_another_kind(path: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a tensor of another kind ({kind}); store a dense one that has all elements, "
        "such as x.to_dense() or x.full_tensor()"
    )


def _unmarked(value: dict[str, Any]) -> Any:
    found: Any
    match [*value.items()]:
        case [("$stored", name)]:
            found = Stored(name)
        case [("$tensor", [dtype, shape, text])]:
            found = torch.from_numpy(_bytes(text)).view(DTYPES[dtype]).reshape(shape)
        case [("$array" | "$scalar" as mark, [dtype, shape, text])]:
            kind = _dtype(dtype)
            # An empty text of numpy has no bytes, of which there is no view.
            found = _bytes(text).view(kind) if kind.itemsize else np.zeros(shape, kind)
            found = found.reshape(shape)[()] if mark == "$scalar" else found.reshape(shape)
        case [("$bytes", text)]:
            found = _bytes(text).tobytes()
        case [("$file", text)]:
            found = io.BytesIO(_bytes(text).tobytes())
        case [("$size", shape)]:
            found = torch.Size(shape)
        case [("$tuple", members)]:
            found = tuple(_unpacked(members))
        case [("$items" | "$counter" as mark, items)]:
            pairs = {_unpacked(key): _unpacked(inner) for key, inner in items}
            found = Counter(pairs) if mark == "$counter" else pairs
        case _:
            raise ValueError(f"{sorted(value)} with something else in it")
    return found


def _dtype(described: Any) -> np.dtype[Any]:
    """The inverse of `dtype_to_descr`, from JSON, which has no tuples."""

    def named(fields: Any) -> Any:
        if isinstance(fields, str):
            return fields
        return [
            (tuple(name) if isinstance(name, list) else name, named(of), *map(tuple, shape))
            for name, of, *shape in fields
        ]

    return np.lib.format.descr_to_dtype(named(described))


def _text(data: np.ndarray[Any, Any] | np.generic, path: str) -> str:
    if data.nbytes > LARGEST_BYTES:
        raise CheckpointError(
            f"{path} has {data.nbytes} bytes, more than the {LARGEST_BYTES} that one value in a "
            "manifest may have; make it a buffer of the module, or a tensor in the state_dict() of "
            "an object that protect(stateful=...) is given, or write a file for it"
        )
    return base64.b64encode(data.tobytes()).decode()


def _bytes(text: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    # A bytearray, because what is made of `bytes` could not be written to.
    return np.frombuffer(bytearray(base64.b64decode(text)), np.uint8)
