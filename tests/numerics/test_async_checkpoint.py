"""Saves in the background: the state of their own step, whatever happens meanwhile."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist

import zero_engine
from tests.numerics.test_leaving import exit_code_of, under_agent
from tests.support.models import make_model
from tests.support.training import config, make_engine, train
from tests.support.waiting import wait_for
from tests.support.world import WorldError, WorldPool
from zero_engine.checkpoint import find
from zero_engine.checkpoint.arena import Arena
from zero_engine.checkpoint.storage import Disk
from zero_engine.engine import Engine
from zero_engine.errors import CheckpointError
from zero_orchestrator.contract import ExitCode, Left

ASYNC = {"checkpoint": {"async": True}}
SAVED_AT, ENDS_AT = 2, 5


class Gated(Disk):
    """A disk on which nothing can be written until the gate is opened."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.reached = threading.Event()

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        self.reached.set()
        assert self.gate.wait(30), "nobody opened the gate"
        super().write(file, data)


class Throttled(Disk):
    """A disk that writes a little each time that it is let, and the rest at the end."""

    def __init__(self) -> None:
        self.turns = threading.Semaphore(0)
        self.written = 0

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        for begin in range(0, len(data), 1 << 10):
            assert self.turns.acquire(timeout=30), "nobody let it write"
            part = memoryview(data)[begin : begin + (1 << 10)]
            super().write(file, part)
            self.written += len(part)


class Full(Disk):
    """A disk on which the files of one rank find no room."""

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        if "r00001" in file.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(file, data)


