"""What a script does beside its training: it changes no bit, or is told of by name."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

import zero_torch
from tests.numerics.promises.back_ends import (
    IN,
    Net,
    OfStockTorch,
    Place,
    Recipe,
    data,
    everywhere,
    training,
)
from tests.support.saving import heard
from tests.support.stock import wrap
from tests.support.world import WorldPool
from zero_contract.errors import ZeroError
from zero_torch.hooks import fsdp2
from zero_torch.wrapped import local

STOCK: list[Place] = [("plain", 1), ("ddp", 2), ("fsdp2", 1), ("fsdp2", 2)]
ENGINE: list[Place] = [("stage0", 2), ("stage1", 3), ("stage3", 2)]


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.ones(3, IN))
    model.train()


def that_is_evaluated(model: nn.Module) -> Optimizer:
    """After the last backward, and before the weights change."""
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: evaluate(model))
    return optimizer


def that_adds_noise(model: nn.Module) -> Optimizer:
    optimizer = sgd(model)

    def warm(*_: object) -> None:
        optimizer.param_groups[0]["momentum"] = 0.5 + drawn() / 10

    optimizer.register_step_post_hook(warm)
    return optimizer


def drawn() -> float:
    """A random number from all generators of the process."""
    return random.random() + float(np.random.uniform()) + float(torch.rand(()))


def shrink(model: nn.Module, _: Optimizer, __: int) -> None:
    evaluate(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def keep_gathered(model: Any, _: Optimizer, __: int) -> None:
    if hasattr(model, "set_reshard_after_backward"):
        model.set_reshard_after_backward(False)


def draw_a_rate(_: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step:  # before the first one the script's own seed decides
        optimizer.param_groups[0]["lr"] = drawn() / 50


def add_noise(_: object, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                local(parameter.grad).add_(drawn() / 100)


HARMLESS: dict[str, tuple[Recipe, list[Place]]] = {
    "evaluates before the optimizer acts": (
        Recipe(optimizer=that_is_evaluated),
        [*STOCK, ("stage0", 2)],
    ),
    "evaluates, then changes weights": (Recipe(optimizer=sgd, before=shrink), STOCK),
    "keeps weights gathered": (Recipe(optimizer=sgd, before=keep_gathered), STOCK),
    "draws a learning rate": (Recipe(optimizer=sgd, before=draw_a_rate), [*STOCK, *ENGINE]),
    "draws as the optimizer acts": (Recipe(optimizer=that_adds_noise), [*STOCK, *ENGINE]),
    "noise on gradients": (Recipe(optimizer=sgd, between=add_noise), [*STOCK, ("ddp", 3)]),
    "noise on gradients, by a loop of its own": (
        Recipe(optimizer=sgd, between=add_noise, own_loop=True),
        [*STOCK, ("ddp", 3)],
    ),
}


@pytest.mark.parametrize("what", HARMLESS)
@pytest.mark.corners(what=["evaluates before the optimizer acts", "draws a learning rate"])
def test_what_a_script_does_beside_training_has_the_same_bits_everywhere(
    worlds: WorldPool, tmp_path: Path, what: str
) -> None:
    recipe, places = HARMLESS[what]
    found = everywhere(worlds, recipe, tmp_path, places)
    first = found["plain", 1]
    assert len(first) == 4
    assert found == dict.fromkeys(places, first)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "lr": lambda rate: rate * 0.9,
    "weight_decay": lambda decay: decay + 0.1,
    "betas": lambda betas: (betas[0] * 0.9, betas[1]),
    "amsgrad": lambda is_on: not is_on,
}


def change(option: str, _: object, optimizer: Optimizer) -> None:
    group = optimizer.param_groups[0]
    group[option] = CHANGES[option](group[option])


def told_of_changes(option: str, back_end: str) -> list[str]:
    """What a script is told that changes an option after each backward: the error comes last."""
    own = training(Recipe(between=partial(change, option)), back_end)
    with heard(logging.WARNING) as lines:
        try:
            own.train(1)
        except ZeroError as error:
            lines.append(str(error))
    return [line for line in lines if "in the middle of a step" in line]


@pytest.mark.parametrize("option", CHANGES)
@pytest.mark.corners(option=["lr", "betas"])
def test_an_option_that_changes_for_every_micro_batch_is_named(
    worlds: WorldPool, option: str
) -> None:
    """A step has fewer micro-batches of a rank where there are more ranks."""
    for back_end in ("plain", "ddp", "fsdp2", "stage0", "stage3"):
        ((told,),) = worlds.run(1, told_of_changes, option, back_end)
        assert told.startswith(f"{option} of param group 0 has changed from "), back_end


def at_a_rate_of_its_own(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01 * (1 + dist.get_rank()))


def test_a_learning_rate_of_one_rank_alone_is_refused_before_weights_change(
    worlds: WorldPool, tmp_path: Path
) -> None:
    places = [("ddp", 2), ("fsdp2", 2), ("stage0", 2), ("stage3", 2)]
    clipped = Recipe(optimizer=at_a_rate_of_its_own, max_norm=0.1)
    for recipe in (Recipe(optimizer=at_a_rate_of_its_own), clipped):
        for place, told in everywhere(worlds, recipe, tmp_path, places).items():
            assert len(told) == 1, place
            assert "param group 0: lr is 0.01 on rank 0 and 0.02 on rank 1" in told[0], place


def with_a_group_of_its_own(model: nn.Module) -> Optimizer:
    """Of a frozen parameter, so that each rank trains the same ones."""
    params = [*model.parameters()]
    params[0].requires_grad_(False)
    optimizer = torch.optim.SGD(params[dist.get_rank() :], lr=0.01)
    if dist.get_rank():
        optimizer.add_param_group({"params": params[:1], "lr": 0.02})
    return optimizer


def test_a_param_group_of_one_rank_alone_is_refused_before_weights_change(
    worlds: WorldPool, tmp_path: Path
) -> None:
    places = [("ddp", 2), ("fsdp2", 2)]
    recipe = Recipe(optimizer=with_a_group_of_its_own)
    for place, told in everywhere(worlds, recipe, tmp_path, places).items():
        assert len(told) == 1, place
        assert "param group 1: dampening is None on rank 0 and 0 on rank 1" in told[0], place


def clipped_to_a_norm_of_its_own(back_end: str) -> str:
    own = training(Recipe(optimizer=sgd, max_norm=1.0 + dist.get_rank()), back_end)
    with pytest.raises(ZeroError) as refused:
        own.train(1)
    return str(refused.value)


def test_a_max_norm_of_one_rank_alone_is_refused_before_weights_change(worlds: WorldPool) -> None:
    for back_end in ("ddp", "fsdp2"):
        for told in worlds.run(2, clipped_to_a_norm_of_its_own, back_end):
            assert "max_norm is 1.0 on rank 0 and 2.0 on rank 1" in told


class Masked(Net):
    """Each rank makes a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(dist.get_rank())
            self.register_buffer("mask", torch.rand(IN))
            self.register_buffer("passing", torch.rand(IN), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.mask + self.passing)


