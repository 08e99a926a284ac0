"""DeepSpeed's `deepspeed.moe.utils`: no parameter is an expert's, so groups stay unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

__all__ = [
    "has_moe_layers",
    "is_moe_param",
    "split_params_into_different_moe_groups_for_optimizer",
]

Group = dict[str, Any]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether there are layers of divided experts, and the number of experts: none."""
    del m
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is an expert's, and so differs between ranks: never."""
    del param
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Group | Iterable[Group], max_group_size: float = 178956971
) -> list[Group]:
    """The groups, or the one group, as a list; `max_group_size` is for experts only."""
    del max_group_size
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
