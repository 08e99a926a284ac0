"""The memory estimate is what a process really takes, offloading included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.numerics.peak_memory import PARAMETERS, WIDTH
from tests.numerics.test_offload import offloading
from tests.support.fresh import run_module
from zero_engine.config import load_config
from zero_engine.observe.memory import Estimate, estimate

MASTERS, LOW_PRECISION = "16-bit master weights", "everything in 16 bits"
ADAFACTOR = "Adafactor, in bf16"
APART = "in two directories"
CASES: list[tuple[int, str, bool | str]] = [
    (0, "none", True),
    (1, "none", True),
    (2, "none", False),
    (3, "none", True),
    (1, "cpu", True),
    (2, "nvme", False),
    (2, "nvme", True),
    (3, "nvme", False),
    (3, "nvme+nvme", True),
    (3, "nvme+nvme", False),
    (3, "nvme+nvme", APART),
    (3, "nvme+cpu", False),
    (3, "none+nvme", False),
    (3, "cpu+nvme", True),
    (2, "none", LOW_PRECISION),
    (3, "none", LOW_PRECISION),
    (3, "nvme+nvme", LOW_PRECISION),
    (3, "cpu", MASTERS),
    (1, "none", ADAFACTOR),
    (3, "none", ADAFACTOR),
]
_STEADY_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
"""Every tensor is mapped by itself, so that freed memory is given back at once."""


def settings_of(stage: int, where: str, bf16: bool | str, path: str) -> dict[str, Any]:
    settings = offloading(stage, where, path, bf16=bf16 not in (False, APART))
    if bf16 == APART:
        apart = Path(path, "weights")
        apart.mkdir(exist_ok=True)
        settings["zero_optimization"]["offload_param"]["nvme_path"] = str(apart)
    settings["bf16"]["bf16_master_weights_and_grads"] = bf16 in (MASTERS, LOW_PRECISION)
    settings["bf16"]["bf16_optimizer_states"] = bf16 == LOW_PRECISION
    settings["optimizer"]["type"] = "Adafactor" if bf16 == ADAFACTOR else "AdamW"
    return settings | {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], int]]:
    """Each case's config and peak, in bytes."""
    path = str(tmp_path_factory.mktemp("scratch"))
    settings = [settings_of(*case, path) for case in CASES]
    # The first one warms the process up: libraries, thread pools.
    given = [settings[0], *settings]
    peaks = run_module("tests.numerics.peak_memory", given, _STEADY_MALLOC, timeout_s=360)
    return list(zip(settings, peaks[1:], strict=True))


def estimated(settings: dict[str, Any]) -> Estimate:
    largest = WIDTH * (WIDTH + 1)
    return estimate(load_config(settings), PARAMETERS, 1, largest, device="cpu")


@pytest.mark.full
def test_the_peak_of_a_process_is_within_a_tenth_of_the_estimate(
    measured: list[tuple[dict[str, Any], int]],
) -> None:
    wrong = {}
    for case, (settings, peak) in zip(CASES, measured, strict=True):
        memory = estimated(settings)
        expected = memory.total + memory.host + memory.in_flight
        if peak != pytest.approx(expected, rel=0.1):
            wrong[case] = f"{peak / 2**20:.1f} MiB, estimated {expected / 2**20:.1f}"
    assert wrong == {}


@pytest.mark.full
def test_what_rests_on_a_disk_is_not_in_memory(
    measured: list[tuple[dict[str, Any], int]],
) -> None:
    peaks = {case: peak for case, (_, peak) in zip(CASES, measured, strict=True)}
    on_disk = estimated(measured[CASES.index((3, "nvme+nvme", True))][0]).disk
    assert on_disk > 80 << 20
    saved = peaks[3, "none", True] - peaks[3, "nvme+nvme", True]
    # All 12 bytes of a parameter, but for the buffers: three units' state and five units' weights.
    assert saved > 12 * PARAMETERS - (20 << 20)
