"""A model in one process: the ordered sum in the place of autograd's accumulation.

A parameter that a micro-batch does not use has a gradient of zeros there, as under DDP and FSDP2.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from zero_contract.errors import ConfigError
from zero_torch.ordered_gradients import OrderedGradients


def attach(trained: Mapping[str, nn.Parameter], gradients: OrderedGradients) -> None:
    """Let every trained parameter add its gradients through `gradients`."""
    used: set[str] = set()

    def fill() -> None:
        """Give the others zeros, at the end of a backward."""
        for name in trained.keys() - used:
            trained[name].grad = torch.zeros_like(trained[name])
            _reduce(name, gradients, used, trained[name])
        used.clear()

    gradients.ends.append(fill)
    for name, parameter in trained.items():
        parameter.register_post_accumulate_grad_hook(partial(_reduce, name, gradients, used))


def _reduce(name: str, gradients: OrderedGradients, used: set[str], parameter: Tensor) -> None:
    used.add(name)
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise ConfigError(f"the gradient of {name} is sparse; make its embedding with sparse=False")
    flat = gradient.reshape(-1)  # a copy, if the gradient is not contiguous
    gradients.reduce(name, flat, flat)
    if flat.data_ptr() != gradient.data_ptr():
        gradient.copy_(flat.view(gradient.shape))
