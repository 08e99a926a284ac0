"""An engine that its script lets go of takes its memory with it: several may follow each other."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests.numerics.promises.back_ends import Recipe, training
from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool
from zero_deepspeed.zero import GatheredParameters


def left_over(stage: int, asynchronous: bool, root: str) -> int:
    """Units that are still there after their engine, of those that there were."""
    settings = config(stage) | {"checkpoint": {"async": asynchronous}}
    engine = make_engine(settings)
    train(engine, 2)
    engine.save_checkpoint(root)
    with GatheredParameters(list(engine.module.parameters())):
        pass
    units = [weakref.ref(unit) for unit in engine._core.units]
    assert units
    engine.destroy()
    del engine
    gc.collect()
    return sum(unit() is not None for unit in units)


@pytest.mark.parametrize(("stage", "asynchronous"), [(0, False), (1, True), (2, False), (3, True)])
@pytest.mark.corners(stage=[3])
def test_an_engine_that_is_let_go_of_leaves_no_memory_behind(
    worlds: WorldPool, tmp_path, stage: int, asynchronous: bool
) -> None:
    assert worlds.run(2, left_over, stage, asynchronous, str(tmp_path)) == [0, 0]


def runs_left_over(wrapper: str) -> bool:
    """Whether a run of stock PyTorch is still there after its script."""
    own = training(Recipe(), wrapper)
    own.train(1)
    run = weakref.ref(own.session)
    own.close()
    del own
    gc.collect()
    return run() is not None


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.corners(wrapper=["ddp"])
def test_a_run_of_stock_pytorch_that_is_let_go_of_leaves_nothing_behind(
    worlds: WorldPool, wrapper: str
) -> None:
    """Nor the threads of its group."""
    assert worlds.run(2, runs_left_over, wrapper) == [False, False]
