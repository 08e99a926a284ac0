"""`loss.backward()` in place of `engine.backward(loss)`, as DeepSpeed allows it.

Gradients then get the share of their micro-batch in the place of the loss; where that is a power
of two nothing rounds in another way, so the bits are those of `engine.backward`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_deepspeed
from tests.support.models import Tokens, make_model
from tests.support.training import config, divided, fingerprint, make_engine
from tests.support.world import WorldError, WorldPool
from zero_contract.errors import ZeroError
from zero_engine.core.engine import Engine

STAGES = (0, 1, 2, 3)
STEPS = 4


def run(engine: Engine, how: str) -> tuple[Any, ...]:
    """Train with one kind of backward, or with both in turn."""
    number = 0
    while engine.global_steps < STEPS:
        for batch in engine.training_dataloader:
            loss = engine(batch)
            number += 1
            if how == "plain" or (how == "mixed" and number % 2):
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
            if engine.global_steps == STEPS:
                break
    return fingerprint(engine)


def shares_of_a_quarter(stage: int, **more: Any) -> dict[str, Any]:
    return config(stage, train_batch_size=8, **more)


def trained_by_each(hows: tuple[str, ...], **more: Any) -> list[tuple[Any, ...]]:
    data = Tokens(24)
    return [
        run(make_engine(shares_of_a_quarter(stage, **more), training_data=data), how)
        for stage in STAGES
        for how in (hows if stage == 0 else hows[1:])
    ]


def test_a_plain_backward_gives_the_bits_of_engine_backward_at_every_stage(
    worlds: WorldPool,
) -> None:
    for results in worlds.run(2, trained_by_each, ("engine", "plain", "mixed")):
        assert results == results[:1] * len(results)


@pytest.mark.full
def test_a_plain_backward_gives_the_bits_of_engine_backward_in_bf16(worlds: WorldPool) -> None:
    (results,) = worlds.run(1, trained_in_bf16)
    assert results == results[:1] * len(results)


def trained_in_bf16() -> list[tuple[Any, ...]]:
    return trained_by_each(("engine", "plain"), bf16=True)


def trained_plainly() -> list[tuple[Any, ...]]:
    """In shares of a fifth, and at the end of the epoch of 2 / 3 and 1 / 3."""
    return [run(make_engine(config(stage)), "plain") for stage in STAGES]


@pytest.mark.full
def test_a_plain_backward_gives_one_result_at_every_stage_and_world_size(
    worlds: WorldPool,
) -> None:
    (alone,) = worlds.run(1, trained_plainly)
    assert alone == alone[:1] * len(STAGES)
    assert worlds.run(3, trained_plainly) == [alone] * 3
    (theirs,) = worlds.run(1, trained_by_the_engine)
    assert alone[0][1:3] == pytest.approx(theirs[1:3], rel=1e-5)  # mean loss and norm


def trained_by_the_engine() -> tuple[Any, ...]:
    return run(make_engine(config(0)), "engine")


# ---- what the loss is made from ----


class Scores(nn.Module):
    """What is needed of a model whose script computes the loss by itself, in two parts."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> dict[str, Any]:
        if self.reentrant is not None:
            x.requires_grad_()
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x).tanh()
            else:
                x = checkpoint(lambda y, own=layer: own(y).tanh(), x, use_reentrant=self.reentrant)
        self.penalty = self.layers[0].weight.square().mean()
        return {"scores": (x, x * 2), "mean": x.mean()}


def scores_engine(stage: int, reentrant: bool | None = None, **more: Any) -> Engine:
    settings = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": divided(stage),
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        **more,
    }
    return zero_deepspeed.initialize(model=Scores(reentrant), config=settings)[0]


