"""DeepSpeed's `deepspeed.moe.layer`: for scripts that import it without using it."""

from __future__ import annotations

from typing import Any

from torch import nn

from zero_contract.errors import ZeroError

__all__ = ["MoE"]


class MoE(nn.Module):
    """A layer of experts that are divided among the ranks, which is not supported."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ZeroError(
            "deepspeed.moe: there is no expert parallelism; put the experts into a ModuleList, "
            "which every stage divides like all parameters, and route in the model's forward"
        )
