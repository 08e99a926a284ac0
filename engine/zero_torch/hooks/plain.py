"""A model in one process: the ordered sum in the place of autograd's accumulation.

A parameter that a micro-batch does not use has a gradient of zeros there, as under DDP and FSDP2.
One that is frozen has none, whenever that was.

Must always hold: a gradient is added at the end of the backward, when all that a micro-batch gives
to it has come. A module that is used twice may give it in two parts.
"""

from __future__ import annotations

from functools import partial

import torch

from zero_contract.errors import ConfigError
from zero_torch.ordered_gradients import OrderedGradients, as_real, check_taken


def attach(gradients: OrderedGradients) -> None:
    """Let every trained parameter add its gradients through `gradients`."""
    hooked: set[str] = set()

    def add() -> None:
        for name, parameter in gradients.trained.items():
            gradient = parameter.grad
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            if gradient.requires_grad:  # create_graph=True; what is summed has no graph
                gradient = parameter.grad = gradient.detach()
            if gradient.is_sparse:  # of a function; `check_gradients` knows embeddings
                raise ConfigError(f"the gradient of {name} is sparse; give it sparse=False")
            # A copy, if the gradient is not contiguous, or lazily conjugated.
            flat = gradient.resolve_conj().reshape(-1)
            gradients.reduce(name, as_real(flat), as_real(flat))
            # The sum was made in the copy.
            if flat.data_ptr() != gradient.data_ptr():
                gradient.copy_(flat.view(gradient.shape))

    def hook() -> None:
        """Torch takes hooks of parameters that require gradients, and keeps those of others."""
        for name in gradients.trained.keys() - hooked:
            gradients.trained[name].register_post_accumulate_grad_hook(partial(arrive, name))
            hooked.add(name)

    def arrive(name: str, _: object) -> None:  # what a hook of the script before it returns
        check_taken(name, gradients.trained[name])
        gradients.arrive(name)

    gradients.ends.append(add)
    gradients.changes.append(hook)
    hook()
