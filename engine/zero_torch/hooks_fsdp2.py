"""FSDP2: the ordered reduction in the place of its reduce-scatter, through its public hooks.

Must always hold: FSDP2 neither divides nor adds. Each group of parameters that FSDP2 reduces
together is one sum, of which a rank owns what FSDP2 gives it. FSDP2 calls no reduce-scatter at
world 1, and the all-reduce hook at every world size.

What is given to FSDP2 as the result becomes `.grad`, and may be filled until the end of the
backward, unless FSDP2 makes a copy of it: in another dtype, or on another device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from zero_contract.errors import ConfigError
from zero_torch.hooks_hsdp import TwoLevels
from zero_torch.ordered_gradients import OrderedGradients

_Gradients = OrderedGradients | TwoLevels

_HOOKS = (
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
)


def attach(model: nn.Module, gradients: OrderedGradients, world: int) -> None:
    """Let every FSDP2 module of a model reduce its gradients through `gradients`.

    Raises:
        ConfigError: This version of torch has no such hooks.
    """
    mesh = getattr(next(model.parameters()), "device_mesh", None)
    levels = TwoLevels(gradients, mesh) if mesh is not None and mesh.ndim > 1 < world else None
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            _attach(module, name or "the root module", levels or gradients, world)
            if levels is not None:
                levels.add_module(module)


def _attach(module: Any, name: str, gradients: _Gradients, world: int) -> None:
    if absent := [hook for hook in _HOOKS if not hasattr(module, hook)]:
        raise ConfigError(
            f"torch {torch.__version__} has no FSDPModule.{absent[0]}, through which gradients are "
            "summed in order; use torch 2.13 or newer, or DistributedDataParallel"
        )
    unit = _ReduceScatter(name, gradients, next(module.parameters()))
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_reduce_scatter_unused_params(True, recurse=False)
    module.set_custom_reduce_scatter(unit)
    if world == 1:
        module.set_all_reduce_hook(unit.alone)


class _ReduceScatter:
    """The communication of one FSDP2 module: `torch.distributed.fsdp`'s ReduceScatter."""

    def __init__(self, name: str, gradients: _Gradients, example: Tensor) -> None:
        self._name = name
        self._gradients = gradients
        self._example = example

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent, and for what it comes to."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Reduce `input_tensor` [world * n] into `output_tensor` [n]."""
        del group, op, async_op
        of_grad = self._example.dtype, self._example.device
        copied = (output_tensor.dtype, output_tensor.device) != of_grad
        now = self._gradients.now
        if now is None or not now.last or isinstance(self._gradients, TwoLevels):
            output_tensor.zero_()
        self._gradients.reduce(self._name, input_tensor, output_tensor, now=copied)

    def alone(self, reduced: Tensor) -> None:
        """The same at world 1, in place."""
        self._gradients.reduce(self._name, reduced, reduced)
