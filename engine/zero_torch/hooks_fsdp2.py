"""FSDP2: the ordered reduction in the place of its reduce-scatter, through its public hooks.

Must always hold: FSDP2 neither divides nor adds. Each group of parameters that FSDP2 reduces
together is one sum, of which a rank owns what FSDP2 gives it. FSDP2 calls no reduce-scatter at
world 1, and the all-reduce hook at every world size.

What is given to FSDP2 as the result becomes `.grad`, and may be filled until the end of the
backward, unless FSDP2 makes a copy of it: in another dtype, or on another device.

On CPUs its all-gathers go the way of the gradients, too: it is faster than gloo's own, a rank that
is asked to leave need not wait for a lost peer, and the loss is no error of the script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from zero_comm.collectives import Collectives, wait
from zero_comm.waiting import transport_failures
from zero_contract.errors import ConfigError
from zero_torch.hooks_hsdp import TwoLevels
from zero_torch.ordered_gradients import OrderedGradients

_Gradients = OrderedGradients | TwoLevels
_Guard = Callable[[], AbstractContextManager[None]]

_HOOKS = (
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
)


def attach(
    model: nn.Module,
    gradients: OrderedGradients,
    collectives: Collectives,
    guard: _Guard = nullcontext,
) -> None:
    """Let every FSDP2 module of a model reduce its gradients through `gradients`.

    Args:
        model: The model.
        gradients: Sums them.
        collectives: The group of all ranks.
        guard: A context around each exchange, which may find that a peer is lost.

    Raises:
        ConfigError: This version of torch has no such hooks.
    """
    world = collectives.world
    device = next(model.parameters()).device
    mesh = getattr(next(model.parameters()), "device_mesh", None)
    levels = None
    if mesh is not None and mesh.ndim > 1 < world:
        levels = TwoLevels(gradients, collectives, mesh)
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            name = path or "the root module"
            _attach(module, name, levels or gradients, world, guard)
            if device.type == "cpu":
                gather: Any = _AllGather(name, collectives, guard, gradients.poll)
                module.set_custom_all_gather(gather)
            if levels is not None:
                levels.replace_all_reduce(module)


def _attach(module: Any, name: str, gradients: _Gradients, world: int, guard: _Guard) -> None:
    if absent := [hook for hook in _HOOKS if not hasattr(module, hook)]:
        raise ConfigError(
            f"torch {torch.__version__} has no FSDPModule.{absent[0]}, through which gradients are "
            "summed in order; use torch 2.13 or newer, or DistributedDataParallel"
        )
    unit = _ReduceScatter(name, gradients, next(module.parameters()), guard)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_reduce_scatter_unused_params(True, recurse=False)
    module.set_custom_reduce_scatter(unit)
    if world == 1:
        module.set_all_reduce_hook(unit.alone)


class _Memory:
    """Allocates as `torch.distributed.fsdp`'s Comm."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent, and for what it comes to."""
        return torch.empty(size, dtype=dtype, device=device)


class _AllGather(_Memory):
    """The weights of one FSDP2 module in host memory: `torch.distributed.fsdp`'s AllGather."""

    def __init__(
        self, name: str, collectives: Collectives, guard: _Guard, poll: Callable[[], None]
    ) -> None:
        self._what = f"weights of {name}"
        self._collectives = collectives
        self._guard = guard
        self._poll = poll

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` [world * n], in which `input_tensor` [n] is this rank's part."""
        with self._guard(), transport_failures(self._what):
            of_all = group.size() == self._collectives.world  # and not of one dimension of a mesh
            if async_op or not of_all or not output_tensor.is_cpu:
                return dist.all_gather_single(
                    output_tensor, input_tensor, group=group, async_op=async_op
                )
            self._poll()
            wait(self._collectives.all_gather(output_tensor, self._what))
            self._poll()
        return None


class _ReduceScatter(_Memory):
    """The gradients of one FSDP2 module: `torch.distributed.fsdp`'s ReduceScatter."""

    def __init__(self, name: str, gradients: _Gradients, example: Tensor, guard: _Guard) -> None:
        self._name = name
        self._gradients = gradients
        self._example = example
        self._guard = guard

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
        if now is None or not now.last:
            output_tensor.zero_()
        with self._guard():
            self._gradients.reduce(self._name, input_tensor, output_tensor, now=copied)

    def alone(self, reduced: Tensor) -> None:
        """The same at world 1, in place."""
        self._gradients.reduce(self._name, reduced, reduced)
