"""Ctrl-C, or a signal handler that raises, while training waits for a save to be written."""

from __future__ import annotations

import itertools
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_checkpoint
import zero_deepspeed
import zero_engine
import zero_step
from tests.support.saving import Gated, use
from tests.support.waiting import wait_for
from tests.support.world import WorldPool
from zero_checkpoint import find
from zero_checkpoint.files.storage import Disk
from zero_checkpoint.saving.saver import Saver
from zero_checkpoint.saving.staging import Background
from zero_engine.core.engine import Engine

WIDTH = 2048
"""Its state takes several chunks, most of which are not copied before the first is written."""


class Preempted(Exception):
    """What a script raises in its handler of a signal."""


def make(stage: int) -> Engine:
    torch.manual_seed(1)
    engine, *_ = zero_deepspeed.initialize(
        model=nn.Linear(WIDTH, WIDTH),
        config={
            "train_batch_size": 2,
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        },
    )
    return engine


def step(engine: Engine) -> None:
    begun_at = engine.global_steps
    while engine.global_steps == begun_at:
        engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
        engine.step()


def main_thread_is_in(function: Any) -> bool:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return any(each.f_code is function.__code__ for each, _ in traceback.walk_stack(frame))


def interrupt_a_save(root: str, stage: int, error: type[BaseException]) -> tuple[str, str]:
    """Rank 0 is interrupted when it has begun to write, and goes on."""

    def interrupt(*_: Any) -> None:
        raise error

    engine = make(stage)
    step(engine)
    saved = engine.weight_hash()
    if dist.get_rank():
        engine.save_checkpoint(root)
    else:
        before = signal.signal(signal.SIGINT, interrupt)
        disk = use(engine, Gated())
        assert isinstance(disk, Gated)

        def act() -> None:
            assert disk.reached.wait(120)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            wait_for(lambda: main_thread_is_in(Saver.wait_for_room), 30, "it waits once more")
            disk.gate.set()

        threading.Thread(target=act, daemon=True).start()
        with pytest.raises(error):
            engine.save_checkpoint(root)
        signal.signal(signal.SIGINT, before)
    step(engine)
    assert engine.wait_for_checkpoint()
    return saved, engine.weight_hash()


def load(root: str, stage: int) -> tuple[str, str]:
    engine = make(stage)
    engine.load_checkpoint(root)
    loaded = engine.weight_hash()
    step(engine)
    return loaded, engine.weight_hash()


@pytest.mark.parametrize(
    ("stage", "error"), [(0, KeyboardInterrupt), (2, Preempted), (3, KeyboardInterrupt)]
)
@pytest.mark.corners(stage=[3])
def test_who_interrupts_a_save_and_trains_on_finds_in_it_what_was_there_when_it_began(
    worlds: WorldPool, tmp_path: Path, stage: int, error: type[BaseException]
) -> None:
    both = worlds.run(2, interrupt_a_save, str(tmp_path), stage, error)
    assert len(find(tmp_path).candidates) == 1
    assert worlds.run(2, load, str(tmp_path), stage) == both


# ---- at any moment ----


class Late(Disk):
    """A disk that writes nothing until the script waits for it, or has trained on."""

    def __init__(self) -> None:
        self.trained = threading.Event()

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        def may_write() -> bool:
            return self.trained.is_set() or main_thread_is_in(Background.wait)

        wait_for(may_write, 30, "the script trains on, or waits")
        super().write(file, data)


OURS = tuple(each.__path__[0] for each in (zero_checkpoint, zero_engine, zero_step))
OF_THREADS = (threading.Thread.start.__code__, threading.Event.wait.__code__)


@contextmanager
def interrupted_at(moment: int) -> Iterator[None]:
    """Raise Preempted at the nth call or return in the engine, where Python looks for signals."""
    left = moment

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if frame.f_code.co_filename.startswith(OURS) or frame.f_code in OF_THREADS:
            left -= event in ("call", "c_return")
            if left == 0:
                raise Preempted

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def interrupt_saves(root: str, every: int) -> tuple[int, list[str]]:
    """Saves that were interrupted, each at a later moment, and what was wrong after them."""
    engine, reader = make(3), make(3)
    step(engine)
    engine.save_checkpoint(f"{root}/first")  # which lays the state out, once
    wrong: list[str] = []
    for moment in itertools.count(1, every):
        directory = f"{root}/{moment}"
        saved, disk = engine.weight_hash(), use(engine, Late())
        try:
            with interrupted_at(moment):
                engine.save_checkpoint(directory)
        except Preempted as error:
            at = traceback.extract_tb(error.__traceback__)[-2]
        else:
            return moment // every, wrong
        step(engine)
        disk.trained.set()
        engine.wait_for_checkpoint()
        for thread in threading.enumerate():  # also of a save that the engine does not know
            if thread.name == "zero-checkpoint" and thread.is_alive():
                thread.join(60)
        for _ in find(directory).candidates:
            reader.load_checkpoint(directory)
            if reader.weight_hash() != saved:
                wrong.append(f"{Path(at.filename).name}:{at.lineno}: {at.line}")
        shutil.rmtree(directory, ignore_errors=True)
    raise AssertionError


@pytest.mark.parametrize("every", [97, 1])
@pytest.mark.corners(every=[97])
def test_whenever_a_save_is_interrupted_there_is_a_whole_checkpoint_or_none(
    worlds: WorldPool, tmp_path: Path, every: int
) -> None:
    ((interrupted, wrong),) = worlds.run(1, interrupt_saves, str(tmp_path), every, deadline_s=390)
    assert wrong == []
    assert interrupted > 500 // every
