"""Small parameters are whole at every stage, and what a script writes to them counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.support.world import (
    Stages,
    WorldError,
    WorldPool,
    of_stages,
    one_of_stages,
    one_result,
)
from zero_deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from zero_step.gradients.norm import BLOCK

STAGES = (0, 1, 2, 3)
SIZE = 40
"""A matrix of it is larger than the threshold of `settings`, a vector is smaller."""


class Scaled(nn.Module):
    """CLIP's use: a learned scale, which the script reads, logs and clamps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.frozen = nn.Parameter(torch.ones(SIZE), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return (x * self.frozen * self.scale.exp()).square().mean()


def settings(stage: int, dtype: str, **zero: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": SIZE,
            **zero,
        },
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "elastic": {"shuffle": False},
    }


def clamp_in_place(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.clamp_(0.0, 1.0)


def clamp_data(param: nn.Parameter) -> None:
    param.data.clamp_(0.0, 1.0)


def put_other_data(param: nn.Parameter) -> None:
    param.data = param.data.clamp(0.0, 1.0)


def copy(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.copy_(param.clamp(0.0, 1.0))


def clamp_gathered(param: nn.Parameter) -> None:
    with zero_deepspeed.zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param.clamp_(0.0, 1.0)


def clamp_gathered_on_all(param: nn.Parameter) -> None:
    with zero_deepspeed.zero.GatheredParameters([param]), torch.no_grad():
        param.clamp_(0.0, 1.0)


WRITES: dict[str, Callable[[nn.Parameter], None]] = {
    each.__name__: each
    for each in (
        clamp_in_place,
        clamp_data,
        put_other_data,
        copy,
        clamp_gathered,
        clamp_gathered_on_all,
    )
}


def train(stage: int, dtype: str, write: str, **zero: Any) -> tuple[Any, ...]:
    """What a script sees that clamps after each step, and what becomes of the weights."""
    torch.manual_seed(5)
    data = [torch.randn(SIZE) for _ in range(16)]
    engine, _, loader, _ = zero_deepspeed.initialize(
        model=Scaled(), config=settings(stage, dtype, **zero), training_data=data
    )
    model, seen = engine.module, []
    for batch in loader:
        engine.backward(engine(batch.to(model.scale.dtype)))
        engine.step()
        if not engine.was_step_applied():
            continue
        seen.append(model.scale.item())
        for param in (model.scale, model.blocks[1].bias, model.frozen):
            WRITES[write](param)
        seen.append((model.scale.item(), model.blocks[1].bias.tolist()))
    return engine.weight_hash(), seen


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.corners(dtype=["bf16"], write=["clamp_in_place", "put_other_data"])
@of_stages
def test_a_clamped_scale_trains_to_the_same_bits_at_every_stage_and_world_size(
    worlds: WorldPool, stages: Stages, dtype: str, write: str
) -> None:
    _, seen = one_of_stages(worlds, stages, train, dtype, write)
    assert all(0.0 <= scale <= 1.0 for scale, _ in seen[1::2])  # and is read as what was written
    assert seen[2] != seen[1][0]  # the step has used and changed it


def write_and_save_nothing(stage: int, *away: str) -> tuple[float, float]:
    engine, *_ = zero_deepspeed.initialize(model=Scaled(), config=settings(stage, "bf16"))
    engine.offload_states(include=away)
    with torch.no_grad():
        engine.module.scale.fill_(0.75)
    return engine.get_fp32_state_dict()["scale"].item(), engine.module.scale.item()


def writes_between_steps() -> list[tuple[float, float]]:
    return [write_and_save_nothing(stage) for stage in STAGES]


def writes_while_gradients_are_away() -> list[tuple[float, float]]:
    return [write_and_save_nothing(stage, "lp_grads") for stage in STAGES]


def test_a_write_is_in_what_is_read_while_other_states_are_offloaded(worlds: WorldPool) -> None:
    assert one_result(worlds, writes_while_gradients_are_away) == [(0.75, 0.75)] * 4


def test_a_write_is_in_what_is_read_and_saved_before_the_next_step(worlds: WorldPool) -> None:
    assert one_result(worlds, writes_between_steps) == [(0.75, 0.75)] * 4


def write_on_one_rank(stage: int, value: float) -> None:
    engine, *_ = zero_deepspeed.initialize(model=Scaled(), config=settings(stage, "fp32"))
    if engine.global_rank == 0:
        engine.module.scale.data.fill_(value)
    engine.backward(engine(torch.ones(2, SIZE)))
    engine.step()


@pytest.mark.parametrize("value", [0.5, 5.0, -2.5], ids=["other", "twice", "negative"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.corners(stage=[3], value=[5.0])
def test_a_write_on_one_rank_alone_is_refused_by_name(
    worlds: WorldPool, stage: int, value: float
) -> None:
    """Also a value whose bits differ in the exponent, or in the sign, alone."""
    with pytest.raises(
        WorldError,
        match=r"scale has different values on (the ranks|rank 0 and on rank 1): a script has",
    ):
        worlds.run(2, write_on_one_rank, stage, value)


def alignments() -> list[set[int]]:
    """Of all small parameters at each stage: their places in memory, modulo a block."""
    found = []
    for stage in STAGES:
        model = nn.Sequential(nn.LayerNorm(SIZE - 1), nn.Linear(SIZE - 1, SIZE - 1))
        zero_deepspeed.initialize(model=model, config=settings(stage, "bf16"))
        found.append({p.storage_offset() % BLOCK for p in model.parameters() if p.dim() == 1})
    return found


def test_small_parameters_are_aligned_alike_at_every_stage(worlds: WorldPool) -> None:
    """A GPU chooses kernels, and with them the bits, by the alignment of what they read."""
    assert one_result(worlds, alignments) == [{0}] * 4


def small_and_large(**zero: Any) -> list[tuple[bool, bool, Any]]:
    engine, *_ = zero_deepspeed.initialize(model=Scaled(), config=settings(3, "fp32", **zero))
    return [
        (bool(param.isnan().any()), param.ds_persist, param.ds_status)
        for param in (engine.module.scale, engine.module.blocks[0].weight)
    ]


def test_only_parameters_up_to_the_threshold_stay_whole(worlds: WorldPool) -> None:
    here, away = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE
    assert one_result(worlds, small_and_large) == [(False, True, here), (True, False, away)]


def at_limits() -> list[Any]:
    limits = [
        {"stage3_param_persistence_threshold": 0},
        {"stage3_model_persistence_threshold": 0},
        {"stage3_param_persistence_threshold": "auto"},
    ]
    return [small_and_large(**limit) for limit in limits]


def test_the_thresholds_of_the_config_decide(worlds: WorldPool) -> None:
    none, nothing, all_ = one_result(worlds, at_limits)
    assert [kept for _, kept, _ in (*none, *nothing, *all_)] == [False] * 4 + [True] * 2


def offloaded(zero: dict[str, Any]) -> list[Any]:
    return [train(3, "bf16", "clamp_in_place", **zero), train(2, "bf16", "clamp_in_place")]


@pytest.mark.parametrize(
    "zero",
    [
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        {"offload_optimizer": {"device": "nvme", "nvme_path": "."}},
        {
            "offload_optimizer": {"device": "nvme", "nvme_path": "."},
            "offload_param": {"device": "nvme", "nvme_path": ".", "max_in_cpu": 0},
        },
        {"zero_hpz_partition_size": 2},
    ],
    ids=["cpu", "nvme", "weights on nvme", "hpz"],
)
@pytest.mark.full
def test_writes_count_wherever_the_state_rests(
    worlds: WorldPool, zero: dict[str, Any], tmp_path: Any
) -> None:
    zero = {
        key: value | {"nvme_path": str(tmp_path)} if "nvme" in str(value) else value
        for key, value in zero.items()
    }
    tiered, plain = one_result(worlds, offloaded, zero)
    assert tiered == plain
