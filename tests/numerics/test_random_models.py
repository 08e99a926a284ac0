"""Whatever the model is made of: one result at every stage and world, and it is plain torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zero_deepspeed
from tests.support.plain import summed
from tests.support.random_models import TREES, Vectors, build, grouped
from tests.support.world import WorldPool
from zero_comm.sums.plan import DEFAULT_BLOCK
from zero_data.global_batch import BatchShape, mix, plan_epoch, sample_ids

STEPS = 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    # Not fused: that one rounds the last elements of a tensor in another way, see test_stages.
    "AdamW": {"foreach": False},
    "SGD": {"momentum": 0.9, "foreach": False},
}

RUNS = st.fixed_dictionaries(
    {
        "tree": TREES,
        "groups": st.integers(1, 3),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "microbatches": st.integers(1, 4),
        "micro": st.integers(1, 3),
        "size": st.integers(1, 20),
        "clip": st.sampled_from([0.0, 0.01]),
        "bf16": st.booleans(),
    }
)


@settings(max_examples=20)
@given(run=RUNS)
@pytest.mark.full
def test_every_model_gives_one_result_at_every_stage_and_world_and_it_is_plain_torchs(
    worlds: WorldPool, run: dict[str, Any]
) -> None:
    results = [result for world in (1, 2) for result in worlds.run(world, train_stages, run)]
    hashes = {digest for result in results for digest, _ in result}
    assert len(hashes) == 1
    if run["bf16"]:
        return
    ours, theirs = results[0][0][1], plain_torch(run)
    assert ours.keys() == theirs.keys()
    # Without clipping to the bit; the norm of a clipped gradient is summed in another order.
    bound = {"rtol": 0.0, "atol": 0.0} if not run["clip"] else {"rtol": 1e-4, "atol": 1e-6}
    for name, value in ours.items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(theirs[name]), **bound)


def train_stages(run: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [train(run, stage) for stage in (0, 1, 2, 3)]


def train(run: dict[str, Any], stage: int) -> tuple[str, dict[str, Any]]:
    model = build(run["tree"])
    config = {
        "train_batch_size": run["microbatches"] * run["micro"],
        "train_micro_batch_size_per_gpu": run["micro"],
        "gradient_clipping": run["clip"],
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": run["bf16"]},
        "optimizer": {"type": run["optimizer"], "params": OPTIMIZERS[run["optimizer"]]},
    }
    engine, _, loader, _ = zero_deepspeed.initialize(
        model=model,
        model_parameters=grouped(model, run["groups"]),
        training_data=Vectors(run["size"]),
        config=config,
    )
    while engine.global_steps < STEPS:
        batch = next(iter(loader))
        engine.backward(engine(batch.to(engine.module.head.weight.dtype)))
        engine.step()
    weights = {name: value.tolist() for name, value in engine.module_state_dict().items()}
    return engine.weight_hash(), weights


def plain_torch(run: dict[str, Any]) -> dict[str, Any]:
    """The loop that the engine stands for, with nothing of ours but order and seeds."""
    torch.set_num_threads(1)
    model = build(run["tree"])
    groups = grouped(model, run["groups"])
    optimizer = getattr(torch.optim, run["optimizer"])(groups, **OPTIMIZERS[run["optimizer"]])
    trained = [p for p in model.parameters() if p.requires_grad]
    data, batch, size, position = Vectors(run["size"]), shape(run), run["size"], 0
    for step in range(STEPS):
        plan = next(plan_epoch(position, batch, size))
        gradients: list[list[torch.Tensor]] = []
        for index in range(plan.microbatches):
            ids = sample_ids(plan, plan.microbatch(index, 0, 1), size, size, 42)
            torch.manual_seed(mix(42, step, index))
            optimizer.zero_grad()
            loss = model(torch.stack([data[i] for i in ids]))
            (loss * (len(ids) / plan.samples)).backward()
            # Flat shards cannot tell "no gradient" from a gradient of zero.
            gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in trained])
        for param, *addends in zip(trained, *gradients, strict=True):
            param.grad = summed(addends, DEFAULT_BLOCK)
        if run["clip"]:
            torch.nn.utils.clip_grad_norm_(trained, run["clip"])
        optimizer.step()
        position += plan.samples
    return {name: value.tolist() for name, value in model.state_dict().items()}


def shape(run: dict[str, Any]) -> BatchShape:
    return BatchShape(microbatches=run["microbatches"], micro_batch=run["micro"])