def test_buffers_are_those_of_rank_0_whatever_the_others_have_made(
    worlds: WorldPool, tmp_path: Path
) -> None:
    places = [("plain", 1), ("ddp", 2), ("fsdp2", 2), ("stage0", 2), ("stage3", 2)]
    found = everywhere(worlds, Recipe(model=Masked), tmp_path, places)
    assert found == dict.fromkeys(places, found["plain", 1])


# ---- what FSDP2 would leave out of the sums ----


def penalize(run: Any, model: Any, loss: Tensor) -> None:
    run.backward(loss + model.down.weight.full_tensor().square().sum())


def divide(_: Any, model: Any, __: Tensor) -> None:
    model.set_gradient_divide_factor(2.0)


def leave_out(_: Any, model: Any, __: Tensor) -> None:
    model.set_requires_all_reduce(False)


OUTSIDE: dict[str, tuple[Callable[[Any, Any, Tensor], None], str]] = {
    "a penalty": (penalize, "down.weight got a gradient of its own, not in a forward"),
    "no all-reduce": (leave_out, "no gradient was reduced in this micro-step"),
    "a factor": (divide, r"set_gradient_divide_factor() would take the sum of the gradients out"),
}


def refused(what: str) -> str:
    torch.manual_seed(0)
    net = Net()
    model = wrap(net, "fsdp2", [net.down])
    optimizer = sgd(model)
    loader = torch.utils.data.DataLoader(data(), batch_size=2)
    if what == "a hook":
        model.get_parameter("up.weight").register_hook(lambda gradient: gradient / 2)
    try:
        run = zero_torch.protect(model, optimizer, loader, microbatches=4)
        (batch,) = next(iter(run.loader))
        OUTSIDE[what][0](run, model, model(batch))
    except ZeroError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", [*OUTSIDE, "a hook"])
