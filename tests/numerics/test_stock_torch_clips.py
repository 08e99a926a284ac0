"""Scripts that clip by torch's own functions: the same bits at every world size, and as ever."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad_norm_

import zero_torch
from tests.numerics.test_stock_torch import batches, dataset
from tests.support.stock import make
from tests.support.world import WorldPool
from zero_contract.errors import ZeroError

MAX_NORM = 0.2


def in_two_calls(model: nn.Module) -> None:
    parameters = list(model.parameters())
    norm = utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    utils.clip_grads_with_norm_(parameters, MAX_NORM, norm)


def parts(model: Any) -> None:
    module = getattr(model, "module", model)
    clip_grad_norm_(module.embed.parameters(), MAX_NORM)
    clip_grad_norm_(module.blocks.parameters(), MAX_NORM / 2)


CLIPS: dict[str, Callable[[Any], object]] = {
    "in one call": lambda model: clip_grad_norm_(model.parameters(), MAX_NORM),
    "in two calls": in_two_calls,
    "parts": parts,
    "the largest": lambda model: clip_grad_norm_(model.parameters(), 0.01, norm_type=math.inf),
    "each number": lambda model: utils.clip_grad_value_(model.parameters(), 0.001),
    "tokens": lambda model: clip_grad_norm_(model.parameters(), MAX_NORM),
    "a scaler": lambda model: clip_grad_norm_(model.parameters(), MAX_NORM),
}


def protected(wrapper: str, **more: Any) -> tuple[nn.Module, Any, zero_torch.Run]:
    model = make(wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(dataset(), batch_size=2, shuffle=True)
    return model, optimizer, zero_torch.protect(model, optimizer, loader, microbatches=5, **more)


def clipped(wrapper: str, name: str) -> str:
    """The weights of a script that clips, with its own calls."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if name == "a scaler" else None
    model, optimizer, run = protected(wrapper, scaler=scaler)
    for tokens in batches(run):
        loss = model(tokens)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        elif name == "tokens":
            run.backward(loss, tokens=int(tokens[:, 1:].gt(20).sum()))
        else:
            loss.backward()
        CLIPS[name](model)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return run.weight_hash()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.corners(name=["parts", "the largest", "a scaler"], world=[2])
def test_gradients_that_torch_clips_have_the_same_bits_at_every_world_size_and_wrapper(
    worlds: WorldPool, name: str, world: int
) -> None:
    (expected,) = worlds.run(1, clipped, "plain", name)
    for wrapper in ("ddp", "fsdp2"):
        assert worlds.run(world, clipped, wrapper, name) == [expected] * world


def weighed(wrapper: str, name: str, tokens: int) -> str:
    """The weights if each sample has as many tokens, or is weighed by itself."""
    model, optimizer, run = protected(wrapper)
    for samples in batches(run, 2):
        run.backward(model(samples), tokens=tokens * len(samples) if tokens else None)
        CLIPS[name](model)
        optimizer.step()
        optimizer.zero_grad()
    return run.weight_hash()


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp2"])
@pytest.mark.parametrize("name", sorted(CLIPS.keys() - {"a scaler", "tokens"}))
@pytest.mark.corners(name=["each number", "the largest"], wrapper=["fsdp2"])
def test_gradients_that_torch_clips_have_the_weights_of_their_tokens(
    worlds: WorldPool, name: str, wrapper: str
) -> None:
    world = 1 if wrapper == "plain" else 2
    (expected, *_) = worlds.run(1, weighed, "plain", name, 0)
    for tokens in (16, 1024):  # a power of two rounds nothing
        assert worlds.run(world, weighed, wrapper, name, tokens) == [expected] * world


def norms(wrapper: str) -> list[float]:
    """The norms that torch tells: of a step, of what is left of it, and of nothing."""
    model, optimizer, run = protected(wrapper)
    found = []
    for tokens in batches(run, 1):
        run.backward(model(tokens))
        norm = clip_grad_norm_(model.parameters(), MAX_NORM, error_if_nonfinite=True)
        found.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        last = run.last
        run.step()
    assert last
    optimizer.zero_grad()
    return [found[-1], float(clip_grad_norm_(model.parameters(), MAX_NORM))]


def test_torch_tells_the_norm_that_a_step_had(worlds: WorldPool) -> None:
    (expected,) = worlds.run(1, norms, "plain")
    assert expected[0] > MAX_NORM
    assert expected[1] == 0.0
    for wrapper in ("ddp", "fsdp2"):
        assert worlds.run(2, norms, wrapper) == [expected] * 2


def logged(wrapper: str) -> float:
    """The norm that the first rank alone looks at."""
    model, _, run = protected(wrapper)
    norm = 0.0
    for tokens in batches(run, 1):
        run.backward(model(tokens))
        if run.last and torch.distributed.get_rank() == 0:
            norm = float(utils.get_total_norm([p.grad for p in model.parameters()]))
        run.step()
    return norm


def test_one_rank_alone_may_look_at_gradients_that_it_has_whole(worlds: WorldPool) -> None:
    (expected,) = worlds.run(1, logged, "plain")
    assert worlds.run(3, logged, "ddp") == [expected, 0.0, 0.0]


def refused(wrapper: str) -> list[str]:
    model, _, run = protected(wrapper)
    other = nn.Linear(2, 2)
    other(torch.ones(2, 2)).sum().backward()
    texts = []
    for tokens in batches(run, 1):
        run.backward(model(tokens))
        if run.last:
            for given, order in (
                ([*model.parameters(), *other.parameters()], 2),
                (model.parameters(), 1),
                ([*model.parameters()] * 2, 2),
            ):
                try:
                    clip_grad_norm_(given, 1.0, norm_type=order)
                except ZeroError as error:
                    texts.append(str(error))
        run.step()
    clip_grad_norm_(other.parameters(), 1.0)
    return texts


def test_a_norm_that_would_depend_on_the_number_of_ranks_is_refused(worlds: WorldPool) -> None:
    count = len(list(make("plain").parameters()))
    beyond = (
        "would depend on the number of ranks; clip by one of order 2 or infinity, the "
        "gradients of each run by themselves, and each of them once"
    )
    texts = [
        f"a norm of order 2 of {count + 2} gradients, of which this run has {count}, {beyond}",
        f"a norm of order 1 of {count} gradients, of which this run has {count}, {beyond}",
        f"a norm of order 2 of {2 * count} gradients, of which this run has {count}, {beyond}",
    ]
    assert worlds.run(2, refused, "fsdp2") == [texts, texts]
    assert worlds.run(2, refused, "ddp") == [[], []]  # each rank has them whole