def scores_loss(engine: Engine, number: int) -> Tensor:
    """Through both scores, the number beside them, and something that forward does not return."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    output = engine(x)
    loss = F.mse_loss(output["scores"][0], x) + output["scores"][1].abs().mean() + output["mean"]
    if engine.zero_optimization_stage() < 3 and not engine.module.reentrant:
        loss = loss + engine.module.penalty
    return loss


def scores_by(how: str, stage: int, reentrant: bool | None = None) -> str:
    engine = scores_engine(stage, reentrant)
    for number in range(8):
        loss = scores_loss(engine, number)
        loss.backward() if how == "plain" else engine.backward(loss)
        engine.step()
    assert engine.global_steps == 2
    return engine.weight_hash()


def scores_everywhere(reentrant: bool | None) -> None:
    for stage in STAGES:
        ours = scores_by("engine", stage, reentrant)
        assert scores_by("plain", stage, reentrant) == ours, stage


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_plain_backward_of_whatever_loss_gives_the_bits_of_engine_backward(
    worlds: WorldPool, reentrant: bool | None
) -> None:
    worlds.run(1, scores_everywhere, reentrant)


def test_the_mean_loss_is_that_which_forward_has_returned_or_nan(worlds: WorldPool) -> None:
    (losses,) = worlds.run(1, mean_losses)
    assert losses[0] == losses[1]
    assert math.isnan(losses[2])


def mean_losses() -> list[float]:
    engines = [make_engine(shares_of_a_quarter(1), training_data=Tokens(24)) for _ in range(2)]
    both = [run(engine, how)[1] for engine, how in zip(engines, ("engine", "plain"), strict=True)]
    unknown = zero_deepspeed.initialize(
        model=nn.Linear(4, 2), config={**config(1), "train_batch_size": 2}
    )[0]
    unknown(torch.ones(2, 4)).square().mean().backward()
    unknown.step()
    return [*both, unknown.mean_loss]


# ---- what else autograd does ----


def test_autograd_grad_is_no_backward_and_a_penalty_of_gradients_trains(worlds: WorldPool) -> None:
    for results in worlds.run(1, with_penalty):
        assert len(set(results)) == 1


def with_penalty() -> list[str]:
    hashes = []
    for stage in (0, 2, 3):
        for how in ("engine", "plain"):
            engine = scores_engine(stage, train_batch_size=4)
            x = torch.randn(4, 6, requires_grad=True, generator=torch.Generator().manual_seed(1))
            scores = engine(x)["scores"][0]
            (slope,) = torch.autograd.grad(scores.sum(), x)
            torch.autograd.grad(engine(x)["mean"], list(engine.module.parameters())[:0] or [x])
            loss = scores_loss(engine, 2) + slope.square().mean()
            if stage < 3:  # only there is the penalty a part of the loss
                loss = loss - engine.module.penalty
            loss.backward() if how == "plain" else engine.backward(loss)
            engine.step()
            assert engine.global_steps == 1
            hashes.append(engine.weight_hash())
    return hashes


def test_a_script_that_ends_steps_or_runs_without_sync_may_call_it(worlds: WorldPool) -> None:
    for results in worlds.run(2, steps_of_the_script):
        assert results == results[:1] * len(results)


def steps_of_the_script() -> list[str]:
    hashes = []
    for way in ("managed", "unmanaged", "no_sync"):
        engine = make_engine(
            shares_of_a_quarter(1, managed_gradient_accumulation=way != "unmanaged"),
            training_data=Tokens(24),
        )
        batches = iter(engine.training_dataloader)
        if way == "no_sync":
            with engine.no_sync():
                engine(next(batches)).backward()
        else:
            engine(next(batches)).backward()
            if way == "managed":
                engine.step()
        engine(next(batches)).backward()
        engine.step()
        assert engine.global_steps == 1
        hashes.append(engine.weight_hash())
    return hashes


# ---- parameters that several checkpointed parts use ----


class Shared(nn.Module):
    """A weight whose gradient comes in two parts, one after the other, if they are reentrant."""

    def __init__(self, reentrant: bool, with_bias: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(6, 6, bias=with_bias)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        if self.linear.bias is not None:  # its gradient comes last
            x = x + self.linear.bias
        for _ in range(2):
            x = checkpoint(self.multiply, x, use_reentrant=self.reentrant)
        return x.square().mean()

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.weight).tanh()


def shared_by_checkpoints(stage: int, with_bias: bool) -> None:
    hashes = []
    for reentrant in (False, True):
        settings = {**config(stage), "train_batch_size": 2}
        engine = zero_deepspeed.initialize(model=Shared(reentrant, with_bias), config=settings)[0]
        engine.backward(engine(torch.ones(2, 6)))
        engine.step()
        hashes.append(engine.weight_hash())
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_that_come_in_parts_are_added_or_refused_and_never_lost(
    worlds: WorldPool, stage: int
) -> None:
    worlds.run(1, shared_by_checkpoints, stage, True)
    with pytest.raises(WorldError, match=r"linear\.weight came twice.* use_reentrant=False"):
        worlds.run(1, shared_by_checkpoints, stage, False)


# ---- what cannot be ----


@pytest.mark.parametrize("stage", [0, 3])
def test_in_fp16_a_plain_backward_is_refused_with_the_remedy(worlds: WorldPool, stage: int) -> None:
    with pytest.raises(WorldError, match=r"engine\.scale\(loss\)\.backward\(\)"):
        worlds.run(1, plain_in_fp16, stage)


def plain_in_fp16(stage: int) -> None:
    engine = make_engine(config(stage, fp16={"enabled": True}))
    engine(next(iter(engine.training_dataloader))).backward()


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "engine"])
def test_a_backward_that_fails_half_way_leaves_nothing_in_its_step(
    worlds: WorldPool, plain: bool
) -> None:
    worlds.run(1, fail_and_go_on, 0, plain)
    with pytest.raises(WorldError, match=r"a backward\(\) of this step has failed half way"):
        worlds.run(1, fail_and_go_on, 1, plain)


def fail_and_go_on(at: int, plain: bool) -> None:
    hashes = []
    for fails in (False, True):
        engine = make_engine(shares_of_a_quarter(2), training_data=Tokens(24))
        batches = iter(engine.training_dataloader)
        for number in range(4):
            batch = next(batches)
            if fails and number == at:
                handle = engine.module.embed.weight.register_hook(_fail)
                with pytest.raises(ZeroDivisionError):
                    backward(engine, batch, plain)
                handle.remove()
                with pytest.raises(ZeroError, match="without backward"):
                    engine.step()
            backward(engine, batch, plain)
            engine.step()
        hashes.append(engine.weight_hash())
    assert hashes[0] == hashes[1]


def backward(engine: Engine, batch: Tensor, plain: bool) -> None:
    loss = engine(batch)
    loss.backward() if plain else engine.backward(loss)


def _fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


# ---- several engines ----


def two_models(stage: int) -> list[Engine]:
    settings = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": divided(stage),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return [
        zero_deepspeed.initialize(model=make_model(seed), config=settings)[0] for seed in (1, 2)
    ]


def of_two_engines() -> None:
    batch = torch.stack([Tokens(2)[0], Tokens(2)[1]])
    for stage in STAGES:
        hashes = []
        for plain in (False, True):
            engines = two_models(stage)
            for _ in range(2):
                losses = [engine(batch) for engine in engines]
                if plain:
                    (losses[0] + losses[1]).backward()
                else:
                    for engine, loss in zip(engines, losses, strict=True):
                        engine.backward(loss)
                for engine in engines:
                    engine.step()
            hashes.append([engine.weight_hash() for engine in engines])
        assert hashes[0] == hashes[1]


def test_one_plain_backward_trains_all_engines_that_the_loss_goes_through(
    worlds: WorldPool,
) -> None:
    worlds.run(1, of_two_engines)


def test_what_it_leaves_in_an_engine_that_makes_no_step_is_never_added_silently(
    worlds: WorldPool,
) -> None:
    with pytest.raises(WorldError, match=r"went through several engines, and this one has neither"):
        worlds.run(1, step_of_one_alone, False)
    worlds.run(1, step_of_one_alone, True)


def step_of_one_alone(zero_grad: bool) -> None:
    batch = torch.stack([Tokens(2)[0], Tokens(2)[1]])
    hashes = []
    for alone in (True, False):
        trained, other = two_models(1)
        if not alone:
            (trained(batch) + other(batch)).backward()
            trained.step()
            if zero_grad:
                other.zero_grad()
        other(batch).backward()
        other.step()
        hashes.append(other.weight_hash())
    assert hashes[0] == hashes[1]
