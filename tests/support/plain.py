"""The training loop that the engine stands for, by plain torch in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.support.models import Tokens, make_model, param_groups
from tests.support.training import DATASET_SIZE
from zero_data.global_batch import BatchShape, mix, plan_epoch, sample_ids


def plain_torch(
    steps: int,
    optimizer: str | type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    clip: float | None = None,
) -> dict[str, Any]:
    """Train the tiny model with nothing of ours but the order of the samples and the seeds.

    Args:
        steps: How many.
        optimizer: A class, or the name of one of torch.optim.
        options: Of the optimizer.
        clip: The largest norm of all gradients.

    Returns:
        The state_dict of the model, as arrays.
    """
    torch.set_num_threads(1)
    model = make_model()
    cls: Any = getattr(torch.optim, optimizer) if isinstance(optimizer, str) else optimizer
    made = cls(param_groups(model), **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    data, batch = Tokens(DATASET_SIZE), BatchShape(microbatches=5, micro_batch=2)
    position = 0
    for step in range(steps):
        plan = next(plan_epoch(position, batch, DATASET_SIZE))
        made.zero_grad()
        for index in range(plan.microbatches):
            microbatch = plan.microbatch(index, 0, 1)
            ids = sample_ids(plan, microbatch, DATASET_SIZE, DATASET_SIZE, 42)
            tokens = torch.stack([data[i] for i in ids])
            torch.manual_seed(mix(42, step, index))
            (model(tokens) * (len(ids) / plan.samples)).backward()
        for param in trained:  # flat shards cannot tell "no gradient" from a gradient of zero
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(trained, clip)
        made.step()
        position += plan.samples
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}
