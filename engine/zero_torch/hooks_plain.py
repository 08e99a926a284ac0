"""A model in one process: the ordered sum in the place of autograd's accumulation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from zero_contract.errors import ConfigError
from zero_torch.ordered_gradients import OrderedGradients


def attach(trained: Mapping[str, nn.Parameter], gradients: OrderedGradients) -> None:
    """Let every trained parameter add its gradients through `gradients`."""
    for name, parameter in trained.items():
        parameter.register_post_accumulate_grad_hook(partial(_reduce, name, gradients))


def _reduce(name: str, gradients: OrderedGradients, parameter: Tensor) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise ConfigError(f"the gradient of {name} is sparse; make its embedding with sparse=False")
    flat = gradient.reshape(-1)  # a copy, if the gradient is not contiguous
    gradients.reduce(name, flat, flat)
    if flat.data_ptr() != gradient.data_ptr():
        gradient.copy_(flat.view(gradient.shape))