def test_a_gradient_that_would_be_in_no_sum_of_fsdp2_is_refused_by_name(
    worlds: WorldPool, what: str
) -> None:
    expected = OUTSIDE[what][1] if what in OUTSIDE else "up.weight has a gradient hook of the"
    for told in worlds.run(2, refused, what):
        assert expected in told


def summed_over_replicas(off: bool) -> str:
    """The weights of HSDP, of which a script may have left the all-reduce out before."""
    torch.manual_seed(0)
    net = Net()
    model: Any = wrap(net, "hsdp", [net.down])
    if off:
        model.set_requires_all_reduce(False)
    loader = torch.utils.data.DataLoader(data(), batch_size=2)
    run = zero_torch.protect(model, sgd(model), loader, microbatches=4)
    for (batch,) in run.loader:
        run.backward(model(batch))
        model.set_requires_all_reduce(True)
        run.step()
    return run.weight_hash()


def test_replicas_of_hsdp_get_their_sums_whatever_was_set_before(worlds: WorldPool) -> None:
    (expected,) = set(worlds.run(4, summed_over_replicas, False))
    assert set(worlds.run(4, summed_over_replicas, True)) == {expected}


HARMLESS_SETTERS = {
    "set_allocate_memory_from_process_group_for_comm",
    "set_is_last_backward",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_post_optim_event",
    "set_reduce_scatter_divide_factor",  # calls set_gradient_divide_factor()
    "set_reduce_scatter_max_input_buffers",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
    "set_unshard_in_backward",
}
"""They choose when weights and sums travel, or through which memory."""


def test_every_setter_of_fsdp2_is_refused_or_changes_no_sum() -> None:
    setters = {name for name in vars(FSDPModule) if name.startswith("set_")}
    assert setters == {*fsdp2._HOOKS, *fsdp2._SYNCS} | HARMLESS_SETTERS


# ---- what a forward keeps elsewhere ----


