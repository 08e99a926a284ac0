"""A disk without room for checkpoints: training goes on, and what a script ends with is saved."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.numerics.test_leaving import await_leave, exit_code_of, under_agent
from tests.support.inside import persistence_of
from tests.support.saving import ENDS_AT, heard, undisturbed, use
from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool
from zero_checkpoint import find, last_save
from zero_checkpoint.errors import DiskFull
from zero_checkpoint.files.place import Place
from zero_checkpoint.files.storage import Disk
from zero_contract.worker import ExitCode


class FullFor(Disk):
    """A disk on which the files of rank 1 find room after so many attempts, all others at once."""

    def __init__(self, attempts: int) -> None:
        self.left = attempts

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        if self.left and "r00001" in file.name:
            self.left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(file, data)


def test_a_save_that_finds_no_room_costs_a_warning_and_the_script_goes_on_and_saves_later(
    worlds: WorldPool, tmp_path: Path
) -> None:
    ranks = worlds.run(2, save_while_the_disk_is_full, str(tmp_path))
    end = worlds.run(1, undisturbed)[0]
    assert [(saved, due, last) for saved, due, last, _ in ranks] == [(False, True, end)] * 2
    (warning,), nothing = (lines for *_, lines in ranks)
    assert warning.startswith("the checkpoint of step 2 was not saved; training continues")
    assert warning.endswith(
        "r00001.safetensors: No space left on device (errno 28); free some room"
    )
    assert nothing == []
    assert [c.manifest.step for c in find(tmp_path).candidates] == [3, 1]


def save_while_the_disk_is_full(root: str) -> tuple[bool, bool, str, list[str]]:
    engine = make_engine(config(2))
    train(engine, 1)
    assert not engine.checkpoint_due(every_steps=1000)
    engine.save_checkpoint(root)
    use(engine, FullFor(1))
    train(engine, 2)
    with heard(logging.WARNING) as lines:
        saved = engine.save_checkpoint(root)
    persistence_of(engine).schedule._failed_s = float("-inf")  # a minute later
    train(engine, 3)
    due = engine.checkpoint_due(every_steps=1000)
    assert engine.save_checkpoint(root)
    assert not engine.checkpoint_due(every_steps=1000)
    train(engine, ENDS_AT)
    engine.destroy()
    return saved, due, engine.weight_hash(), lines


@pytest.mark.full
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize(("attempts", "saved"), [(3, True), (1000, False)])
def test_the_last_save_of_a_script_waits_for_room_and_without_it_the_script_fails(
    worlds: WorldPool, tmp_path: Path, attempts: int, saved: bool, asks: bool
) -> None:
    """And every save of a script that does not ask when to save: it relies on each."""
    assert worlds.run(2, end_on_a_full_disk, str(tmp_path), attempts, asks) == [saved] * 2
    steps = [c.manifest.step for c in find(tmp_path).candidates]
    assert steps == ([ENDS_AT] if saved else [])


def end_on_a_full_disk(root: str, attempts: int, asks: bool) -> bool:
    last_save._PAUSE_S, last_save.ROOM_WAIT_S = 0.01, 1.0
    engine = make_engine(config(1))
    use(engine, FullFor(attempts))
    train(engine, ENDS_AT)
    if asks:
        engine.checkpoint_due(every_steps=1000)
    try:
        assert engine.save_checkpoint(root) is not asks
        engine.destroy()
    except DiskFull:
        return False
    return True


def test_a_training_whose_last_save_fails_is_closed_all_the_same(
    worlds: WorldPool, tmp_path: Path
) -> None:
    assert worlds.run(1, close_on_a_full_disk, str(tmp_path)) == [True]


def close_on_a_full_disk(root: str) -> bool:
    """Whether its ledger is closed, when it has hung up on its agent."""
    last_save._PAUSE_S, last_save.ROOM_WAIT_S = 0.01, 0.1
    with under_agent(root) as agent:
        engine = make_engine(config(1, elastic={"sample_ledger": f"{root}/ledger"}))
        use(engine, Full())
        train(engine, 1)
        engine.checkpoint_due(every_steps=1000)
        assert not engine.save_checkpoint(f"{root}/checkpoints")
        with pytest.raises(DiskFull):
            engine.destroy()
        agent.told()
    ledger = engine._run.ledger
    return ledger is not None and ledger._file.closed


@pytest.mark.full
def test_a_worker_that_leaves_a_full_disk_leaves_all_the_same(
    worlds: WorldPool, tmp_path: Path
) -> None:
    assert worlds.run(2, leave_a_full_disk, str(tmp_path)) == [ExitCode.LEFT] * 2


def leave_a_full_disk(root: str) -> int | None:
    last_save._PAUSE_S, last_save.LEAVING_WAIT_S = 0.01, 0.1
    with under_agent(root, leave_after=2):
        engine = make_engine(config(1))
        engine.load_checkpoint(f"{root}/checkpoints")
        use(engine, FullFor(1000))

        def run() -> None:
            train(engine, 2)
            await_leave(engine)
            train(engine, 4)  # it leaves where the loop comes back behind step 3

        return exit_code_of(engine, run)


ENDS = """
import sys, torch, zero_deepspeed
from tests.support.saving import use
from tests.numerics.test_full_disk import Full

engine, *_ = zero_deepspeed.initialize(
    model=torch.nn.Linear(2, 2), config={"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
)
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
use(engine, Full())
if engine.checkpoint_due(every_steps=1):
    engine.save_checkpoint(sys.argv[1])
"""


class Full(Disk):
    """A disk without any room."""

    def create(self, path: Place) -> BinaryIO:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.full
def test_a_script_that_ends_without_its_last_checkpoint_does_not_exit_with_0(
    tmp_path: Path,
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, "Traceback" in run.stderr) == (1, False), run.stderr
    assert f"its last checkpoint, of step 1, found no room in {tmp_path}" in run.stderr
