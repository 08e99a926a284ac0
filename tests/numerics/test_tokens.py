"""Unequal numbers of tokens: each counts the same, at every world size and stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import zero_deepspeed
import zero_torch
from tests.support.world import WorldError, WorldPool, one_result

SAMPLES, LONGEST, STEPS = 23, 9, 4


class Ragged(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of 0 to 8 values, padded, and which of the places count."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        values = torch.randn(LONGEST, generator=generator)
        return values, torch.arange(LONGEST) < index % LONGEST


def loss_of(model: Any, values: Tensor, counts: Tensor) -> tuple[Tensor, int]:
    """The sum of squared errors over the places that count, and their number."""
    errors = (model(values.unsqueeze(-1)).squeeze(-1).float() - values.float().sin()) ** 2
    return (errors * counts).sum(), int(counts.sum())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 10,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        **more,
    }


def train(stages: tuple[int, ...], form: str, more: str = "{}") -> list[Any]:
    """The hash, and losses and norms of every step, at each stage."""
    results = []
    for stage in stages:
        config = settings(stage, **json.loads(more))
        engine, *_ = zero_deepspeed.initialize(model=net(), training_data=Ragged(), config=config)
        curve: list[tuple[float, float | None]] = []
        while engine.global_steps < STEPS:
            for values, counts in engine.training_dataloader:
                backward(engine, loss_of(engine, values, counts), form)
                engine.step()
                if engine.global_steps > len(curve):
                    curve.append((engine.mean_loss, engine.get_global_grad_norm()))
                if engine.global_steps == STEPS:
                    break
        results.append((engine.weight_hash(), curve))
    return results


def backward(engine: Any, loss: tuple[Tensor, int], form: str) -> None:
    summed, count = loss
    match form:
        case "sum and count":
            engine.backward(loss)
        case "mean and tokens":
            engine.backward(summed / max(count, 1), tokens=torch.tensor(count))
        case "plain":
            engine.scale(loss).backward()
        case "samples":
            engine.backward(summed / max(count, 1))
        case "some":
            engine.backward(summed, tokens=count if engine.micro_steps % 2 else None)


def train_stock(wrapper: str, clip: float | None, form: str) -> list[Any]:
    """The same by stock PyTorch."""
    model: Any = net()
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    elif wrapper == "fsdp2":
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader = DataLoader(Ragged(), batch_size=2, shuffle=True)
    run = zero_torch.protect(model, optimizer, loader, microbatches=5)
    number, curve = 0, list[float | None]()
    while run.global_step < STEPS:
        for values, counts in run.loader:
            summed, count = loss_of(model, values, counts)
            number += 1
            given = form == "tokens" or (form == "some" and number % 2)
            run.backward(summed / max(count, 1), tokens=count if given else None)
            if run.step(clip):
                curve.append(run.grad_norm)
            if run.global_step == STEPS:
                break
    return [run.weight_hash(), curve]


def test_stock_pytorch_refuses_a_step_of_which_some_have_a_count(worlds: WorldPool) -> None:
    with pytest.raises(WorldError, match="micro-batches of this step have no token count"):
        worlds.run(2, train_stock, "ddp", None, "some")


def test_it_is_the_mean_over_all_tokens_of_the_global_batch(worlds: WorldPool) -> None:
    for form in ("sum and count", "mean and tokens"):
        ((_, curve),) = worlds.run(3, train, (3,), form)[0]
        expected = torch.tensor(plain_torch())
        torch.testing.assert_close(torch.tensor(curve), expected, rtol=2e-5, atol=1e-6)


def plain_torch() -> list[tuple[float, float]]:
    """The whole global batch at once, divided by its number of tokens."""
    from zero_data.global_batch import BatchShape, plan_epoch, sample_ids

    model, data, position = net(), Ragged(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    curve = []
    for _ in range(STEPS):
        plan = next(plan_epoch(position, BatchShape(microbatches=5, micro_batch=2), SAMPLES))
        microbatches = [plan.microbatch(index, 0, 1) for index in range(plan.microbatches)]
        ids = [
            i
            for microbatch in microbatches
            for i in sample_ids(plan, microbatch, SAMPLES, SAMPLES, 42)
        ]
        samples = [data[i] for i in ids]
        values, counts = (torch.stack(part) for part in zip(*samples, strict=True))
        summed, count = loss_of(model, values, counts)
        loss = summed / count
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
        position += plan.samples
    return curve


def test_in_fp16_the_loss_scale_divides_out(worlds: WorldPool) -> None:
    fp16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 4}
    one = one_result(worlds, train, (0, 3), "sum and count", json.dumps({"fp16": fp16}))
    assert one[0] == one[1]
    exact = [loss for loss, _ in worlds.run(1, train, (0,), "sum and count")[0][0][1]]
    assert [loss for loss, _ in one[0][1]] == pytest.approx(exact, rel=0.02)


def count(root: str, steps: int, form: str) -> tuple[int, int]:
    """The tokens of the run up to this step, and those that this rank has given; saves."""
    engine, *_ = zero_deepspeed.initialize(model=net(), training_data=Ragged(), config=settings(1))
    engine.load_checkpoint(root)
    given = 0
    while engine.global_steps < steps:
        for values, counts in engine.training_dataloader:
            backward(engine, loss_of(engine, values, counts), form)
            engine.step()
            given += int(counts.sum())
            if engine.global_steps == steps:
                break
    engine.save_checkpoint(root)
    return engine._run.cursor.tokens, given


def test_the_tokens_of_a_run_are_counted_across_checkpoints_and_world_sizes(
    worlds: WorldPool, tmp_path: Path
) -> None:
    ((tokens, given),) = worlds.run(1, count, str(tmp_path / "one"), STEPS, "sum and count")
    assert tokens == given > 0
    root = str(tmp_path / "changes")
    half = worlds.run(3, count, root, STEPS // 2, "mean and tokens")
    assert len({total for total, _ in half}) == 1, "padding micro-batches do not count"
    whole = worlds.run(2, count, root, STEPS, "mean and tokens")
    assert [total for total, _ in whole] == [tokens, tokens]
    ((none, _),) = worlds.run(1, count, str(tmp_path / "none"), 1, "samples")
    assert none == 0


def test_a_step_with_and_without_counts_is_an_error_on_every_rank(worlds: WorldPool) -> None:
    with pytest.raises(WorldError) as caught:
        worlds.run(2, train, (1,), "some")
    message = "3 of 5 micro-batches of this step have no token count, the others have"
    assert str(caught.value).count("errors.ZeroError: " + message) == 2


@pytest.mark.parametrize("tokens", [2.5, -1, 1 << 25])
def test_what_is_no_number_of_tokens_is_named(worlds: WorldPool, tokens: float) -> None:
    with pytest.raises(WorldError, match="is not a number of tokens; give a whole number from 0"):
        worlds.run(1, give, tokens)


def test_a_tensor_that_is_no_number_of_tokens_is_named_before_weights_change(
    worlds: WorldPool,
) -> None:
    with pytest.raises(
        WorldError, match="a tensor of tokens= in this step is not a number of"
    ) as e:
        worlds.run(2, give_a_tensor)
    assert str(e.value).count("errors.ZeroError: backward(): a tensor of tokens= in this step") == 2


def give_a_tensor() -> None:
    engine, *_ = zero_deepspeed.initialize(model=net(), config=settings(0))
    for _ in range(3):  # 5 micro-batches on two ranks
        engine.backward(engine(torch.ones(2, 1)).sum(), tokens=torch.tensor(2.5))
        engine.step()


def give(tokens: float) -> None:
    engine, *_ = zero_deepspeed.initialize(model=net(), config=settings(0))
    engine.backward(engine(torch.ones(2, 1)).sum(), tokens=tokens)
