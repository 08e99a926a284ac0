"""Saves in the background that fail, and workers that die or leave meanwhile."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.numerics.test_leaving import exit_code_of, under_agent
from tests.support.inside import persistence_of
from tests.support.saving import (
    ASYNC,
    ENDS_AT,
    Deadly,
    Full,
    Gated,
    full_container,
    go_on,
    heard,
    undisturbed,
    use,
)
from tests.support.training import config, make_engine, train
from tests.support.waiting import wait_for
from tests.support.world import WorldError, WorldPool
from zero_checkpoint import find
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.tools.verify import verify
from zero_contract.worker import ExitCode, Left
from zero_engine.core.engine import Engine

# ---- failures ----


def test_a_full_disk_is_a_warning_of_the_next_step_and_an_error_where_no_later_save_was_made(
    worlds: WorldPool, tmp_path: Path
) -> None:
    ranks = worlds.run(2, save_on_a_full_disk, str(tmp_path))
    for number, (lines, end) in enumerate(ranks):
        assert end == worlds.run(1, undisturbed)[0]
        warnings = [line for line in lines if "was not saved" in line]
        assert len(warnings) == (1 if number == 0 else 0)
    (warning,) = [line for line in ranks[0][0] if "was not saved" in line]
    assert warning.startswith("the checkpoint of step 2 was not saved; training continues")
    assert "rank 1: " in warning
    assert warning.endswith("r00001.safetensors: No space left on device (errno 28)")
    assert [c.manifest.step for c in find(tmp_path).candidates] == [1]


def save_on_a_full_disk(root: str) -> tuple[list[str], str]:
    engine = make_engine(config(2, **ASYNC))
    train(engine, 1)
    engine.save_checkpoint(root, blocking=True)
    use(engine, Full())
    train(engine, 2)
    assert engine.save_checkpoint(root)
    wait_for(lambda: not persistence_of(engine).saver.busy, 60, "the end of the save")
    with heard(logging.WARNING) as lines:
        train(engine, 3)
        assert not engine.wait_for_checkpoint()
        train(engine, ENDS_AT)
    with pytest.raises(CheckpointError, match="its last checkpoint, of step 2, found no room"):
        engine.destroy()
    return lines, engine.weight_hash()


def test_a_failure_is_a_warning_as_well_where_there_was_no_room_for_a_copy(
    worlds: WorldPool, tmp_path: Path
) -> None:
    (begun, lines), (other_begun, _) = worlds.run(2, fail_without_room, str(tmp_path))
    assert (begun, other_begun) == (True, True)
    (warning,) = [line for line in lines if "was not saved" in line]
    assert "No space left on device" in warning


def fail_without_room(root: str) -> tuple[bool, list[str]]:
    """Rank 0 alone has no room in memory, rank 1 alone none on the disk."""
    engine = make_engine(config(1, **ASYNC))
    use(engine, Full())
    full = full_container(Path(root, "cgroup")) if dist.get_rank() == 0 else nullcontext()
    with full, heard(logging.WARNING) as lines:
        train(engine, 1)
        begun = engine.save_checkpoint(f"{root}/checkpoints")
        train(engine, 2)
        with pytest.raises(CheckpointError, match="its last checkpoint, of step 1, found no room"):
            engine.destroy()
    return begun, lines


def test_a_failure_that_is_waited_for_is_raised(worlds: WorldPool, tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"was not saved: rank 1: .*No space left on device"):
        worlds.run(2, wait_for_a_full_disk, str(tmp_path))


def wait_for_a_full_disk(root: str) -> None:
    engine = make_engine(config(2, **ASYNC))
    use(engine, Full())
    train(engine, 1)
    assert engine.save_checkpoint(root)
    engine.wait_for_checkpoint()


def test_a_rank_killed_while_it_writes_in_the_background_leaves_the_checkpoint_before(
    worlds: WorldPool, tmp_path: Path
) -> None:
    with pytest.raises(WorldError, match="rank 1 died, exit -9"):
        worlds.run(3, die_in_the_background, str(tmp_path))
    end = worlds.run(1, undisturbed)[0]
    assert worlds.run(2, go_on, str(tmp_path)) == [(end, 1)] * 2
    (attempt,) = tmp_path.glob("step-000000002.*")  # a later sweep's
    assert not (attempt / "MANIFEST.json").exists()


def die_in_the_background(root: str) -> None:
    engine = make_engine(config(3, **ASYNC))
    train(engine, 1)
    engine.save_checkpoint(root, blocking=True)
    train(engine, 2)
    if dist.get_rank() == 1:
        use(engine, Deadly())
    engine.save_checkpoint(root)
    train(engine, ENDS_AT)
    engine.wait_for_checkpoint()


def test_a_worker_that_leaves_finishes_the_save_in_flight_and_saves(
    worlds: WorldPool, tmp_path: Path
) -> None:
    ranks = worlds.run(2, leave_with_a_save_in_flight, str(tmp_path))
    assert [code for code, _ in ranks] == [ExitCode.LEFT] * 2
    steps = [c.manifest.step for c in find(tmp_path / "checkpoints").candidates]
    assert steps == [max(steps), 1]
    assert [left for _, left in ranks] == [max(steps)] * 2


def leave_with_a_save_in_flight(root: str) -> tuple[int | None, int]:
    with under_agent(root, leave_after=2) as agent:
        engine = make_engine(config(1, **ASYNC))
        disk = use(engine, Gated())
        assert isinstance(disk, Gated)
        opener = threading.Thread(target=open_when_leaving, args=(engine, disk))
        opener.start()

        def run() -> None:
            train(engine, 1)
            engine.save_checkpoint(f"{root}/checkpoints")
            train(engine, 1000)

        code = exit_code_of(engine, run)
        opener.join()
        (left,) = [message for message in agent.told() if isinstance(message, Left)]
    return code, left.step


def open_when_leaving(engine: Engine, disk: Gated) -> None:
    wait_for(lambda: engine.asked_to_leave, 60, "the request to leave")
    disk.gate.set()


ENDING = """
import concurrent.futures.thread as pools, sys, threading, torch, zero_deepspeed
from tests.support.saving import Gated, use
from tests.support.waiting import wait_for

settings = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "checkpoint": {"async": True}}
engine, *_ = zero_deepspeed.initialize(model=torch.nn.Linear(2000, 2000), config=settings)
engine.backward(engine(torch.ones(1, 2000)).sum())
engine.step()
disk = use(engine, Gated())

def open_at_the_end():
    wait_for(lambda: pools._shutdown, 30, "the end of the interpreter")
    disk.gate.set()

threading.Thread(target=open_at_the_end).start()
engine.save_checkpoint(sys.argv[1])
wait_for(disk.reached.is_set, 30, "the first chunk")
"""


@pytest.mark.full
def test_a_save_that_outlives_the_script_is_finished_by_the_ending_interpreter(
    tmp_path: Path,
) -> None:
    """No thread starts there any more; the file is 48 MB, so there are chunks left to make."""
    run = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, "Traceback" in run.stderr) == (0, False), run.stderr
    (candidate,) = find(tmp_path).candidates
    assert verify(candidate) == []
