"""The state of a dataset as bytes: MessagePack, with what it lacks as extensions. No pickle.

Must always hold: what is read again equals what was written, types included; reading runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from zero_contract.errors import ConfigError
from zero_data.lanes.packing import Packed

_TUPLE, _LONG, _ARRAY, _NUMBER, _TENSOR, _PACKED = range(1, 7)
"""The extensions. Checkpoints have these numbers."""


def dump(state: object) -> bytes:
    """A state as bytes, which are a copy.

    Raises:
        ConfigError: It has a value of another type; says which.
    """
    return msgspec.msgpack.encode(_plain(state))


def load(state: bytes) -> Any:
    """The inverse of `dump`. Raises ConfigError if no `dump` has written this."""
    try:
        return msgspec.msgpack.decode(state, ext_hook=_read)
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the state of a lane cannot be read: {error}; load another checkpoint"
        ) from error


def _plain(value: object) -> Any:  # noqa: PLR0911 - a table of types
    """A value as MessagePack has it."""
    match value:
        case None | bool() | float() | str() | bytes() if not isinstance(value, np.generic):
            return value
        case int():
            small = -(1 << 63) <= value < 1 << 64
            return int(value) if small else msgspec.msgpack.Ext(_LONG, str(value).encode())
        case Packed():
            return _packed(_PACKED, [_plain({**value}), value.documents])
        case Mapping():
            return {_key(key): _plain(each) for key, each in value.items()}
        case list():
            return [_plain(each) for each in value]
        case tuple():
            return _packed(_TUPLE, [_plain(each) for each in value])
        case torch.Tensor():
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            name = str(value.dtype).removeprefix("torch.")
            return _packed(_TENSOR, [name, list(value.shape), flat.numpy().tobytes()])
        case np.ndarray() | np.generic() if not value.dtype.hasobject:
            kind = _ARRAY if isinstance(value, np.ndarray) else _NUMBER
            # `str` of a structured one has its size alone.
            kind_of_value = value.dtype.str if value.dtype.names is None else value.dtype.descr
            return _packed(kind, [_plain(kind_of_value), list(value.shape), value.tobytes()])
        case _:
            pass
    raise ConfigError(
        f"it has a value of type {type(value).__name__}, which no checkpoint stores; give numbers, "
        "text, arrays, tensors, and tuples, lists and dictionaries of them"
    )


def _key(key: object) -> str | int | bytes:
    if isinstance(key, str | int | bytes) and not isinstance(key, bool):
        return key
    raise ConfigError(f"a key of a dictionary is {key!r}; give text or a whole number")


def _packed(kind: int, parts: list[Any]) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(kind, msgspec.msgpack.encode(parts))


def _array(parts: list[Any]) -> np.ndarray[Any, Any]:
    dtype, shape, data = parts
    return np.frombuffer(bytearray(data), dtype=np.lib.format.descr_to_dtype(dtype)).reshape(shape)


def _tensor(parts: list[Any]) -> torch.Tensor:
    name, shape, data = parts
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _sample(parts: list[Any]) -> Packed:
    values, documents = parts
    packed = Packed(values)
    packed.documents = tuple((number, begin, end) for number, begin, end in documents)
    return packed


_READERS: dict[int, Callable[[list[Any]], Any]] = {
    _TUPLE: tuple,
    _ARRAY: _array,
    _NUMBER: lambda parts: _array(parts)[()],
    _TENSOR: _tensor,
    _PACKED: _sample,
}


def _read(code: int, data: memoryview) -> Any:
    if code == _LONG:
        return int(bytes(data))
    if code not in _READERS:
        raise ValueError(f"extension {code} is none that a state has")
    return _READERS[code](msgspec.msgpack.decode(data, ext_hook=_read))
