"""What a script changes after initialize(), and the engine cannot follow, is an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.test_offload import offloading
from tests.support.models import LENGTH, WIDTH, make_model
from tests.support.saving import heard
from tests.support.training import config, make_engine, train
from tests.support.world import WorldError, WorldPool
from zero_contract.errors import ConfigError, ZeroError
from zero_deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from zero_deepspeed.zero import GatheredParameters
from zero_engine.core.engine import Engine
from zero_engine.core.precision import check_apart


def norms(engine: Engine) -> list[nn.Parameter]:
    return [param for name, param in engine.module.named_parameters() if "norm" in name]


def add_a_group(engine: Engine) -> None:
    engine.optimizer.add_param_group({"params": norms(engine)})


def train_more(engine: Engine) -> None:
    for param in norms(engine):
        param.requires_grad_(True)


def change_the_memory(engine: Engine) -> None:
    engine.module.half().float()


def replace_a_module(engine: Engine) -> None:
    engine.module.norm = nn.LayerNorm(WIDTH)


def replace_a_parameter(engine: Engine) -> None:
    engine.module.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))


def hook_behind(engine: Engine) -> None:
    engine.module.position.register_post_accumulate_grad_hook(lambda _: None)


def take_out(engine: Engine) -> None:
    del engine.optimizer.param_groups[0]["params"][0]


def write_to_a_group(engine: Engine) -> None:
    with torch.no_grad():
        engine.optimizer.param_groups[0]["params"][0].clamp_(-0.01, 0.01)


def replace_in_a_group(engine: Engine) -> None:
    shown = engine.optimizer.param_groups[0]["params"][0]
    shown.data = shown.data.clamp(-0.01, 0.01)


CHANGES: dict[str, tuple[Callable[[Engine], None], str]] = {
    "group": (add_a_group, r"has 2 param groups, and had 1 at initialize\(\)"),
    "unfrozen": (train_more, r"norm\S* requires gradients, and did not at initialize\(\)"),
    "memory": (change_the_memory, r"has other memory than at initialize\(\): half\(\), to\(\)"),
    "module": (replace_a_module, r"norm.weight is another parameter than at initialize\(\)"),
    "parameter": (replace_a_parameter, r"position is another parameter than at initialize\(\)"),
    "members": (take_out, r"the param groups of the optimizer have other parameters than at"),
    "data": (replace_in_a_group, r"has written to the tensors of param group 0 of the optimizer"),
    "hook": (hook_behind, r"position has a post-accumulate-grad hook that was registered after"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_would_not_be_trained_is_refused_at_the_next_step(
    worlds: WorldPool, name: str
) -> None:
    with pytest.raises(WorldError, match=CHANGES[name][1]):
        worlds.run(1, train_on, name)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("stage", "place"),
    [(0, "none"), (1, "none"), (2, "cpu"), (2, "nvme"), (3, "none"), (3, "cpu"), (3, "nvme")],
)
@pytest.mark.corners(bf16=[True], stage=[0, 3], place=["none", "nvme"])
def test_a_write_to_what_the_optimizers_groups_show_is_refused_everywhere(
    worlds: WorldPool, tmp_path: Path, stage: int, bf16: bool, place: str
) -> None:
    """It took effect at once, after the step or never, by stage, dtype and number of ranks."""
    found = worlds.run(2, write_on, stage, bf16, place, str(tmp_path))
    assert [text.split(" of the optimizer")[0] for text in found] == 2 * [
        "a script has written to the tensors of param group 0"
    ]


COUNTS_VERSIONS = {"type": "RMSprop", "params": {"lr": 1e-3}}
"""A fused optimizer, such as AdamW, leaves the versions of what it steps as they are."""


def fail_half_way(stage: int, path: str) -> tuple[int, str]:
    """A step fails when the optimizer has stepped; a load mends it, and training goes on."""
    engine = make_engine(config(stage, optimizer=COUNTS_VERSIONS))
    train(engine, 2)
    engine.save_checkpoint(path)
    steps = engine.optimizer.step

    def fails(*args: object) -> None:
        steps(*args)
        raise MemoryError("in the middle of a step")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.optimizer, "step", fails)
        with pytest.raises(MemoryError):
            train(engine, 3)
    engine.load_checkpoint(path)
    train(engine, 3)
    return engine.global_steps, engine.weight_hash()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.corners(stage=[2])
def test_a_step_that_has_failed_is_no_write_of_the_script(
    worlds: WorldPool, tmp_path: Path, stage: int
) -> None:
    ((steps, digest),) = worlds.run(1, fail_half_way, stage, str(tmp_path))
    assert (steps, digest) == (3, worlds.run(1, train_to_three, stage)[0])


def train_to_three(stage: int) -> str:
    engine = make_engine(config(stage, optimizer=COUNTS_VERSIONS))
    train(engine, 3)
    return engine.weight_hash()


def write_on(stage: int, bf16: bool, place: str, path: str) -> str:
    engine = make_engine(offloading(stage, place, path) | {"bf16": {"enabled": bf16}})
    train(engine, 2)
    engine.save_checkpoint(path)  # none of these writes to what the groups show
    engine.load_checkpoint(path)
    if place == "none":
        engine.offload_states()
        engine.reload_states()
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        for param in engine.module.parameters():
            param.data.mul_(0.5)
    param = next(engine.module.parameters())
    safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 0.5)
    train(engine, 3)
    with torch.no_grad():
        for shown in engine.optimizer.param_groups[0]["params"]:
            shown.mul_(0.5)
    with pytest.raises(ZeroError) as error:
        train(engine, 4)
    return str(error.value)


def frozen_norms() -> nn.Module:
    model = make_model()
    for name, param in model.named_parameters():
        param.requires_grad_("norm" not in name)
    return model


def train_on(name: str) -> None:
    model = frozen_norms()
    settings = config(1, zero_optimization={"stage": 1, "stage3_param_persistence_threshold": 0})
    engine = make_engine(settings, model=model, model_parameters=list(model.parameters()))
    train(engine, 1)
    before = engine.weight_hash()
    CHANGES[name][0](engine)
    try:
        train(engine, 2)
    finally:
        assert (engine.global_steps, engine.weight_hash()) == (1, before)


@pytest.mark.parametrize("call", ["save_checkpoint", "load_checkpoint"])
@pytest.mark.parametrize("name", ["group", "members"])
def test_other_param_groups_are_neither_saved_nor_loaded(
    worlds: WorldPool, tmp_path: Path, name: str, call: str
) -> None:
    with pytest.raises(WorldError, match=CHANGES[name][1]):
        worlds.run(1, checkpoint_of, name, call, tmp_path)
    assert len([*tmp_path.glob("step-*")]) == 1


def checkpoint_of(name: str, call: str, directory: Path) -> None:
    settings = config(1, zero_optimization={"stage": 1})
    model = frozen_norms()
    engine = make_engine(settings, model=model, model_parameters=list(model.parameters()))
    train(engine, 1)
    engine.save_checkpoint(directory)
    before = engine.weight_hash()
    CHANGES[name][0](engine)
    try:
        getattr(engine, call)(directory)
    finally:
        assert engine.weight_hash() == before


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.corners(bf16=[True])
def test_a_value_that_is_written_as_that_error_says_lasts(worlds: WorldPool, bf16: bool) -> None:
    with pytest.raises(WorldError, match=r"write values in zero\.GatheredParameters") as error:
        worlds.run(1, train_on, "memory")
    assert "data.copy_" not in str(error.value)
    assert worlds.run(2, write_and_step, bf16) == [pytest.approx(3, abs=0.1)] * 2


def write_and_step(bf16: bool) -> float:
    engine = make_engine(config(1, bf16=bf16))
    weight = engine.module.blocks[0].up.weight
    with GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.fill_(3.0)
    train(engine, 1)
    return float(safe_get_full_fp32_param(weight).mean())


def of_one_memory(which: str) -> None:
    model = make_model()
    embed = model.embed.weight.data
    views = {"rows": embed[:LENGTH], "columns": embed[:, :LENGTH], "transposed": embed.t()}
    model.position = nn.Parameter(views[which])
    make_engine(config(1), model=model)


@pytest.mark.parametrize("which", ["rows", "columns", "transposed"])
def test_parameters_that_share_memory_and_are_not_one_are_refused(
    worlds: WorldPool, which: str
) -> None:
    with pytest.raises(WorldError, match=r"(?=.*position)(?=.*embed\.weight).* share memory and"):
        worlds.run(1, of_one_memory, which)


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda base: base,
    lambda base: base.t(),
    lambda base: base[:2],
    lambda base: base[2:],
    lambda base: base[:, :3],
    lambda base: base[:, 3:],
    lambda base: base[::2, 1],
    lambda base: base[1::2, ::2],
    lambda base: base[3, 5],
    lambda base: base.flatten()[::5],
    lambda base: base[1, 1].expand(3),
]


@pytest.mark.parametrize(("one", "other"), [*combinations_with_replacement(VIEWS, 2)])
@pytest.mark.parametrize("as_bf16", [False, True])
def test_parameters_of_one_memory_may_have_different_elements_of_it(
    one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], as_bf16: bool
) -> None:
    elements = torch.arange(24).view(4, 6)
    shared = set(one(elements).flatten().tolist()) & set(other(elements).flatten().tolist())
    base = torch.zeros(4, 6)
    # The same bytes, read as twice as many numbers.
    again = other(base).unsqueeze(-1).view(torch.bfloat16) if as_bf16 else other(base)
    pair = nn.ParameterList([nn.Parameter(one(base)), nn.Parameter(torch.ones(3))])
    pair.append(nn.Parameter(again))
    if shared:
        with pytest.raises(ConfigError, match="share memory and are two parameters"):
            check_apart(pair)
    else:
        check_apart(pair)


def test_a_parameter_that_is_frozen_later_is_told_of_once(worlds: WorldPool) -> None:
    ((first, *others),) = worlds.run(1, freeze_later)
    assert "norm" in first
    assert "does not require gradients any more: as in DeepSpeed" in first
    assert others == []


def freeze_later() -> list[str]:
    engine = make_engine(config(1))
    train(engine, 1)
    for param in norms(engine):
        param.requires_grad_(False)
    with heard(logging.WARNING) as lines:
        train(engine, 3)
    return lines


def test_values_that_a_script_writes_in_place_and_memory_that_it_puts_back_are_no_change(
    worlds: WorldPool,
) -> None:
    assert worlds.run(1, swap) == [2]


def swap() -> int:
    """As an average of the weights is swapped in for an evaluation."""
    engine = make_engine(config(1))
    train(engine, 1)
    own = [param.data for param in engine.module.parameters()]
    for param in engine.module.parameters():
        param.data = torch.zeros_like(param)
    for param, data in zip(engine.module.parameters(), own, strict=True):
        param.data = data
        param.data.clamp_(-1, 1)
    train(engine, 2)
    return engine.global_steps
