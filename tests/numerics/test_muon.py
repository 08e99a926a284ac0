"""Muon: one result on whole parameters and on shards, whichever rank has a matrix for a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.support.models import make_model
from tests.support.training import config, make_engine, train
from tests.support.world import (
    Stages,
    WorldError,
    WorldPool,
    of_stages,
    one_of_stages,
    one_result,
)
from zero_deepspeed.utils import safe_get_full_optimizer_state
from zero_engine.optim.muon import QUINTIC, Muon, orthogonalized

STAGES = (0, 1, 2, 3)
STEPS = 4
MUON: dict[str, Any] = {
    "type": "Muon",
    "params": {"lr": 0.01, "adam_lr": 3e-3, "weight_decay": 0.1, "momentum": 0.9},
}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.corners(method=["gram"], bf16=[True])
@of_stages
def test_the_bits_are_those_of_every_stage_and_world(
    worlds: WorldPool, stages: Stages, method: str, bf16: bool
) -> None:
    one_of_stages(worlds, stages, train_stage, method, bf16)


def train_stage(stage: int, method: str, bf16: bool) -> str:
    optimizer = {"type": "Muon", "params": MUON["params"] | {"ns_method": method}}
    engine = make_engine(config(stage, bf16=bf16, optimizer=optimizer))
    train(engine, STEPS)
    return engine.weight_hash()


# ---- against plain torch ----


def net() -> nn.Sequential:
    torch.manual_seed(0)
    # No matrix lies within one rank's shard; two are tall, one is wide.
    return nn.Sequential(
        nn.Conv1d(9, 30, 4), nn.Tanh(), nn.Flatten(), nn.Linear(90, 70), nn.Tanh(), nn.Linear(70, 3)
    )


def batch(step: int) -> Tensor:
    return torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(step))


def train_on_shards(stage: int) -> dict[str, Tensor]:
    settings = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0}
    optimizer = {"type": "Muon", "params": MUON["params"] | {"ns_method": "standard"}}
    settings |= {"zero_optimization": {"stage": stage}, "optimizer": optimizer}
    engine, *_ = zero_deepspeed.initialize(model=net(), config=settings)
    for step in range(STEPS):
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
    return engine.module_state_dict()


def train_plainly() -> dict[str, Tensor]:
    """The algorithm as the paper has it, on whole parameters, with torch's Adam for the rest."""
    torch.set_num_threads(1)
    model = net()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    adam = torch.optim.AdamW(
        [p for p in model.parameters() if p.dim() < 2],
        lr=3e-3,
        betas=(0.9, 0.95),
        eps=1e-10,
        weight_decay=0.1,
    )
    momenta = [torch.zeros_like(matrix) for matrix in matrices]
    for step in range(STEPS):
        model.zero_grad()
        model(batch(step)).square().mean().backward()
        adam.step()
        with torch.no_grad():
            for matrix, momentum in zip(matrices, momenta, strict=True):
                momentum.mul_(0.9).add_(matrix.grad, alpha=0.1)
                update = five_steps(0.1 * matrix.grad + 0.9 * momentum)
                factor = max(1, matrix.size(-2) / matrix.size(-1)) ** 0.5
                matrix.mul_(1 - 0.01 * 0.1).sub_(0.01 * factor * update)
    return model.state_dict()


def five_steps(x: Tensor) -> Tensor:
    a, b, c = QUINTIC
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


@pytest.mark.parametrize("stage", STAGES)
def test_on_shards_it_is_the_algorithm_on_whole_parameters(worlds: WorldPool, stage: int) -> None:
    plain = train_plainly()
    for rank in worlds.run(2, train_on_shards, stage):
        for name, value in rank.items():
            torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (50, 50), (3, 20, 30)], ids=str)
