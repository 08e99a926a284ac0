"""What forward computes in: the dtype of the model, its inputs, and torch's autocast.

Owns the names of dtypes in the config and the call of the module under them. Must always hold:
master weights, moments and gradient sums are fp32 whatever is chosen here. Called by `assembly`
and `engine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zero_engine.config import Config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""`Config.compute` -> the dtype of parameters and floating-point buffers."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How to call the module."""

    dtype: torch.dtype
    casts_inputs: bool
    """fp16.auto_cast: floating-point inputs take the dtype of the model."""
    autocast: bool
    device: torch.device

    @classmethod
    def of(cls, config: Config, device: torch.device) -> Precision:
        """What the config asks for."""
        return cls(
            dtype=DTYPES[config.compute],
            casts_inputs=config.fp16.enabled and config.fp16.auto_cast,
            autocast=config.torch_autocast.enabled,
            device=device,
        )

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The module's forward."""
        if self.casts_inputs:
            args, kwargs = tree_map(self._cast, (args, dict(kwargs)))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return module(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if floating else value
