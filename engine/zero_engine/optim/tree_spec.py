"""What an optimizer remembers of one parameter: a nest, its tree spec, and its leaves.

A *nest* is made of dicts, lists, tensors, numbers and plain values. Its *tree spec* is JSON that
describes it, with dtype and shape in the place of each tensor and each number, so that steps do not
change it; the *leaves* are those tensors and numbers. A leaf goes by the way to it, in both:
"row_var", "factors.0". Tuples come back as lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.dtypes import DTYPES, name_of

Path = tuple[str, ...]
Number = bool | int | float
# In this order: a bool is an int.
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""The dtype in which a number is stored."""


def tree_spec(nest: Any, name: str, path: Path = ()) -> Any:
    """The types and shapes in a nest, as JSON; `path` leads there from its top.

    Raises:
        CheckpointError: The nest holds something else.
    """
    match nest:
        case Tensor():
            return {"tensor": [name_of(nest.dtype), list(nest.shape)]}
        # A whole number must fit into the int64 that it is stored in.
        case bool() | int() | float() if abs(nest) < 1 << 63 or isinstance(nest, float):
            return {"number": name_of(_NUMBERS[_kind(nest)])}
        case None | str():
            return nest
        case list() | tuple():
            return [tree_spec(inner, name, (*path, str(i))) for i, inner in enumerate(nest)]
        case dict() if all(isinstance(key, str) for key in nest):
            # In the order that a manifest has, so that a second save is the same bytes.
            return {"dict": {key: tree_spec(nest[key], name, (*path, key)) for key in sorted(nest)}}
        case _:
            raise CheckpointError(
                f"optimizer state {'.'.join(path)} of {name} is a {type(nest).__name__}, which no "
                "checkpoint can hold; use an optimizer that keeps tensors, numbers and lists of "
                "them"
            )


def ends(nest: Any, path: Path = ()) -> Iterator[tuple[str, Any]]:
    """All that a nest is made of, by name; also of one that has no tree spec."""
    if isinstance(nest, dict) and nest:
        for key in sorted(nest, key=str):
            yield from ends(nest[key], (*path, str(key)))
    elif isinstance(nest, list | tuple) and nest:
        for number, inner in enumerate(nest):
            yield from ends(inner, (*path, str(number)))
    else:
        yield ".".join(path), nest


def leaves(nest: Any) -> Iterator[tuple[str, Tensor | Number]]:
    """The tensors and numbers of a nest, by name."""
    yield from (end for end in ends(nest) if isinstance(end[1], Tensor | Number))


def mark_of(nest: Any) -> int:
    """A hash, valid in this process, that two nests share if they have the same tree spec."""
    return hash(
        tuple(
            (name, end.shape, end.dtype)
            if isinstance(end, Tensor)
            else (name, type(end), end if isinstance(end, str) else None)
            for name, end in ends(nest)
        )
    )


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """The tensors among the leaves."""
    yield from (leaf for _, leaf in leaves(nest) if isinstance(leaf, Tensor))


def stored(leaf: Tensor | Number) -> Tensor:
    """A leaf as a checkpoint has it: a number becomes a tensor."""
    return (
        leaf
        if isinstance(leaf, Tensor)
        else torch.tensor(leaf, dtype=_NUMBERS[_kind(leaf)], device="cpu")
    )


def described(known: Any, path: Path = ()) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype and shape of each leaf of a tree spec."""
    match known:
        case {"tensor": [dtype, shape]}:
            yield ".".join(path), dtype, shape
        case {"number": dtype}:
            yield ".".join(path), dtype, []
        case {"dict": members}:
            for key, inner in members.items():
                yield from described(inner, (*path, key))
        case list():
            for number, inner in enumerate(known):
                yield from described(inner, (*path, str(number)))
        case _:
            pass


def blank(known: Any, device: torch.device, of_scalars: torch.device) -> Any:
    """A nest with this tree spec and zeros in all leaves, of which the numbers are tensors, too.

    Tensors without dimensions, such as step counts, are on the device `of_scalars`.
    """
    match known:
        case {"tensor": [dtype, shape]}:
            place = device if shape else of_scalars
            return torch.zeros(shape, dtype=DTYPES[dtype], device=place)
        case {"number": dtype}:
            # On the CPU: the host reads it when the load has ended.
            return torch.zeros((), dtype=DTYPES[dtype], device="cpu")
        case {"dict": members}:
            return {key: blank(inner, device, of_scalars) for key, inner in members.items()}
        case list():
            return [blank(inner, device, of_scalars) for inner in known]
        case _:
            return known


def filled(nest: Any, known: Any) -> Any:
    """A nest that was blank, with numbers instead of tensors where the tree spec has numbers."""
    match known:
        case {"number": _}:
            return nest.item()
        case {"dict": members}:
            return {key: filled(nest[key], inner) for key, inner in members.items()}
        case list():
            return [filled(own, inner) for own, inner in zip(nest, known, strict=True)]
        case _:
            return nest


def _kind(number: Number) -> type:
    return next(kind for kind in _NUMBERS if isinstance(number, kind))