class Deadly(Disk):
    """A disk that kills the process once half of a slab is written."""

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        super().write(file, data[: len(data) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def heard(level: int = logging.INFO) -> Iterator[list[str]]:
    """What the engine logs meanwhile."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zero_engine")
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def use(engine: Engine, disk: Disk) -> Disk:
    engine._persistence.saver.disk = disk
    return disk


# ---- the state of its own step ----


def save_blocking(root: str, stage: int) -> str:
    engine = make_engine(config(stage))
    train(engine, SAVED_AT)
    assert engine.save_checkpoint(root)
    train(engine, ENDS_AT)
    engine.destroy()
    return engine.weight_hash()


def save_gated(root: str, stage: int) -> str:
    engine = make_engine(config(stage, **ASYNC))
    disk = use(engine, Gated())
    assert isinstance(disk, Gated)
    train(engine, SAVED_AT)
    assert engine.save_checkpoint(root)
    assert disk.reached.wait(30)
    train(engine, ENDS_AT)  # while not a byte is written
    assert find(Path(root)).candidates == ()
    disk.gate.set()
    assert engine.wait_for_checkpoint()
    engine.destroy()
    return engine.weight_hash()


def save_throttled(root: str, stage: int) -> str:
    engine = make_engine(config(stage, **ASYNC))
    disk = use(engine, Throttled())
    assert isinstance(disk, Throttled)
    train(engine, SAVED_AT)
    assert engine.save_checkpoint(root)
    for step in range(SAVED_AT + 1, ENDS_AT + 1):
        before = disk.written
        disk.turns.release()
        wait_for(lambda before=before: disk.written > before, 30, "a part of the file")
        train(engine, step)
    assert find(Path(root)).candidates == ()
    disk.turns.release(1 << 20)
    engine.destroy()
    return engine.weight_hash()


def save_after_a_load(root: str, stage: int) -> str:
    """A load gives the optimizer new state: what was kept of the save before must not be used."""
    engine = make_engine(config(stage, **ASYNC))
    train(engine, 1)
    engine.save_checkpoint(f"{root}.before")
    train(engine, ENDS_AT)
    engine.load_checkpoint(f"{root}.before")
    train(engine, SAVED_AT)
    engine.save_checkpoint(root)
    train(engine, ENDS_AT)
    engine.destroy()
    return engine.weight_hash()


@pytest.mark.parametrize("save", [save_gated, save_throttled, save_after_a_load])
@pytest.mark.parametrize(("stage", "world"), [(0, 2), (3, 3)])
def test_a_background_save_writes_the_bytes_that_a_blocking_one_would_have_written(
    worlds: WorldPool, tmp_path: Path, stage: int, world: int, save: Any
) -> None:
    blocking, background = tmp_path / "blocking", tmp_path / "background"
    end = worlds.run(world, save_blocking, str(blocking), stage)
    assert worlds.run(world, save, str(background), stage) == end
    (ours,), (theirs,) = (find(root).candidates for root in (background, blocking))
    assert ours.manifest.step == theirs.manifest.step == SAVED_AT
    for rank in range(world):
        name = f"r{rank:05d}.safetensors"
        assert (ours.path / name).read_bytes() == (theirs.path / name).read_bytes()
    assert {rank[0] for rank in worlds.run(1, go_on, str(background))} == set(end)


def go_on(root: str) -> tuple[str, int]:
    """Resume at stage 1; the hash at the end, and the step that was loaded."""
    engine = make_engine(config(1), seed=8)
    engine.load_checkpoint(root)
    loaded = engine.global_steps
    train(engine, ENDS_AT)
    return engine.weight_hash(), loaded


def test_without_room_in_shared_memory_training_waits_and_says_why_once(
    worlds: WorldPool, tmp_path: Path
) -> None:
    for lines in worlds.run(2, save_twice_without_room, str(tmp_path)):
        (why,) = [line for line in lines if "training waits for checkpoints" in line]
        assert f"{tmp_path}/none has room for 0 MiB, the state takes 1 MiB" in why
    assert [c.manifest.step for c in find(tmp_path).candidates] == [2, 1]


def save_twice_without_room(root: str) -> list[str]:
    engine = make_engine(config(2, **ASYNC))
    engine._persistence.saver.arena = Arena("t", dist.get_rank(), Path(root, "none"))
    with heard() as lines:
        for step in (1, 2):
            train(engine, step)
            assert engine.save_checkpoint(root)
            assert len(find(Path(root)).candidates) == step  # it is there at once
    engine.destroy()
    return lines


# ---- one at a time ----


def test_a_save_that_finds_another_in_flight_is_skipped_by_all_ranks_if_so_configured(
    worlds: WorldPool, tmp_path: Path
) -> None:
    assert worlds.run(3, save_while_rank_1_is_busy, str(tmp_path)) == [(False, True)] * 3
    assert [c.manifest.step for c in find(tmp_path).candidates] == [3, 1]


def save_while_rank_1_is_busy(root: str) -> tuple[bool, bool]:
    engine = make_engine(config(1, checkpoint={"async": True, "when_busy": "skip"}))
    disk = use(engine, Gated())
    assert isinstance(disk, Gated)
    if dist.get_rank() != 1:
        disk.gate.set()
    train(engine, 1)
    assert engine.save_checkpoint(root)
    train(engine, 2)
    second = engine.save_checkpoint(root)
    disk.gate.set()
    engine.wait_for_checkpoint()
    train(engine, 3)
    third = engine.save_checkpoint(root)
    engine.destroy()
    return second, third


def test_a_save_that_finds_another_in_flight_waits_with_a_word(
    worlds: WorldPool, tmp_path: Path
) -> None:
    first, second = worlds.run(2, save_after_each_step, str(tmp_path))
    assert "waiting: the checkpoint of step 1 is still being written" in first
    assert not [line for line in second if "waiting" in line]
    assert [c.manifest.step for c in find(tmp_path).candidates] == [3, 2, 1]


def save_after_each_step(root: str) -> list[str]:
    engine = make_engine(config(1, **ASYNC))
    disk = use(engine, Gated())
    assert isinstance(disk, Gated)
    with heard() as lines:
        train(engine, 1)
        engine.save_checkpoint(root)
        train(engine, 2)
        opener = threading.Thread(target=open_when_waited_for, args=(engine, disk))
        opener.start()
        engine.save_checkpoint(root)
        opener.join()
        train(engine, 3)
        engine.save_checkpoint(root)
        engine.destroy()
    return lines


def open_when_waited_for(engine: Engine, disk: Gated) -> None:
    background = engine._persistence.saver._background
    wait_for(lambda: background._running is None, 20, "a second save")
    disk.gate.set()


# ---- what stays ----


def test_the_best_checkpoint_stays_by_the_number_that_the_script_saves(
    worlds: WorldPool, tmp_path: Path
) -> None:
    for says in worlds.run(2, save_with_losses, str(tmp_path)):
        assert "client_state['eval_loss'] is 'low'; checkpoint.keep_best compares numbers" in says
    assert [c.manifest.step for c in find(tmp_path).candidates] == [5, 4, 2]


def save_with_losses(root: str) -> str:
    best = {"metric": "eval_loss", "n": 1}
    engine = make_engine(config(1, checkpoint={"keep_last": 2, "keep_best": best}))
    for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), None], start=1):
        train(engine, step)
        engine.save_checkpoint(root, client_state={"eval_loss": loss} if loss else {})
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(root, client_state={"eval_loss": "low"})
    engine.destroy()
    return str(caught.value)


# ---- failures ----


def test_a_full_disk_is_a_warning_of_the_next_step_and_training_ends_as_if_undisturbed(
    worlds: WorldPool, tmp_path: Path
) -> None:
    ranks = worlds.run(2, save_on_a_full_disk, str(tmp_path))
    for number, (lines, end) in enumerate(ranks):
        assert end == worlds.run(1, undisturbed)[0]
        warnings = [line for line in lines if "was not saved" in line]
        assert len(warnings) == (1 if number == 0 else 0)
    (warning,) = [line for line in ranks[0][0] if "was not saved" in line]
    assert warning.startswith("the checkpoint of step 2 was not saved; training goes on")
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
    wait_for(lambda: not engine._persistence.saver.busy, 20, "the end of the save")
    with heard(logging.WARNING) as lines:
        train(engine, 3)
        assert not engine.wait_for_checkpoint()
        train(engine, ENDS_AT)
    engine.destroy()
    return lines, engine.weight_hash()


def undisturbed() -> str:
    engine = make_engine(config(0))
    train(engine, ENDS_AT)
    return engine.weight_hash()


def test_a_failure_is_a_warning_as_well_where_there_was_no_room_for_a_copy(
    worlds: WorldPool, tmp_path: Path
) -> None:
    (begun, lines), (other_begun, _) = worlds.run(2, fail_without_room, str(tmp_path))
    assert (begun, other_begun) == (True, True)
    (warning,) = [line for line in lines if "was not saved" in line]
    assert "No space left on device" in warning


def fail_without_room(root: str) -> tuple[bool, list[str]]:
    """Rank 0 alone has no room in shared memory, rank 1 alone none on the disk."""
    engine = make_engine(config(1, **ASYNC))
    use(engine, Full())
    if dist.get_rank() == 0:
        engine._persistence.saver.arena = Arena("t", 0, Path(root, "none"))
    with heard(logging.WARNING) as lines:
        train(engine, 1)
        begun = engine.save_checkpoint(f"{root}/checkpoints")
        train(engine, 2)
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
    wait_for(lambda: engine._persistence.leaving, 20, "the request to leave")
    disk.gate.set()


# ---- when ----


@pytest.mark.parametrize(("ahead", "answer"), [(0, True), (1, False)])
def test_all_ranks_go_by_the_clock_of_rank_0(worlds: WorldPool, ahead: int, answer: bool) -> None:
    assert worlds.run(2, ask_with_one_clock_ahead, ahead) == [answer] * 2


def ask_with_one_clock_ahead(ahead: int) -> bool:
    engine = make_engine(config(1, checkpoint={"every_s": 500}))
    if dist.get_rank() == ahead:
        engine._persistence.schedule._clock = lambda: time.monotonic() + 1000
    train(engine, 1)
    due = engine.checkpoint_due()
    engine.destroy()
    return due


# ---- the weight hash ----


@pytest.mark.parametrize(
    ("configured", "blocking", "there"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_the_weight_hash_is_taken_where_training_waits_anyway_or_as_configured(
    worlds: WorldPool, tmp_path: Path, configured: bool | None, blocking: bool, there: bool
) -> None:
    (digest, moved), _ = worlds.run(2, save_hashed, str(tmp_path), configured, blocking)
    engine = find(tmp_path).candidates[0].manifest.meta["engine"]
    assert engine["weight_hash"] == (digest if there else None)
    assert bool(moved) == there


def save_hashed(root: str, configured: bool | None, blocking: bool) -> tuple[str, int]:
    """The hash, and how many bytes a save has moved between ranks."""
    engine = make_engine(config(3, checkpoint={"weight_hash": configured}))
    train(engine, 1)
    counter = engine._core.collectives.bytes_sent
    before = counter.total()
    engine.save_checkpoint(root, blocking=blocking)
    engine.wait_for_checkpoint()
    moved = counter.total() - before
    digest = engine.weight_hash()
    engine.destroy()
    return digest, moved


# ---- what is loaded ----


def save_one(root: str, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """Train a little and save; the weights, in fp32."""
    engine = make_engine(config(2))
    train(engine, 1)
    engine.save_checkpoint(root, exclude_frozen_parameters=exclude_frozen)
    whole = engine.module_state_dict()
    engine.destroy()
    return whole


def evaluation_engine(dtype: str) -> Engine:
    model = make_model(seed=8)
    settings = {"train_batch_size": 2, "bf16": {"enabled": dtype == "bf16"}}
    engine, *_ = zero_engine.initialize(
        model=model, config=settings, model_parameters=list(model.parameters())
    )
    return engine


def weights_alone(root: str, dtype: str) -> tuple[dict[str, torch.Tensor], int]:
    engine = evaluation_engine(dtype)
    engine.load_checkpoint(root)
    whole = engine.module_state_dict()
    engine.destroy()
    return whole, engine.global_steps


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_engine_without_an_optimizer_loads_the_weights_in_its_own_dtype(
    worlds: WorldPool, tmp_path: Path, dtype: str
) -> None:
    saved = worlds.run(3, save_one, str(tmp_path))[0]
    for loaded, step in worlds.run(2, weights_alone, str(tmp_path), dtype):
        assert step == 1
        assert loaded.keys() == saved.keys()
        for name, value in saved.items():
            narrow = value.bfloat16() if dtype == "bf16" else value
            assert torch.equal(loaded[name], narrow), name


def test_module_only_leaves_optimizer_scheduler_and_position_alone(
    worlds: WorldPool, tmp_path: Path
) -> None:
    saved = worlds.run(2, save_one, str(tmp_path))[0]
    for loaded, step, moments in worlds.run(
        2, load_partly, str(tmp_path), {"load_module_only": True}
    ):
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert (step, moments) == (3, True)


def test_without_optimizer_states_the_position_is_loaded_and_the_moments_stay(
    worlds: WorldPool, tmp_path: Path
) -> None:
    saved = worlds.run(2, save_one, str(tmp_path))[0]
    options = {"load_optimizer_states": False}
    for loaded, step, moments in worlds.run(2, load_partly, str(tmp_path), options):
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert (step, moments) == (1, True)


def load_partly(root: str, options: dict[str, bool]) -> tuple[dict[str, torch.Tensor], int, bool]:
    """After three steps of another model; also, whether its moments are still there."""
    engine = make_engine(config(1), seed=8)
    train(engine, 3)
    optimizer = engine.optimizer
    assert optimizer is not None
    before = {k: v["exp_avg"].clone() for k, v in optimizer.state.items()}
    engine.load_checkpoint(root, **options)  # type: ignore[arg-type]
    after = {k: v["exp_avg"] for k, v in optimizer.state.items()}
    stayed = all(torch.equal(after[k], moments) for k, moments in before.items())
    whole = engine.module_state_dict()
    engine.destroy()
    return whole, engine.global_steps, stayed and bool(before)


def test_frozen_parameters_that_were_left_out_stay_as_the_script_made_them(
    worlds: WorldPool, tmp_path: Path
) -> None:
    saved = worlds.run(2, save_one, str(tmp_path), True)[0]
    stored = {t.fqn for t in find(tmp_path).candidates[0].manifest.tensors}
    frozen = {"blocks.0.scale", "blocks.1.scale"}
    assert frozen.isdisjoint(stored)
    own = make_model(seed=8).state_dict()
    for loaded, _, _ in worlds.run(3, load_partly, str(tmp_path), {}):
        for name, value in saved.items():
            assert torch.equal(loaded[name], own[name] if name in frozen else value), name


def load_changed(root: str, options: dict[str, bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """Into a model that has one parameter more and one less."""
    model = make_model(seed=8)
    del model.unused
    model.extra = torch.nn.Parameter(torch.ones(5))
    engine, *_ = zero_engine.initialize(
        model=model, config=config(2), model_parameters=list(model.parameters())
    )
    engine.load_checkpoint(root, **options)  # type: ignore[arg-type]
    whole = engine.module_state_dict()
    engine.destroy()
    return whole["embed.weight"], whole["extra"]


def test_a_changed_model_loads_what_it_has_in_common_if_asked_to(
    worlds: WorldPool, tmp_path: Path
) -> None:
    saved = worlds.run(2, save_one, str(tmp_path))[0]
    options = {"load_module_strict": False, "load_optimizer_states": False}
    for embed, extra in worlds.run(2, load_changed, str(tmp_path), options):
        assert torch.equal(embed, saved["embed.weight"])
        assert torch.equal(extra, torch.ones(5))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"load_optimizer_states": False}, "1 missing in the checkpoint: param/extra; 1 extra"),
        ({"load_module_strict": False}, "or load with load_optimizer_states=False"),
    ],
)
def test_a_changed_model_is_refused_otherwise_and_the_remedy_named(
    worlds: WorldPool, tmp_path: Path, options: dict[str, bool], says: str
) -> None:
    worlds.run(1, save_one, str(tmp_path))
    with pytest.raises(WorldError, match=says):
        worlds.run(1, load_changed, str(tmp_path), options)


def save_as_the_readme_does(root: str) -> list[int]:
    """Ask after every micro-step, of which a step here has three or five."""
    engine = make_engine(config(1))
    saved: list[int] = []
    loader = engine.training_dataloader
    assert loader is not None
    while engine.global_steps < 6:
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()
            if engine.checkpoint_due(every_steps=2):
                assert engine.save_checkpoint(root)
                saved.append(engine.global_steps)
    engine.destroy()
    return saved


@pytest.mark.parametrize("world", [1, 2])
def test_a_script_that_asks_after_every_micro_step_saves_once_per_step_that_is_due(
    worlds: WorldPool, tmp_path: Path, world: int
) -> None:
    assert worlds.run(world, save_as_the_readme_does, str(tmp_path)) == [[2, 4, 6]] * world
