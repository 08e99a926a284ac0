"""A segment: the part of one unit and one param group that this rank's optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zero_engine.sharding.flat_unit import FlatUnit


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Elements [start, stop) of `unit`, all of one param group, as the optimizer sees them."""

    unit: FlatUnit
    group: int
    start: int
    stop: int
    param: nn.Parameter
    gradient: Tensor


def divided_keys(params: Sequence[Tensor], state: Mapping[Any, Mapping[str, Any]]) -> set[str]:
    """The keys that hold one value per element of the parameters of a group, made before."""
    # A number has the shape of a parameter without dimensions as well.
    sized = [param for param in params if param.dim()] or params
    return {
        key
        for param in sized
        for key, value in state.get(param, {}).items()
        if key != "step" and isinstance(value, Tensor) and value.shape == param.shape
    }


def elementwise_keys(segment: Segment, state: Mapping[str, Any]) -> list[str]:
    """The optimizer keys that hold one value per element of a segment."""
    shape = segment.param.shape
    return sorted(
        key
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape
    )
