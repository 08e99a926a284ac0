"""DeepSpeed's estimators, which scripts call before they choose a stage."""

from __future__ import annotations

import pytest
from torch import nn

from zero_engine.runtime.zero.stage3 import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zero_engine.runtime.zero.stage_1_and_2 import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

GIB = 1 << 30


def test_stage_2_keeps_weights_on_the_device_and_moves_master_weights_and_moments() -> None:
    # Weights 2 and, over 4 ranks, gradient sums 4 bytes; master weights and moments 12.
    assert estimate_zero2_model_states_mem_needs(
        GIB, num_gpus_per_node=4, cpu_offload=False, additional_buffer_factor=1
    ) == (16 * GIB, 2 * GIB + 4 * GIB)
    assert estimate_zero2_model_states_mem_needs(GIB, 1, 4, additional_buffer_factor=1) == (
        4 * GIB,
        3 * GIB,
    )
    assert estimate_zero2_model_states_mem_needs(GIB) == (18 * GIB, 6 * GIB)


def test_stage_3_divides_everything_but_the_modules_in_flight() -> None:
    needs = [
        estimate_zero3_model_states_mem_needs(
            GIB, GIB // 32, 2, 2, optimizer, param, additional_buffer_factor=1
        )
        for optimizer, param in ((False, False), (True, False), (True, True))
    ]
    flight = 5 * 2 * GIB // 32  # two gathered, three with a gradient
    assert needs[0] == (8 * GIB, 4 * GIB + flight)  # the whole model in each process, at first
    assert needs[1] == (8 * GIB, GIB + GIB // 2 + flight)
    assert needs[2] == (8 * GIB, GIB + flight)
    one = estimate_zero3_model_states_mem_needs(GIB, GIB // 32, additional_buffer_factor=1)
    assert one == (14 * GIB, 4 * GIB + flight)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1000, 999) for _ in range(3))
        self.head = nn.Linear(2000, 1000, bias=False)
        self.tied = self.head


def test_a_model_is_counted_and_its_largest_unit_found(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero3_model_states_mem_needs_all_live(Model(), num_gpus_per_node=2)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == (
        "States of 4,999,997 parameters, 2,000,000 of them in the largest module, in bf16 with "
        "Adam, on 1 x 2 GPUs:"
    )
    assert told[2].endswith("| offload_param=cpu, offload_optimizer=cpu")
    assert len(told) == 5
    estimate_zero2_model_states_mem_needs_all_live(Model())
    live = capsys.readouterr().out
    estimate_zero2_model_states_mem_needs_all_cold(4_999_997)
    assert capsys.readouterr().out == live
