"""Two runs that were given one directory: the later one is told, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import zero_checkpoint
import zero_torch
from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool
from zero_checkpoint import find
from zero_checkpoint.dcp import Writer
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.saving.housekeeping import Keep, tidy
from zero_contract.worker import ENV_RUN

Begin = Callable[[], WorldPool]
WORLD = 2
NEWER = "has a newer checkpoint that this run has neither loaded nor written"


@pytest.fixture
def begin() -> Iterator[Callable[[], WorldPool]]:
    """Starts a run: processes of its own."""
    begun: list[WorldPool] = []

    def start() -> WorldPool:
        begun.append(WorldPool(WORLD))
        return begun[-1]

    yield start
    for each in begun:
        each.close()


class Script:
    """What a script does with one of the libraries: load, or save a step."""

    def load(self, root: str, tag: str | None = None) -> int:
        raise NotImplementedError

    def save(self, root: str, step: int) -> None:
        raise NotImplementedError


class OfEngine(Script):
    def __init__(self, **checkpoint: Any) -> None:
        self.engine = make_engine(config(1, checkpoint=checkpoint))

    def load(self, root: str, tag: str | None = None) -> int:
        self.engine.load_checkpoint(root, tag=tag)
        return self.engine.global_steps

    def save(self, root: str, step: int) -> None:
        train(self.engine, step)
        self.engine.save_checkpoint(root)


class OfEngineAside(OfEngine):
    """The same with saves in the background: the next save tells."""

    def __init__(self) -> None:
        super().__init__(**{"async": True, "keep_last": 2})

    def save(self, root: str, step: int) -> None:
        super().save(root, step)
        super().save(root, step)


class OfStockTorch(Script):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.run = zero_torch.protect(self.model, self.optimizer)

    def load(self, root: str, tag: str | None = None) -> int:
        self.run.load(root, tag)
        return self.run.global_step

    def save(self, root: str, step: int) -> None:
        while self.run.global_step < step:
            self.model(torch.ones(3)).sum().backward()
            self.optimizer.step()
        self.run.save(root)


class OfPlain(Script):
    def load(self, root: str, tag: str | None = None) -> int:
        found = zero_checkpoint.load(root, tag=tag)
        return found.step if found is not None else 0

    def save(self, root: str, step: int) -> None:
        zero_checkpoint.save(root, {"step": torch.tensor(step)}, step=step, keep_last=2)


class OfDcp(OfPlain):
    def save(self, root: str, step: int) -> None:
        writer = Writer(root, step=step, keep_last=2)
        torch.distributed.checkpoint.save({"w": torch.ones(3)}, storage_writer=writer)


LIBRARIES = [OfEngine, OfEngineAside, OfStockTorch, OfPlain, OfDcp]


def act(library: type[Script], calls: list[tuple[str, ...]]) -> list[str]:
    """What each call of a script leads to: the step, or what it is told."""
    script, outcomes = library(), []
    for what, *arguments in calls:
        try:
            outcomes.append(str(getattr(script, what)(*arguments)))
        except (CheckpointError, CheckpointException) as error:
            outcomes.append(str(error))
    return outcomes


def steps(root: Path) -> list[int]:
    return sorted({candidate.manifest.step for candidate in find(root).candidates})


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.corners(library=[OfEngineAside])
def test_a_run_that_did_not_load_what_is_there_is_refused_and_deletes_nothing(
    begin: Begin, tmp_path: Path, library: type[Script]
) -> None:
    root, first = str(tmp_path), begin()
    first.run(WORLD, act, library, [("save", root, 1), ("save", root, 2)])
    for told in begin().run(WORLD, act, library, [("save", root, 3)]):
        assert NEWER in told[0]
        assert "tag 'global_step2'" in told[0]
    assert steps(tmp_path)[-1] == 2
    # The one that was there first goes on, and deletes what it may.
    assert first.run(WORLD, act, library, [("load", root), ("save", root, 3)])[0] == ["2", "None"]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.corners(library=[OfPlain])
def test_of_two_runs_that_both_loaded_the_same_the_one_that_saves_later_is_told(
    begin: Begin, tmp_path: Path, library: type[Script]
) -> None:
    root, first = str(tmp_path), begin()
    first.run(WORLD, act, library, [("save", root, 1)])
    assert first.run(WORLD, act, library, [("load", root)]) == [["1"]] * WORLD
    goes_on = [("load", root), ("save", root, 2)]
    assert begin().run(WORLD, act, library, goes_on) == [["1", "None"]] * WORLD
    takes_over = [("save", root, 2), ("load", root), ("save", root, 3)]
    for told in first.run(WORLD, act, library, takes_over):
        assert NEWER in told[0]
        assert "since this run has loaded from there" in told[0]
        assert told[1:] == ["2", "None"]
    assert steps(tmp_path)[-2:] == [2, 3]


def test_a_script_that_is_started_again_by_hand_knows_the_directory_of_its_best(
    begin: Begin, tmp_path: Path
) -> None:
    root, best = f"{tmp_path}/all", f"{tmp_path}/best"
    saves = [("save", best, 1), ("save", root, 1)]
    assert begin().run(1, act, OfPlain, saves) == [["None"] * 2]
    for step in (2, 3):  # the best of the first start, and that of the second
        again = [("load", root), ("save", root, step), *[("save", best, step)] * (step == 3)]
        assert begin().run(1, act, OfPlain, again)[0][1:] == ["None"] * (len(again) - 1)
    assert steps(tmp_path / "best") == [1, 3]


def test_two_fine_tunings_of_one_model_are_two_runs(begin: Begin, tmp_path: Path) -> None:
    model, tuned = f"{tmp_path}/model", f"{tmp_path}/tuned"
    begin().run(1, act, OfPlain, [("save", model, 9)])
    tunes = [("load", model), ("save", tuned, 1)]
    assert begin().run(1, act, OfPlain, tunes) == [["9", "None"]]
    [[_, told]] = begin().run(1, act, OfPlain, tunes)
    assert "saved by another run" in told


def test_who_goes_back_to_a_tag_saves_above_what_was_passed_over(
    begin: Begin, tmp_path: Path
) -> None:
    root = str(tmp_path)
    begin().run(1, act, OfPlain, [("save", root, step) for step in (1, 2, 3)])
    back = [("load", root, "global_step2"), ("save", root, 2), ("load", root)]
    assert begin().run(1, act, OfPlain, back) == [["2", "None", "2"]]
    newest = find(root).candidates[0]
    assert newest.manifest.round == 1
    assert len(newest.manifest.runs) == 2


def restart(job: str, root: str, step: int) -> list[str]:
    os.environ[ENV_RUN] = job
    return act(OfPlain, [("save", root, step)])


def test_a_job_that_begins_from_scratch_after_a_restart_is_still_the_same_run(
    begin: Begin, tmp_path: Path
) -> None:
    root = str(tmp_path)
    assert begin().run(1, restart, "job", root, 2) == [["None"]]
    assert begin().run(1, restart, "job", root, 1) == [["None"]]
    [[told]] = begin().run(1, restart, "another job", root, 3)
    assert NEWER in told
    assert [candidate.manifest.runs for candidate in find(root).candidates] == [("job",)] * 2


def test_where_another_run_has_saved_meanwhile_nothing_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, begin: Begin
) -> None:
    root = str(tmp_path)
    newest = [zero_checkpoint.save(root, {}, step=step) for step in (1, 2, 3)][-1]
    begin().run(1, act, OfPlain, [("load", root), ("save", root, 4)])
    before = steps(tmp_path)
    tidy(tmp_path, newest, Keep(last=2))
    assert steps(tmp_path) == before == [3, 4]
    assert "nothing was deleted" in caplog.text
