"""A rank is killed at each change that its saves make to files: nothing is torn, lost or doubled.

Every step is saved, and the checkpoint before it deleted. Whoever goes on, under another back end
and at another world size, ends with the weights and the samples of a run that nothing has happened
to.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.numerics.promises.back_ends import (
    SAMPLES,
    STEPS,
    WITH_EVERYTHING,
    Place,
    hashes,
    training,
)
from tests.support.deadly import DEADLY
from tests.support.world import WorldError, WorldPool
from zero_data import read_ledger, verify

PLACES: list[Place] = [("ddp", 2), ("fsdp2", 2), ("stage0", 2), ("stage3", 2)]
WHOLE = (-1, 0)


def life(place: Place, root: str, is_async: bool, kill: tuple[int, int]) -> tuple[str, int]:
    """Go on to the end; the weights, and how often this rank has changed a file.

    Args:
        place: Where.
        root: Has the checkpoints, and the record of samples.
        is_async: Saves in the background.
        kill: A rank, and before which of its changes it dies.
    """
    sections = {
        "elastic": {"sample_ledger": f"{root}/ledger"},
        "checkpoint": {"async": is_async, "keep_last": 2},
    }
    own = training(replace(WITH_EVERYTHING, sections=sections), place[0])
    rank, number = kill
    DEADLY.arm([root], number if rank == dist.get_rank() else 0)
    own.load(f"{root}/checkpoints")
    for _ in own.steps(STEPS):
        own.save(f"{root}/checkpoints")
    own.close()
    changes = DEADLY.changes
    DEADLY.arm([])
    return own.hash(), changes


def killed(
    worlds: WorldPool, root: Path, kills: list[tuple[Place, int, int]], is_async: bool
) -> None:
    (expected,) = worlds.run(1, hashes, WITH_EVERYTHING, "plain", STEPS)
    for place, rank, number in kills:
        kill = (rank % place[1], number)
        told = f"rank {kill[0]} died, exit -9"
        try:
            worlds.run(place[1], life, place, str(root), is_async, kill, grace_s=0.5)
        except WorldError as error:
            if told not in str(error):
                raise
    last = ("stage2", 3) if len(kills) % 2 else ("plain", 1)
    ends = worlds.run(last[1], life, last, str(root), is_async, WHOLE)
    assert {end for end, _ in ends} == {expected[-1]}, kills
    report = verify(read_ledger(root / "ledger"), SAMPLES)
    assert (report.problems, report.steps) == ((), STEPS), kills


@pytest.mark.full
@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_whichever_change_a_rank_is_killed_at(
    worlds: WorldPool, tmp_path: Path, place: Place, is_async: bool
) -> None:
    counted = worlds.run(place[1], life, place, str(tmp_path / "whole"), is_async, WHOLE)
    for rank, (_, changes) in enumerate(counted):
        assert changes >= STEPS
        for number in range(1, changes + 1):
            root = tmp_path / f"{rank}-{number}"
            killed(worlds, root, [(place, rank, number)], is_async)


@pytest.mark.parametrize("number", [3, 9])
@pytest.mark.corners(number=[9])
def test_some_of_them(worlds: WorldPool, tmp_path: Path, number: int) -> None:
    killed(worlds, tmp_path, [(("fsdp2", 2), 0, number), (("ddp", 2), 1, 2)], is_async=False)


KILLS = st.lists(
    st.tuples(
        st.sampled_from([*PLACES, ("plain", 1), ("hsdp", 4)]), st.integers(0, 3), st.integers(1, 40)
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=30)
@given(kills=KILLS, is_async=st.booleans())
@pytest.mark.full
def test_one_after_the_other(
    worlds: WorldPool,
    tmp_path_factory: pytest.TempPathFactory,
    kills: list[tuple[Place, int, int]],
    is_async: bool,
) -> None:
    killed(worlds, tmp_path_factory.mktemp("killed"), kills, is_async)
