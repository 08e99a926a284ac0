"""What libraries and DeepSpeed's own examples touch of an engine, beside what tutorials show."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.support.models import make_model
from tests.support.training import config, make_engine, run_micro_step, train
from tests.support.world import WorldPool
from zero_contract.errors import ZeroError
from zero_deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from zero_deepspeed.compression.helper import recursive_getattr, recursive_setattr
from zero_deepspeed.moe.layer import MoE
from zero_deepspeed.moe.utils import (
    has_moe_layers,
    is_moe_param,
    split_params_into_different_moe_groups_for_optimizer,
)
from zero_deepspeed.runtime.config import LAMB_OPTIMIZER
from zero_deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
from zero_deepspeed.runtime.utils import set_random_seed
from zero_deepspeed.runtime.zero import partition_parameters


def test_the_config_is_the_one_that_was_given(worlds: WorldPool, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": 4, "zero_optimization": {"stage": 3}} // as DeepSpeed')
    assert worlds.run(1, configs, str(path)) == [
        [config(2), {"train_batch_size": 4, "zero_optimization": {"stage": 3}}]
    ]


def configs(path: str) -> list[Any]:
    by_path, *_ = zero_deepspeed.initialize(model=make_model(), config=path)
    return [dict(engine.config) for engine in (make_engine(config(2)), by_path)]


@pytest.mark.parametrize("stage", [2, 3])
def test_libraries_get_the_whole_model_in_its_own_dtype_on_the_rank_that_writes(
    worlds: WorldPool, stage: int
) -> None:
    first, second = worlds.run(2, consolidated, stage)
    assert first[0] == {torch.bfloat16, torch.float32}  # its buffer keeps its own
    assert first[1] == second[1]  # of module_state_dict(), on every rank
    assert (first[2], second[0], second[2]) == (first[1], None, None)
    assert first[3:] == second[3:] == (True, stage == 3, True)


def consolidated(stage: int) -> tuple[Any, ...]:
    engine: Any = make_engine(config(stage, bf16=True))
    train(engine, 2)
    whole = engine._zero3_consolidated_16bit_state_dict()
    return (
        whole and {value.dtype for value in whole.values()},
        sums_of(engine.module_state_dict()),
        sums_of(whole),
        engine.zero_gather_16bit_weights_on_model_save(),
        engine.zero_optimization_partition_weights(),
        engine.zero_optimization_partition_gradients(),
    )


def sums_of(whole: dict[str, Tensor] | None) -> dict[str, float] | None:
    return whole and {name: value.double().sum().item() for name, value in whole.items()}


def test_one_rank_alone_can_receive_the_state_dict(worlds: WorldPool) -> None:
    first, second = worlds.run(2, received_by_the_second)
    assert first == (["trained"], [])
    assert second == ([], ["frozen", "trained"])


def received_by_the_second() -> tuple[list[str], list[str]]:
    """What is trained, as libraries get it; and everything, on rank 1."""
    model = nn.ParameterDict({name: torch.ones(3, 5) for name in ("frozen", "trained")})
    model["frozen"].requires_grad_(False)
    engine, *_ = zero_deepspeed.initialize(model=model, config=config(3))
    tuned = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    return sorted(tuned or ()), sorted(engine.get_fp32_state_dict(rank=1))


def test_weights_to_save_have_memory_of_their_own(worlds: WorldPool) -> None:
    for sizes in worlds.run(1, sizes_of_clones):
        assert sizes == [True, True, True]


def sizes_of_clones() -> list[bool]:
    engine = make_engine(config(2))
    weights = engine.module.state_dict()
    nest = clone_tensors_for_torch_save({"model": weights, "steps": [3, (weights,)]})
    clones: dict[str, Tensor] = nest["model"]
    return [
        all(torch.equal(clones[name], value) for name, value in weights.items()),
        all(v.untyped_storage().nbytes() == v.numel() * v.itemsize for v in clones.values()),
        nest["steps"][0] == 3 and nest["steps"][1][0].keys() == weights.keys(),
    ]


def test_tensors_without_memory_stay_apart_unless_they_are_one() -> None:
    weights = {name: torch.empty(2, 3, device="meta") for name in ("a", "b", "other")}
    weights["tied"] = weights["a"].view(2, 3)
    clones = clone_tensors_for_torch_save(weights, "meta")
    assert len({id(clone) for clone in clones.values()}) == 3
    assert clones["tied"] is clones["a"]


def test_tied_weights_are_one_tensor_at_every_stage(worlds: WorldPool) -> None:
    """Transformers writes both of two tensors, which a tied model does not need."""
    assert worlds.run(1, tied_weights) == [[True, True, True, True]]


def tied_weights() -> list[bool]:
    """What accelerate hands on to be saved, as it gets it at each stage."""
    tied = []
    for stage in range(4):
        engine = make_engine(config(stage))
        if stage == 3:
            whole = engine._consolidated_16bit_state_dict() or {}
        else:
            whole = clone_tensors_for_torch_save(engine.module.state_dict())
        tied.append(whole["head.weight"].data_ptr() == whole["embed.weight"].data_ptr())
    return tied


class Counted(torch.optim.lr_scheduler.LambdaLR):
    """A schedule by what the steps have consumed."""

    consumed = 0

    def step(self, epoch: int | None = None, consumed: int = 0) -> None:
        self.consumed += consumed
        super().step(epoch)


def test_a_step_hands_arguments_to_the_scripts_own_schedule(worlds: WorldPool) -> None:
    assert worlds.run(2, step_with_arguments) == [7, 7]


def step_with_arguments() -> int:
    def schedule(optimizer: torch.optim.Optimizer) -> Counted:
        return Counted(optimizer, lambda _: 1.0)

    engine = make_engine(config(1, train_batch_size=4), lr_scheduler=schedule)
    run_micro_step(engine, step=False)
    engine.step(lr_kwargs={"consumed": 7})
    engine.tput_timer.update_epoch_count()
    return int(engine.lr_scheduler.consumed)


def test_the_engine_passes_for_the_optimizer_that_it_steps(worlds: WorldPool) -> None:
    """Lightning's Fabric steps the engine if it has all that it asks of an optimizer."""
    assert worlds.run(1, look_for_optimizer) == [(True, [False] * 3)]


