"""The ledger of a run that its user has started again, without an agent that counts its rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.numerics.test_stock_torch import batches, dataset, protected
from tests.support.training import DATASET_SIZE, config, make_engine, train
from tests.support.world import WorldPool
from zero_data import read_ledger, verify

ENDS_AT = 6


def start_engine(root: str, until: int, ends_at: int) -> None:
    engine = make_engine(config(1, elastic={"sample_ledger": f"{root}/ledger"}))
    engine.load_checkpoint(f"{root}/checkpoints")
    train(engine, until)
    engine.save_checkpoint(f"{root}/checkpoints")
    train(engine, ends_at)  # in vain: the next start goes on from `until`


def start_stock_torch(root: str, until: int, ends_at: int) -> None:
    more: dict[str, Any] = {"config": {"elastic": {"sample_ledger": f"{root}/ledger"}}}
    model, _, run = protected("ddp", **more)
    run.load(f"{root}/checkpoints")
    for step in (until, ends_at):
        for tokens in batches(run, step):
            run.backward(model(tokens))
            run.step()
        if step == until:
            run.save(f"{root}/checkpoints")


@pytest.mark.parametrize("start", [start_engine, start_stock_torch])
def test_the_ledger_of_a_run_started_again_by_hand_is_exact(
    worlds: WorldPool, tmp_path: Path, start: Any
) -> None:
    for world, until, ends_at in ((2, 2, 4), (1, 3, 5), (2, ENDS_AT, ENDS_AT)):
        worlds.run(world, start, str(tmp_path), until, ends_at)
        cut = tmp_path / "ledger" / f"round0-rank{world - 1}.jsonl"
        cut.write_bytes(cut.read_bytes() + b'{"step":99,"rou')  # as a kill leaves it
    entries = read_ledger(tmp_path / "ledger")
    size = DATASET_SIZE if start is start_engine else len(dataset())
    report = verify(entries, size)
    assert report.problems == ()
    assert report.steps == ENDS_AT
    assert report.world_by_step == {1: 2, 2: 2, 3: 1, 4: 2, 5: 2, 6: 2}
