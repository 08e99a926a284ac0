"""The series of scales, step by step, as DeepSpeed's documentation and source describe it."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_engine.config.schema import Fp16
from zero_engine.optim.loss_scaler import LossScaling


def scales(steps: str, **fp16: Any) -> list[float]:
    """The scale after each step; "x" is an overflow, "." none."""
    scaling = LossScaling.of(Fp16(enabled=True, **fp16))
    state, seen = scaling.begin(), []
    for step in steps:
        state, _ = scaling.after(state, step == "x")
        seen.append(state.scale)
    return seen


@pytest.mark.parametrize(
    ("steps", "fp16", "expected"),
    [
        # The first overflow burns the hysteresis, each one after it halves: it is not refilled.
        ("xxx.x", {"initial_scale_power": 4}, [16, 8, 4, 4, 2]),
        # ... unless it is consecutive: any clean step refills it.
        (
            "xx.xx",
            {"initial_scale_power": 4, "consecutive_hysteresis": True},
            [16, 8, 8, 8, 4],
        ),
        ("xx", {"initial_scale_power": 4, "hysteresis": 1}, [8, 4]),
        # Clean steps are counted after the last overflow, or after the very first step.
        (".....", {"initial_scale_power": 4, "loss_scale_window": 2}, [16, 16, 32, 32, 64]),
        ("x....", {"initial_scale_power": 4, "loss_scale_window": 2}, [16, 16, 16, 32, 32]),
        # A doubling refills the hysteresis.
        (
            "x...xx",
            {"initial_scale_power": 4, "loss_scale_window": 2},
            [16, 16, 16, 32, 32, 16],
        ),
        (
            "xxxx",
            {"initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 1.5},
            [2, 1.5, 1.5, 1.5],
        ),
        ("x.x.", {"loss_scale": 128.0}, [128] * 4),
    ],
)
def test_the_scale_follows_the_overflows(
    steps: str, fp16: dict[str, Any], expected: list[float]
) -> None:
    assert scales(steps, **fp16) == expected


def deepspeeds(steps: str, window: int, hysteresis: int) -> list[float]:
    """DeepSpeed's series from 16 on at stages 1 to 3; at stage 0 it has no hysteresis."""
    scale, left, last, seen = 16.0, hysteresis, -1, []
    for number, step in enumerate(steps):
        if step == "x":
            scale, left = (max(scale / 2, 1.0), left) if left == 1 else (scale, left - 1)
            last = number
        elif number - last > 1 and (number - last - 1) % window == 0:
            scale, left = scale * 2, hysteresis
        seen.append(scale)
    return seen


def torchs(steps: str, window: int) -> list[float]:
    """The series of torch's own scaler, which stock PyTorch uses under `zero_torch`."""
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param])
    scaler, seen = torch.amp.GradScaler("cpu", 16.0, growth_interval=window), []
    for step in steps:
        scaler.scale(param.sum() * (math.inf if step == "x" else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    return seen


SERIES = st.text("x.", min_size=1, max_size=30)


@given(steps=SERIES, window=st.integers(1, 4), hysteresis=st.integers(1, 3))
def test_every_series_is_that_of_deepspeeds_stages_1_to_3(
    steps: str, window: int, hysteresis: int
) -> None:
    rules = {"initial_scale_power": 4, "loss_scale_window": window, "hysteresis": hysteresis}
    assert scales(steps, **rules) == deepspeeds(steps, window, hysteresis)


@given(clean=st.integers(0, 12), overflows=st.integers(0, 4), window=st.integers(1, 4))
def test_torchs_scaler_differs_as_the_documentation_says(
    clean: int, overflows: int, window: int
) -> None:
    """Without a hysteresis, it doubles the scale one step earlier."""
    rules = {"initial_scale_power": 4, "loss_scale_window": window, "hysteresis": 1}
    steps = "x" * overflows + "." * clean
    ours, theirs = scales(steps, **rules), torchs(steps, window)
    before = theirs[overflows - 1] if overflows else 16.0
    assert ours == [*theirs[:overflows], *[before, *theirs[overflows:]][:clean]]


def test_the_defaults_are_deepspeeds() -> None:
    scaling = LossScaling.of(Fp16(enabled=True))
    assert scaling == LossScaling(
        initial=65536.0,
        dynamic=True,
        window=1000,
        hysteresis=2,
        consecutive_hysteresis=False,
        minimum=1.0,
    )
    assert scales("." * 1001, **{})[-2:] == [65536.0, 131072.0]


def test_without_fp16_there_is_no_scale_and_skipped_steps_are_counted() -> None:
    scaling = LossScaling.of(Fp16())
    state = scaling.begin()
    counts = []
    for overflow in (True, True, False, True):
        state, reason = scaling.after(state, overflow)
        counts.append((state.scale, state.unanswered, reason))
    none = "there is no dynamic loss scale to lower"
    assert counts == [(1.0, 1, none), (1.0, 2, none), (1.0, 0, ""), (1.0, 1, none)]


def test_only_overflows_at_the_minimum_are_unanswered() -> None:
    scaling = LossScaling(initial=4.0, dynamic=True, hysteresis=2)
    state = scaling.begin()
    seen = []
    for _ in range(5):
        state, reason = scaling.after(state, True)
        seen.append((state.unanswered, reason))
    assert seen == [
        (0, "loss scale 4 stays, hysteresis 1 left"),
        (0, "loss scale 4 -> 2"),
        (0, "loss scale 2 -> 1"),
        (1, "the loss scale is at its minimum of 1"),
        (2, "the loss scale is at its minimum of 1"),
    ]


def test_a_state_from_a_checkpoint_continues_the_same_series() -> None:
    scaling = LossScaling(initial=2.0**10, dynamic=True, window=3, hysteresis=2)
    drawn = random.Random(5)
    state = resumed = scaling.begin()
    for _ in range(200):
        overflow = drawn.random() < 0.3
        state, _ = scaling.after(state, overflow)
        resumed = scaling.resume(json.loads(json.dumps(scaling.to_json(resumed))))
        resumed, _ = scaling.after(resumed, overflow)
        assert resumed == state


def test_a_fixed_scale_is_the_configs_and_a_dynamic_one_begins_anew_after_it() -> None:
    dynamic, fixed = LossScaling(initial=1024.0, dynamic=True, hysteresis=2), LossScaling()
    state, _ = dynamic.after(dynamic.begin(), True)
    assert fixed.resume(dynamic.to_json(state)).scale == 1.0
    bf16, _ = fixed.after(fixed.begin(), True)
    resumed = dynamic.resume(fixed.to_json(bf16))
    assert (resumed.scale, resumed.hysteresis, resumed.unanswered) == (1024.0, 2, 1)