def look_for_optimizer() -> tuple[bool, list[bool]]:
    names = ("param_groups", "defaults", "state")
    engine = make_engine(config(1))
    theirs = [getattr(engine.optimizer, name) for name in names]
    engines = [getattr(engine, name) for name in names]
    for_inference, *_ = zero_deepspeed.initialize(
        model=make_model(), config={"train_batch_size": 1}
    )
    return engines == theirs, [hasattr(for_inference, name) for name in names]


def test_groups_without_experts_stay_as_they_are() -> None:
    model = make_model()
    group = {"params": list(model.parameters()), "name": "parameters"}
    assert split_params_into_different_moe_groups_for_optimizer(group) == [group]
    assert split_params_into_different_moe_groups_for_optimizer((group, group)) == [group, group]
    assert has_moe_layers(model) == (False, 0)
    assert not any(is_moe_param(param) for param in model.parameters())
    with pytest.raises(ZeroError, match="no expert parallelism; put the experts into"):
        MoE(hidden_size=84, expert=nn.Linear(84, 84), num_experts=2)


def test_a_submodule_is_replaced_by_its_name() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 1))
    new = nn.Linear(2, 3, bias=False)
    recursive_setattr(model, "0.0", new)
    assert recursive_getattr(model, "0.0") is new
    assert recursive_getattr(model, "1.weight") is model[1].weight
    recursive_setattr(model, "1", nn.Identity())
    assert isinstance(model[1], nn.Identity)


def test_one_seed_decides_all_random_numbers() -> None:
    def draw() -> tuple[float, float, float]:
        set_random_seed(5)
        return random.random(), np.random.random(), torch.rand(()).item()

    assert draw() == draw()


def test_names_that_runs_are_compared_with() -> None:
    assert LAMB_OPTIMIZER == "lamb"
    assert "WarmupCosineLR" in VALID_LR_SCHEDULES
    assert zero_deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES is VALID_LR_SCHEDULES
    assert zero_deepspeed.runtime.zero.partition_parameters is partition_parameters
    wrap = partition_parameters.zero_wrapper_for_fp_tensor_constructor
    assert wrap(torch.arange, target_device="cpu") is torch.arange
