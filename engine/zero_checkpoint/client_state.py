"""The script's own state (client_state), as JSON and back.

JSON cannot hold some values that scripts keep: a best loss that is a tensor, random states, tuples,
keys that are no text. Such a value is written as a dictionary whose only key is a *mark*. Must
always hold: a value is restored as it was stored, tensors on the CPU; a value that cannot be is
refused by name; plain JSON stays as it is.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.dtypes import DTYPES, byte_view, name_of

LARGEST_BYTES = 1 << 20
"""The largest tensor or array: it is stored in the manifest, which every rank reads."""
_PLAIN = frozenset({type(None), bool, int, float, str})
_MARKS = frozenset({"$tensor", "$array", "$bytes", "$tuple", "$items", "$stored"})


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
        case list():
            return [pack(inner, f"{path}[{number}]") for number, inner in enumerate(value)]
        case Mapping() if all(type(key) is str and key not in _MARKS for key in value):
            return {key: pack(inner, f"{path}.{key}") for key, inner in value.items()}
        case _:
            return _marked(value, path)


def unpack(value: Any) -> Any:
    """The inverse of `pack`.

    Raises:
        CheckpointError: The value was not made by `pack`.
    """
    try:
        return _unpacked(value)
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
    match value:
        case Stored():
            return {"$stored": str(value)}
        case Tensor():
            data = byte_view(value.detach().cpu().contiguous().flatten()).numpy()
            return {"$tensor": [name_of(value.dtype), list(value.shape), _text(data, path)]}
        case bytes():
            return {"$bytes": _text(np.frombuffer(value, np.uint8), path)}
        case np.ndarray() | np.generic() if not value.dtype.hasobject:
            return {"$array": [value.dtype.str, list(value.shape), _text(value, path)]}
        case tuple():
            return {"$tuple": pack(list(value), path)}
        case Mapping():
            items = [[pack(k, path), pack(v, f"{path}[{k!r}]")] for k, v in value.items()]
            return {"$items": items}
        case _:
            raise CheckpointError(
                f"{path} is a {type(value).__name__}, which no checkpoint can hold; convert it to "
                "numbers, text, tensors, or lists and dictionaries of them"
            )


def _unmarked(value: dict[str, Any]) -> Any:
    match [*value.items()]:
        case [("$stored", name)]:
            return Stored(name)
        case [("$tensor", [dtype, shape, text])]:
            return torch.from_numpy(_bytes(text)).view(DTYPES[dtype]).reshape(shape)
        case [("$array", [dtype, shape, text])]:
            return _bytes(text).view(dtype).reshape(shape)[()]
        case [("$bytes", text)]:
            return _bytes(text).tobytes()
        case [("$tuple", members)]:
            return tuple(_unpacked(members))
        case [("$items", items)]:
            return {_unpacked(key): _unpacked(inner) for key, inner in items}
        case _:
            raise ValueError(f"{sorted(value)} with something else in it")


def _text(data: np.ndarray[Any, Any] | np.generic, path: str) -> str:
    if data.nbytes > LARGEST_BYTES:
        raise CheckpointError(
            f"{path} has {data.nbytes} bytes, more than the {LARGEST_BYTES} that one tensor in a "
            "client_state may have; make it a buffer of the module, or write a file for it"
        )
    return base64.b64encode(data.tobytes()).decode()


def _bytes(text: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(bytearray(base64.b64decode(text)), np.uint8)