def test_either_method_brings_all_singular_values_near_1(
    method: str, shape: tuple[int, ...]
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    factor = orthogonalized(matrix, steps=5, method=method)
    values = torch.linalg.svdvals(factor)
    assert 0.6 < values.min() <= values.max() < 1.3
    torch.testing.assert_close(factor, five_steps(matrix), rtol=1e-3, atol=1e-4)


# ---- torch's own ----


def make_torchs(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    options: dict[str, Any] = {"weight_decay": 0.05, "adjust_lr_fn": "match_rms_adamw"}
    return torch.optim.Muon(matrices, lr=torch.tensor(0.02), momentum=0.9, **options)


def train_torchs(path: str) -> tuple[list[str], list[float]]:
    """The hashes of stages and tiers, and the rates that a scheduler of the script has set."""
    hashes, rates = [], []
    cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": path}
    for stage, offload in [*((s, {}) for s in STAGES), (2, cpu), (3, nvme)]:
        settings = config(stage) | {"zero_optimization": {"stage": stage}}
        if offload:
            settings["zero_optimization"]["offload_optimizer"] = offload
        del settings["optimizer"]
        model = make_model()
        optimizer = make_torchs(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        engine = make_engine(
            settings,
            model=model,
            optimizer=optimizer,
            model_parameters=None,
            lr_scheduler=schedule,
        )
        assert engine.optimizer is optimizer
        train(engine, 3)
        hashes.append(engine.weight_hash())
        rates.append(float(engine.get_lr()[0]))
    return hashes, rates


@pytest.mark.full
def test_an_object_of_torchs_muon_gives_one_result_at_every_stage_world_and_tier(
    worlds: WorldPool, tmp_path: Path
) -> None:
    hashes, rates = one_result(worlds, train_torchs, str(tmp_path), sizes=(1, 2, 3))
    assert len(set(hashes)) == 1
    assert rates == [pytest.approx(0.02 / 8)] * 6


def steps_of_torchs(steps: int, whole: bool = False) -> dict[str, Tensor]:
    settings = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0}
    model = net()
    settings |= {"zero_optimization": {"stage": 3}}
    optimizer = make_torchs(model)
    optimizer.needs_whole_parameters = whole  # type: ignore[attr-defined]
    engine, *_ = zero_deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for step in range(steps):
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
    return engine.module_state_dict()


def test_on_shards_torchs_muon_is_torchs_muon(worlds: WorldPool) -> None:
    torch.set_num_threads(1)
    model = net()
    optimizer = make_torchs(model)
    for step, tolerance in enumerate((1e-7, 1e-3)):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
        # From the second step on, roundings to bf16 tell gradients apart that differ in a bit.
        for rank in worlds.run(2, steps_of_torchs, step + 1):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(rank[name], value, rtol=0, atol=tolerance)


def moved_after_a_load(stage: int) -> tuple[bool, bool]:
    model = net()
    optimizer = make_torchs(model)
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    engine, *_ = zero_deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    moved = []
    for rate in (0.1, 0.0):
        for group in optimizer.param_groups:
            group.update(lr=rate, weight_decay=0.0)
        before = engine.weight_hash()
        engine.backward(engine(batch(0)).square().mean())
        engine.step()
        moved.append(engine.weight_hash() != before)
        optimizer.load_state_dict(optimizer.state_dict())
    return moved[0], moved[1]


@pytest.mark.parametrize("stage", [0, 3])
def test_torchs_muon_has_the_rates_that_are_set_behind_a_load_of_its_state(
    worlds: WorldPool, stage: int
) -> None:
    assert worlds.run(2, moved_after_a_load, stage) == [(True, False)] * 2


def test_on_whole_parameters_torchs_muon_is_torchs_to_the_bit(worlds: WorldPool) -> None:
    torch.set_num_threads(1)
    model = net()
    optimizer = make_torchs(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    for rank in worlds.run(2, steps_of_torchs, STEPS, True):
        for name, value in model.state_dict().items():
            assert torch.equal(rank[name], value), name


# ---- what is a matrix ----


def test_matrices_are_those_of_deepspeeds_rule_unless_the_script_says_otherwise(
    worlds: WorldPool,
) -> None:
    assert worlds.run(1, kinds, {}) == [(["down", "out", "position", "qkv", "up"], ["embed"])]
    told = {"position": False, "embed.weight": True}
    assert worlds.run(1, kinds, told) == [(["down", "embed", "out", "qkv", "up"], ["position"])]


def kinds(told: dict[str, bool]) -> tuple[list[str], list[str]]:
    """The parameters with two dimensions that are orthogonalized, and those that are not."""
    model = make_model()
    for name, flag in told.items():
        model.get_parameter(name).use_muon = flag  # type: ignore[attr-defined]
    engine, *_ = zero_deepspeed.initialize(model=model, config=config(3, optimizer=MUON))
    engine.backward(engine(torch.zeros(2, 13, dtype=torch.long)))
    found: tuple[set[str], set[str]] = set(), set()
    train_to_the_first_step(engine)
    for name, param in engine.module.named_parameters():
        if param.requires_grad and param.dim() > 1:
            momentum = safe_get_full_optimizer_state(param, "momentum_buffer")
            found[momentum is None].add(name.removesuffix(".weight").rpartition(".")[2])
    return sorted(found[0]), sorted(found[1])


def train_to_the_first_step(engine: Any) -> None:
    while engine.global_steps == 0:
        engine.step()
        if engine.global_steps == 0:
            engine.backward(engine(torch.zeros(2, 13, dtype=torch.long)))


def test_a_groups_own_options_come_before_those_of_the_config() -> None:
    model = nn.Linear(3, 2)
    for param in model.parameters():
        param.use_muon = param.dim() == 2  # type: ignore[attr-defined]
    groups = [{"params": list(model.parameters()), "weight_decay": 0.5}]
    made = Muon(groups, lr=0.1, adam_lr=0.2, weight_decay=0.3).param_groups
    told = [(g["use_muon"], g["lr"], g["weight_decay"], len(g["params"])) for g in made]
    assert told == [(True, 0.1, 0.5, 1), (False, 0.2, 0.5, 1)]
    assert [g["lr"] for g in Muon(groups).param_groups] == [0.02, 3e-4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1}, "Muon: lr -1.0 is not in"),
        ({"momentum": 1}, "Muon: momentum 1.0 is not in"),
        ({"betas": [0.9, 1.0]}, "Muon: beta2 1.0 is not in"),
        ({"ns_method": "newton"}, "ns_method 'newton' must be one of gram, standard"),
        ({"ns_step": 5}, "optimizer.params.ns_step: unknown key; did you mean 'ns_steps'"),
    ],
)
def test_what_muon_cannot_be_made_of_is_named(
    worlds: WorldPool, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorldError, match=message):
        worlds.run(1, refused, options)


