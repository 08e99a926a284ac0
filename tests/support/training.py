"""What a rank does in the engine's tests: make an engine, train it, tell what came out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import zero_deepspeed
from tests.support.models import Tokens, make_model, param_groups
from zero_engine.core.engine import Engine
from zero_engine.optim import sub_groups

DATASET_SIZE = 23
"""Odd on purpose: steps of 10 samples leave a last step of 3, in micro-batches of 2 and 1."""
SUB_GROUP = 4096
"""Elements: the shards of the tiny model are 3 to 20 thousand, so they are cut into several."""


def divided(stage: int) -> dict[str, Any]:
    """A stage at which no parameter stays whole between uses, as the tiny model's all would."""
    return {"stage": stage, "stage3_param_persistence_threshold": 0}


DIVIDED = divided(3)


def config(stage: int = 0, *, bf16: bool = False, **more: Any) -> dict[str, Any]:
    """A configuration of 5 micro-batches of 2 samples; no parameter stays whole at stage 3."""
    return {
        "train_batch_size": 10,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": divided(stage),
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **more,
    }


def make_engine(
    settings: dict[str, Any], *, seed: int = 7, model: nn.Module | None = None, **more: Any
) -> Engine:
    """An engine for the tiny model, or this one, with two param groups and its own data."""
    model = model or make_model(seed)
    more = {"model_parameters": param_groups(model), "training_data": Tokens(DATASET_SIZE)} | more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sub_groups, "SUB_GROUP", SUB_GROUP)
        engine, _, _, _ = zero_deepspeed.initialize(model=model, config=settings, **more)
    return engine


def train(engine: Engine, steps: int, behind: Callable[[], None] | None = None) -> list[float]:
    """Train until `steps` steps are done in all; the mean loss of each new one.

    `behind`: what the script does behind each.
    """
    losses = []
    loader = engine.training_dataloader
    assert loader is not None
    while engine.global_steps < steps:
        for batch in loader:
            engine.backward(engine(batch))
            before = engine.global_steps
            engine.step()
            if engine.global_steps > before:
                losses.append(engine.mean_loss)
                if behind is not None:
                    behind()
            if engine.global_steps == steps:
                break
    return losses


def fingerprint(engine: Engine) -> tuple[Any, ...]:
    """Everything that must not depend on world and stage."""
    return (
        engine.weight_hash(),
        engine.mean_loss,
        engine.get_global_grad_norm(),
        engine.global_samples,
        tuple(engine.get_lr()),
    )


def run_micro_step(engine: Engine, *, step: bool) -> None:
    """The next micro-batch of the epoch, forward and backward; and the step, if it is wanted."""
    assert engine.training_dataloader is not None
    engine.backward(engine(next(iter(engine.training_dataloader))))
    if step:
        engine.step()
