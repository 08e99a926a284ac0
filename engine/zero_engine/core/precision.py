"""The precision of forward: the dtype of the model, of its inputs, and torch's autocast.

Gradient sums and the arithmetic of a step are fp32 whatever is chosen here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zero_comm.exchange.collectives import Collectives
from zero_contract.errors import ConfigError
from zero_engine.config import Config
from zero_engine.sharding.partition import DTYPES

_log = logging.getLogger(__name__)
_AUTOCAST = (
    "torch.autocast is on around the engine's forward, and has no effect in it, as in DeepSpeed: "
    "the config decides the precision; set torch_autocast.enabled"
)


class Precision:
    """The precision in which the module is called."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._dtype, self._device = DTYPES[config.compute], device
        self._casts_inputs = config.fp16.enabled and config.fp16.auto_cast
        autocast = config.torch_autocast
        self._autocast = DTYPES.get(autocast.compute or "") if autocast.enabled else None
        self._told = False

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The module's forward."""
        if self._casts_inputs:

            def cast(value: Any) -> Any:
                floating = isinstance(value, Tensor) and value.is_floating_point()
                return value.to(self._dtype) if floating else value

            args, kwargs = tree_map(cast, (args, dict(kwargs)))
        dtype = self._autocast
        if dtype is None and not self._told and torch.is_autocast_enabled(self._device.type):
            self._told = True
            _log.warning("%s", _AUTOCAST)
        # Also if it is off here: that ends one which the script has opened around the engine.
        with torch.autocast(self._device.type, dtype, enabled=dtype is not None):
            return module(*args, **kwargs)


# ---- the model ----


def check_dtypes(model: nn.Module, groups: Mapping[int, int], dtype: torch.dtype) -> None:
    """Refuse parameters that the engine cannot sum, or that a cast would change.

    Raises:
        ConfigError: A trained parameter has another dtype.
    """
    for name, param in model.named_parameters():
        # A cast would lose a part of each number; that of a real one would hide a mistake.
        if id(param) in groups and param.is_complex():
            raise ConfigError(
                f"parameter {name} is {param.dtype}, and the engine sums and steps real numbers: "
                "give it a last dimension of 2, and use torch.view_as_complex in the forward; or "
                "train the model with DDP under zero_torch.protect"
            )
        if id(param) in groups and dtype == torch.float32 and param.dtype != dtype:
            raise ConfigError(
                f"parameter {name} is {param.dtype} in fp32 training; set bf16.enabled or "
                "fp16.enabled in the config, or convert the model with model.float()"
            )


def check_apart(model: nn.Module) -> None:
    """Check that no two parameters are views of the same memory, which the engine would part.

    Raises:
        ConfigError: Two are.
    """
    spans = []
    for name, param in model.named_parameters():
        if param.numel() and not param.is_meta:
            strides = zip(param.shape, param.stride(), strict=True)
            reach = 1 + sum((size - 1) * stride for size, stride in strides)
            start = param.data_ptr()
            spans.append((start, start + reach * param.element_size(), name, param))
    together: list[tuple[int, str, Tensor]] = []
    end = 0
    for start, stop, name, param in sorted(spans, key=itemgetter(0)):
        if start >= end:
            _check_elements(together, end)
            together = []
        together.append((start, name, param))
        end = max(end, stop)
    _check_elements(together, end)


def _check_elements(params: Sequence[tuple[int, str, Tensor]], end: int) -> None:
    """Check that parameters whose memory ends at an address have no byte of it in common."""
    if len(params) < 2:
        return
    # Their memory may interlace, as that of columns does: for each element, whose it is.
    grain = min(param.element_size() for _, _, param in params)
    low = params[0][0]
    holders = torch.zeros((end - low) // grain, dtype=torch.int32, device="cpu")
    for number, (start, name, param) in enumerate(params):
        parts = param.element_size() // grain
        steps = [(n, s * parts) for n, s in zip(param.shape, param.stride(), strict=True) if s]
        sizes, strides = zip(*steps, (parts, 1), strict=True)
        held = holders.as_strided(sizes, strides, (start - low) // grain)
        if other := int(held.max()):
            raise ConfigError(
                f"{params[other - 1][1]} and {name} share memory and are two parameters: the "
                "engine would give each its own, and what is one weight would become two; make "
                "them one nn.Parameter under both names, or give one of them a clone()"
            )
        held.fill_(number + 1)


def prepare_buffers(
    model: nn.Module, dtype: torch.dtype | None, device: torch.device, collectives: Collectives
) -> None:
    """Broadcast the buffers of rank 0, contiguous, on the device.

    Floating-point buffers are cast to `dtype`, unless it is None.
    """
    for name, buffer in model.named_buffers():
        casts = dtype is not None and buffer.is_floating_point()
        # By `data`: modules and the script refer to this very tensor.
        buffer.data = buffer.data.to(device, dtype if casts else buffer.dtype).contiguous()
        collectives.broadcast(buffer, f"buffer {name}")
