"""The training loop that the engine stands for, by plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
        gradients: list[list[Tensor]] = []
        for index in range(plan.microbatches):
            microbatch = plan.microbatch(index, 0, 1)
            ids = sample_ids(plan, microbatch, DATASET_SIZE, DATASET_SIZE, 42)
            tokens = torch.stack([data[i] for i in ids])
            torch.manual_seed(mix(42, step, index))
            made.zero_grad()
            (model(tokens) * (len(ids) / plan.samples)).backward()
            # Flat shards cannot tell "no gradient" from a gradient of zero.
            gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in trained])
        for param, *addends in zip(trained, *gradients, strict=True):
            param.grad = summed(addends, 8)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(trained, clip)
        made.step()
        position += plan.samples
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def to_int8(values: Tensor) -> Tensor:
    """Each 256 values as int8 of a scale of their own, and back."""
    blocks = values.float().view(-1, 256)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    codes = (blocks / torch.where(scales > 0, scales, 1.0)).round().to(torch.int8)
    return (codes.float() * scales).flatten()


def summed(
    gradients: Sequence[Tensor], block: int, rounded: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The definition of the sum, word for word: a chain over blocks, a tree inside a block.

    Args:
        gradients: Of all micro-batches.
        block: B.
        rounded: What becomes of the sum of each block before it is added to the chain.
    """
    becomes = rounded or (lambda of_block: of_block)

    def tree(start: int, size: int) -> Tensor:
        if size == 1:
            given = gradients[start]
            return given if given.dtype in (torch.float64, torch.complex64) else given.float()
        left, middle = tree(start, size // 2), start + size // 2
        return left if middle >= len(gradients) else left + tree(middle, size // 2)

    total = becomes(tree(0, block))
    for start in range(block, len(gradients), block):
        total = total + becomes(tree(start, block))
    return total
