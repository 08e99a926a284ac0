"""Data of libraries in whole trainings: saved by 4 ranks, resumed by 3 and by 8, one hash."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.libraries.kinds import KINDS, OF_ONE_JOB, WRITES, inputs
from tests.numerics.promises.back_ends import Recipe, agreed
from tests.numerics.promises.test_lanes import run
from tests.support.world import WorldPool
from zero_data import read_ledger, verify

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]

PATHS = {"engine": ("stage3", "stage0", "stage3"), "protect": ("ddp", "fsdp2", "ddp")}
STEPS = (3, 11, 19)
"""The ranks of each number change after these; an epoch of 150 lines has 15 steps."""


def as_torchrun(kind: str, data: str, ledger: str, *how: Any) -> list[str]:
    """The hash after each step, where libraries ask the environment for their rank."""
    warnings.simplefilter("ignore")  # those of the libraries
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    given = Recipe(
        data=partial(KINDS[kind], Path(data)),
        collate=inputs,
        sections={"elastic": {"sample_ledger": ledger}},
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ("RANK", rank), ("WORLD_SIZE", world):
            patch.setenv(name, value)
            patch.setenv(f"LOCAL_{name}", value)
        return run(given, *how)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_goes_on_with_any_number_of_ranks(
    worlds: WorldPool, tmp_path: Path, kind: str, path: str
) -> None:
    data, ledger, saved = tmp_path / "data", tmp_path / "ledger", str(tmp_path / "saved")
    data.mkdir()
    WRITES[kind](data)

    def job(world: int, ledger: Path, *how: Any) -> list[str]:
        pool = WorldPool(world) if kind in OF_ONE_JOB else worlds
        given = kind, str(data), str(ledger)
        try:
            return agreed(pool.run(world, as_torchrun, *given, *how, deadline_s=240))
        finally:
            if pool is not worlds:
                pool.close()

    alone = job(1, tmp_path / "alone", "plain", STEPS[-1])
    found: list[str] = []
    for back_end, world, until in zip(PATHS[path], (4, 3, 8), STEPS, strict=True):
        found += job(world, ledger, back_end, until, saved, saved if found else None)
    assert found == alone
    size = 150 if kind == "HF map-style" else None
    report = verify(read_ledger(ledger), size)
    assert (report.problems, report.steps) == ((), STEPS[-1])
    assert set(report.world_by_step.values()) == {4, 3, 8}
    assert report.samples == verify(read_ledger(tmp_path / "alone"), size).samples