class Keeps(Net):
    """A forward that keeps something where no checkpoint has it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.constant = how, 0, 2.0
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "attribute":
            self.calls += 1
        elif self.how == "buffer":
            self.scale *= 0.9
        return super().forward(x * self.scale)


def told_of(how: str, back_end: str) -> list[str]:
    with heard(logging.WARNING) as lines:
        own = training(Recipe(model=partial(Keeps, how)), back_end)
        own.train(2)
        own.close()
    return [line for line in lines if "the forward" in line]


@pytest.mark.parametrize("back_end", ["ddp", "stage3"])
@pytest.mark.corners(back_end=["stage3"])
def test_what_a_forward_keeps_in_no_checkpoint_is_told_once(
    worlds: WorldPool, back_end: str
) -> None:
    expected = {"attribute": "changes the attribute calls", "buffer": "writes to the buffer scale"}
    for how, sentence in expected.items():
        first, second = worlds.run(2, told_of, how, back_end)
        assert [sentence in line for line in first] == [True]
        assert second == []
    assert worlds.run(2, told_of, "nothing", back_end) == [[], []]


def copied() -> tuple[bool, str]:
    import copy

    own = training(Recipe(), "plain")
    own.train(1)
    copy_ = copy.deepcopy(own.module)
    weights = [each.detach().clone() for each in copy_.parameters()]
    copy_(torch.ones(2, IN)).backward()
    own.train(4)
    own.close()
    return all(map(torch.equal, weights, copy_.parameters())), own.hash()


def test_a_copy_of_a_protected_module_is_a_model_of_its_own(worlds: WorldPool) -> None:
    ((unchanged, found),) = worlds.run(1, copied)
    assert unchanged
    assert worlds.run(1, trained_alone) == [found]


def trained_alone() -> str:
    own = training(Recipe(), "plain")
    own.train(4)
    own.close()
    return own.hash()


# ---- a schedule that nobody saves ----


def saved_with(given: bool, back_end: str, root: str) -> list[str]:
    def schedule(optimizer: Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    own = training(Recipe(scheduler=schedule if given else None), back_end)
    if not given:
        schedule(own.optimizer)
    own.train(1)
    with heard(logging.WARNING) as lines:
        for tag in "ab":
            own.session.save(root, tag)
    own.close()
    return [line for line in lines if "scheduler" in line]


@pytest.mark.parametrize("back_end", ["ddp", "stage1"])
@pytest.mark.corners(back_end=["ddp"])
def test_a_scheduler_that_is_in_no_checkpoint_is_told_of_once(
    worlds: WorldPool, tmp_path: Path, back_end: str
) -> None:
    first, second = worlds.run(2, saved_with, False, back_end, str(tmp_path / "own"))
    assert ["begins it again; give it to initialize" in line for line in first] == [True]
    assert second == []
    assert worlds.run(2, saved_with, True, back_end, str(tmp_path / "given")) == [[], []]


# ---- a metric for a scheduler ----


def losses(back_end: str) -> list[float]:
    own = training(Recipe(), back_end)
    of_run: Any = own.run if isinstance(own, OfStockTorch) else None
    found = [of_run.loss if of_run is not None else own.engine.mean_loss for _ in own.steps(4)]
    own.close()
    return found


def test_the_loss_of_a_step_has_the_same_bits_at_every_world_size(worlds: WorldPool) -> None:
    (expected,) = worlds.run(1, losses, "plain")
    assert len(expected) == 4
    for back_end, world in [("ddp", 3), ("fsdp2", 4), ("stage0", 1), ("stage3", 2)]:
        assert worlds.run(world, losses, back_end) == [expected] * world, (back_end, world)


# ---- two trainings in one process ----


def of_a_gan() -> list[str]:
    """A generator and a critic, whose noise is drawn behind the other's step."""
    torch.manual_seed(0)
    wrapper = "ddp" if dist.get_world_size() > 1 else "plain"
    pair = [wrap(nn.Linear(IN, IN), wrapper), wrap(nn.Linear(IN, 1), wrapper)]
    runs = [
        zero_torch.protect(
            model, sgd(model), torch.utils.data.DataLoader(data(), batch_size=2), microbatches=4
        )
        for model in pair
    ]
    (generator, critic), (of_generator, of_critic) = pair, runs
    for (real,), (other,) in zip(of_critic.loader, of_generator.loader, strict=True):
        fake = generator(torch.randn_like(real)).detach()
        of_critic.backward((critic(real) - 1).square().mean() + critic(fake).square().mean())
        of_critic.step()
        of_generator.backward((generator(torch.randn_like(other)) - 1).square().mean())
        of_generator.step()
    hashes = [run.weight_hash() for run in runs]
    for run in runs:
        run.close()
    return hashes


def test_the_noise_of_a_gan_is_that_of_its_micro_batch_whoever_steps_before(
    worlds: WorldPool,
) -> None:
    (expected,) = worlds.run(1, of_a_gan)
    for world in (2, 3):
        assert worlds.run(world, of_a_gan) == [expected] * world