def refused(options: dict[str, Any]) -> None:
    make_engine(config(1, optimizer={"type": "Muon", "params": options}))


def test_a_vector_that_is_called_a_matrix_is_named() -> None:
    group = {"params": [nn.Parameter(torch.zeros(3))], "use_muon": True}
    with pytest.raises(ValueError, match=r"parameter of shape \(3,\) is not a matrix; unset use_m"):
        Muon([group])
    with pytest.raises(ValueError, match="parameter 0 of param group 0 has no use_muon"):
        Muon([nn.Parameter(torch.zeros(3, 3))])


# ---- checkpoints ----


def train_to(steps: int, stage: int, load: str | None, save: str | None) -> str:
    engine = make_engine(config(stage, optimizer=MUON), seed=9 if load else 7)
    if load:
        engine.load_checkpoint(load)
    train(engine, steps)
    if save:
        engine.save_checkpoint(save)
    return engine.weight_hash()


@pytest.mark.parametrize(
    ("saves", "loads"), [((1, 0), (3, 3)), ((3, 3), (2, 1)), ((2, 2), (1, 0)), ((3, 1), (2, 3))]
)
@pytest.mark.corners(saves=[(3, 3)])
def test_a_checkpoint_goes_on_at_another_world_and_stage_as_if_nothing_had_been(
    worlds: WorldPool, tmp_path: Path, saves: tuple[int, int], loads: tuple[int, int]
) -> None:
    root = str(tmp_path)
    whole = worlds.run(1, train_to, STEPS, 0, None, None)
    saved = worlds.run(saves[0], train_to, 2, saves[1], None, root)
    resumed = worlds.run(loads[0], train_to, STEPS, loads[1], root, None)
    assert set(resumed) == set(whole) != set(saved)
