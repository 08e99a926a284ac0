"""A checkpoint is handed on to any back end and world size, with all that a training has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.numerics.promises.back_ends import SAMPLES, Place, Recipe, hashes, training
from tests.numerics.promises.test_bits import LONG, OPTIONS, places_of
from tests.support.world import WorldPool
from zero_data import read_ledger, verify

CHAIN: list[Place] = [
    ("stage2", 3),
    ("ddp", 2),
    ("offload", 2),
    ("fsdp2", 3),
    ("plain", 1),
    ("hsdp", 4),
    ("stage0", 2),
    ("columns", 2),
    ("stage3", 2),
    ("stage1", 1),
]
STEPS = 1
"""Of each back end."""


def life(recipe: Recipe, back_end: str, root: str, number: int, until: int) -> tuple[Any, ...]:
    """Goes on, saves, and trains one more step in vain; what it has found, and the hashes."""
    sections = {
        "elastic": {"sample_ledger": f"{root}/ledger"},
        "checkpoint": {"async": bool(number % 2)},
    }
    own = training(replace(recipe, sections=sections), back_end, weights=number)
    client = own.load(f"{root}/checkpoints")
    begun = own.step, client, own.optimizer.param_groups[0]["lr"]
    found = list(own.hashes(until))
    own.save(f"{root}/checkpoints", {"by": back_end, "also": (number, [b"\x00"])})
    own.train(until + 1)
    own.close()
    return begun, found


def handed_on(worlds: WorldPool, root: Path, recipe: Recipe, steps: int) -> None:
    chain = places_of(CHAIN, recipe)
    back_end, world = chain[0]
    (expected, *_) = worlds.run(world, hashes, recipe, back_end, steps * len(chain))
    found, client = list[str](), dict[str, Any]()
    for number, (back_end, world) in enumerate(chain):
        until = (number + 1) * steps
        (part, *others) = worlds.run(world, life, recipe, back_end, str(root), number, until)
        assert all(other == part for other in others)
        begun, of_life = part
        rate = 1e-2 * 0.5 ** (number * steps) if recipe.scheduler else 1e-2
        assert begun == (number * steps, client, rate), back_end
        client = {"by": back_end, "also": (number, [b"\x00"])}
        found += of_life
        cut = next((root / "ledger").glob(f"round*-rank{world - 1}.jsonl"))
        cut.write_bytes(cut.read_bytes() + b'{"step":99,"rou')  # as a kill leaves it
    assert found == expected
    report = verify(read_ledger(root / "ledger"), SAMPLES)
    assert report.problems == ()
    assert (report.steps, set(report.world_by_step.values())) == (
        steps * len(chain) + 1,
        {world for _, world in chain},
    )


@pytest.mark.parametrize("option", [o for o in OPTIONS if o != "own calls"])
@pytest.mark.corners(option=["all at once"])
def test_each_phase_of_a_training_may_run_in_another_back_end(
    worlds: WorldPool, tmp_path: Path, option: str
) -> None:
    """With the same bits, rates and state of the script, and each sample counts once.

    The user starts each phase by hand, without an agent that counts the rounds.
    """
    handed_on(worlds, tmp_path, OPTIONS[option], STEPS)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("option", ["clipped", "autocast", "bf16", "fp16"])
def test_it_may_after_a_long_time(worlds: WorldPool, tmp_path: Path, option: str) -> None:
    handed_on(worlds, tmp_path, OPTIONS[option], LONG // len(CHAIN))
