"""What an optimizer remembers of one parameter, as JSON and a few tensors.

A *sketch* is a nest of dicts, lists, tensors and plain values as JSON, with dtype and shape in the
place of each tensor. Must always hold: a nest made from its sketch has its tensors under the same
names, which are the way to them: "row_var", "factors.0". Tuples come back as lists.

Called by `owner_state` and `owner_steps`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zero_engine.checkpoint.dtypes import DTYPES, name_of
from zero_engine.errors import CheckpointError


def sketch(state: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """What a state is like, as JSON, and its tensors by name.

    Args:
        state: A nest of dicts, lists, tensors and plain values.
        name: Whose it is.

    Raises:
        CheckpointError: Something else is in it.
    """
    tensors: dict[str, Tensor] = {}

    def look(value: Any, path: tuple[str, ...]) -> Any:
        match value:
            case Tensor():
                tensors[".".join(path)] = value
                return {"tensor": [name_of(value.dtype), list(value.shape)]}
            case None | bool() | int() | float() | str():
                return value
            case list() | tuple():
                return [look(inner, (*path, str(i))) for i, inner in enumerate(value)]
            case dict() if all(isinstance(key, str) for key in value):
                # In the order that a manifest has, so that a second save is the same bytes.
                return {"dict": {key: look(value[key], (*path, key)) for key in sorted(value)}}
        raise CheckpointError(
            f"optimizer state {'.'.join(path)} of {name} is a {type(value).__name__}, which no "
            "checkpoint can hold; use an optimizer that keeps tensors, numbers and lists of them"
        )

    return look(state, ()), tensors


def tensors_in(state: Any) -> Iterator[Tensor]:
    """The tensors of a nest, also of one that cannot be sketched."""
    match state:
        case Tensor():
            yield state
        case dict():
            for inner in state.values():
                yield from tensors_in(inner)
        case list() | tuple():
            for inner in state:
                yield from tensors_in(inner)
        case _:
            pass


def blank(known: Any, device: torch.device, of_numbers: torch.device) -> Any:
    """A state as it was sketched, with zeros in all tensors.

    Args:
        known: The sketch.
        device: Where its tensors are to be.
        of_numbers: Where those without dimensions are to be, such as step counts.
    """
    match known:
        case {"tensor": [dtype, shape]}:
            place = device if shape else of_numbers
            return torch.zeros(shape, dtype=DTYPES[dtype], device=place)
        case {"dict": members}:
            return {key: blank(inner, device, of_numbers) for key, inner in members.items()}
        case list():
            return [blank(inner, device, of_numbers) for inner in known]
        case _:
            return known


def listed(known: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, list[int]]]:
    """The tensors of a sketch: name, dtype and shape, in the order of `sketch`."""
    match known:
        case {"tensor": [dtype, shape]}:
            yield ".".join(path), dtype, shape
        case {"dict": members}:
            for key, inner in members.items():
                yield from listed(inner, (*path, key))
        case list():
            for number, inner in enumerate(known):
                yield from listed(inner, (*path, str(number)))
        case _:
            pass
