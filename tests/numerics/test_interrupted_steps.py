"""A step that is broken off between its first change and its last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import config, fingerprint, make_engine, train
from tests.support.world import WorldPool
from zero_contract.errors import ZeroError
from zero_engine.core.engine import Engine

WORLD, BROKEN_AT, ENDS_AT = 2, 2, 4
HALF_WAY = "because a step has failed half way: (Ctrl-C|the schedule is over); load a checkpoint"


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """A script's own, which may fail."""

    fails = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: 0.5**step)

    def step(self, *args: Any) -> None:
        if self.fails:
            raise ValueError("the schedule is over")
        super().step(*args)


def make(stage: int) -> Engine:
    return make_engine(config(stage), lr_scheduler=Schedule)


def break_a_step(root: str, stage: int, where: str) -> None:
    engine = make(stage)
    train(engine, BROKEN_AT)
    engine.save_checkpoint(root)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt("Ctrl-C")

    assert engine.optimizer is not None
    if where == "optimizer":
        engine.optimizer.register_step_post_hook(interrupt)
    else:
        engine.lr_scheduler.fails = True
    with pytest.raises((KeyboardInterrupt, ValueError)):
        train(engine, BROKEN_AT + 1)
    assert engine.global_steps == BROKEN_AT
    for use in (engine.step, lambda: engine.save_checkpoint(root), engine.weight_hash):
        with pytest.raises(ZeroError, match=HALF_WAY):
            use()


def go_on(root: str | None, stage: int) -> tuple[Any, ...]:
    engine = make(stage)
    if root is not None:
        engine.load_checkpoint(root)
    train(engine, ENDS_AT)
    return fingerprint(engine)


@pytest.mark.parametrize("where", ["optimizer", "schedule"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.corners(stage=[0, 3], where=["optimizer"])
def test_nothing_is_made_of_half_a_step_and_the_newest_checkpoint_goes_on(
    worlds: WorldPool, tmp_path: Path, stage: int, where: str
) -> None:
    worlds.run(WORLD, break_a_step, str(tmp_path), stage, where)
    undisturbed = worlds.run(WORLD, go_on, None, stage)
    assert worlds.run(WORLD, go_on, str(tmp_path), stage) == undisturbed
