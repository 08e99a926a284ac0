"""A segment: the part of one unit and one param group that this rank's optimizer steps.

Made by `zero_optimizer`; read by `engine_state`, `parameter_norms` and `param_access`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from zero_engine.flat_unit import FlatUnit


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Elements [start, stop) of `unit`, all of one param group, as the optimizer sees them."""

    unit: FlatUnit
    group: int
    start: int
    stop: int
    param: nn.Parameter
    gradient: Tensor
