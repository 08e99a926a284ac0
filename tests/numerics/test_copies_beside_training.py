"""The state is copied beside forward and backward, as a device does it; here by a thread."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Container
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.numerics.in_memory.nodes import (
    STEPS,
    checkpoints,
    drop,
    finish,
    in_memory,
    on_a_node,
    run_alone,
    settle,
)
from tests.support.inside import persistence_of
from tests.support.models import TinyGPT
from tests.support.saving import ASYNC, ENDS_AT, SAVED_AT, heard, undisturbed
from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool
from zero_checkpoint import find
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.chunks import Copy
from zero_checkpoint.saving.copiers import Begun, address_of, divide
from zero_checkpoint.saving.staging import StagingBuffer
from zero_checkpoint.saving.staging_memory import PrivateStaging
from zero_engine.core.engine import Engine


class ByThread:
    """A copier that copies when it is told to, as a device does when it comes to it."""

    def __init__(self, failure: str = "") -> None:
        self.told, self.held = threading.Event(), threading.Event()
        self.failure = failure
        self.begun: list[OnThread] = []

    def of(self, device: torch.device, memory: mmap.mmap, beside: bool) -> ByThread:
        assert (device.type, beside) == ("cpu", True)
        return self

    def prepare(self, copy: Copy, changing: Container[int]) -> Callable[[], Begun]:
        first, others = divide(copy, lambda source: address_of(source) in changing)

        def begin() -> Begun:
            first.begin()
            self.begun.append(OnThread(self, others))
            return self.begun[-1]

        return begin

    def hold(self) -> None:
        if not all(each.done.is_set() for each in self.begun):
            self.held.set()
        self.settle()

    def settle(self) -> bool:
        return all(each.done.wait(60) for each in self.begun)

    def close(self) -> None:
        assert self.settle()


class OnThread:
    def __init__(self, copier: ByThread, copy: Copy) -> None:
        self.memory, self.failure, self.done = copy.memory, "", threading.Event()
        self._copier, self._copy = copier, copy
        threading.Thread(target=self._run).start()

    def _run(self) -> None:
        assert self._copier.told.wait(60), "nobody told it to copy"
        self.failure = self._copier.failure
        if not self.failure:
            self._copy.begin()
        self.done.set()

    def under_way(self) -> bool:
        return not self.done.is_set()


def use(engine: Engine, copier: ByThread) -> None:
    before = engine._core.moved.before_change
    staging = StagingBuffer(PrivateStaging(), before_change=before, choose=copier.of)
    persistence_of(engine).saver.staging = staging


class Counting(TinyGPT):
    """A model whose forward writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(5))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(tokens)


def train_beside_a_copy(root: str) -> list[tuple[int, bool, bool]]:
    engine = make_engine(config(1, bf16=True, **ASYNC), model=Counting())
    train(engine, SAVED_AT)
    assert engine.save_checkpoint(f"{root}/at-once", blocking=True)
    copier = ByThread()
    use(engine, copier)
    assert engine.save_checkpoint(f"{root}/beside")

    def copy_when_the_step_waits() -> None:
        if copier.held.wait(60):
            copier.told.set()

    threading.Thread(target=copy_when_the_step_waits).start()
    seen = []
    assert engine.training_dataloader is not None
    for batch in engine.training_dataloader:
        engine.backward(engine(batch))
        before = copier.held.is_set()
        engine.step()
        seen.append((engine.global_steps, before, copier.held.is_set()))
        if engine.global_steps > SAVED_AT:
            break
    copier.told.set()  # or the save would wait, if no step has
    assert engine.wait_for_checkpoint()
    engine.destroy()
    return seen


def test_forward_and_backward_run_beside_the_copy_and_the_step_waits_for_it(
    worlds: WorldPool, tmp_path: Path
) -> None:
    (seen,) = worlds.run(1, train_beside_a_copy, str(tmp_path))
    *inside, last = seen
    assert set(inside) == {(SAVED_AT, False, False)}
    assert last == (SAVED_AT + 1, False, True)
    (at_once,), (beside,) = (find(tmp_path / each).candidates for each in ("at-once", "beside"))
    name = "r00000.safetensors"
    assert (beside.path / name).read_bytes() == (at_once.path / name).read_bytes()


def change_the_weights_beside_a_copy(root: str) -> bool:
    """Through the engine, by another way than a step."""
    engine = make_engine(config(1, bf16=True, **ASYNC))
    train(engine, SAVED_AT)
    before = engine.weight_hash()
    copier = ByThread()
    use(engine, copier)
    assert engine.save_checkpoint(root)
    threading.Thread(target=lambda: copier.held.wait(60) and copier.told.set()).start()
    state = {name: value * 2 for name, value in engine.module.state_dict().items()}
    engine.load_state_dict({f"module.{name}": value for name, value in state.items()})
    assert copier.held.is_set()
    assert engine.wait_for_checkpoint()
    assert engine.weight_hash() != before
    engine.load_checkpoint(root)
    return bool(engine.weight_hash() == before)


def test_weights_that_a_script_loads_wait_for_the_copy(worlds: WorldPool, tmp_path: Path) -> None:
    assert worlds.run(1, change_the_weights_beside_a_copy, str(tmp_path)) == [True]


def train_on_when_a_copy_fails(root: str) -> tuple[list[str], str]:
    engine = make_engine(config(1, **ASYNC))
    train(engine, SAVED_AT)
    copier = ByThread(failure="the link to the device is down")
    copier.told.set()
    use(engine, copier)
    with heard(logging.WARNING) as lines:
        assert engine.save_checkpoint(root)
        train(engine, ENDS_AT)
        with pytest.raises(CheckpointError, match="its last checkpoint, of step 2, was not saved"):
            engine.destroy()
    return lines, engine.weight_hash()


def test_a_copy_that_fails_fails_its_save_and_training_goes_on(
    worlds: WorldPool, tmp_path: Path
) -> None:
    ((lines, end),) = worlds.run(1, train_on_when_a_copy_fails, str(tmp_path))
    assert end == worlds.run(1, undisturbed)[0]
    (line,) = lines
    assert line.startswith("the checkpoint of step 2 was not saved; training continues")
    assert line.endswith("the state could not be copied: the link to the device is down")
    assert find(tmp_path).candidates == ()


def keep_in_memory_beside_training(root: str) -> tuple[list[str], str]:
    """The copy of the first step fails, those of the others do not."""
    with on_a_node(root), heard(logging.WARNING) as lines:
        engine = make_engine(in_memory(1))
        engine.load_checkpoint(checkpoints(root))
        ram, copier = (
            persistence_of(engine).ram,
            ByThread(failure="the link to the device is down"),
        )
        assert ram is not None
        for staging in ram._stagings:
            staging._choose = copier.of
        copier.told.set()
        for step in range(1, STEPS + 1):
            train(engine, step)
            settle(engine)
            copier.failure = ""
        drop(engine)
        return lines, engine.weight_hash()


@pytest.mark.full
def test_in_memory_checkpoints_are_copied_beside_training_and_a_failure_costs_one(
    worlds: WorldPool, tmp_path: Path
) -> None:
    ((lines, end),) = worlds.run(1, keep_in_memory_beside_training, str(tmp_path))
    assert end == worlds.run(1, run_alone)[0]
    (line,) = [line for line in lines if "not in memory" in line]
    assert line.startswith("step 1 is not in memory, and nothing else is: rank 0: ")
    assert line.endswith("the state could not be copied: the link to the device is down")
    assert worlds.run(1, finish, str(tmp_path), 1) == [(STEPS, end)]
