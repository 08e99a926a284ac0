"""Several engines in one process (a GAN, actor and critic) under one agent."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_torch
from tests.numerics.test_leaving import ROUND, await_leave, under_agent
from tests.support.saving import heard
from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool
from zero_checkpoint import find
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.persistence import Moment, inconsistent
from zero_contract.worker import CommitRequest, ExitCode, Hello, Left, Progress
from zero_engine.core.engine import Engine
from zero_torch.checkpoints import Checkpoints

NAMES = ("actor", "critic", "judge")


def make_engines() -> list[Engine]:
    return [make_engine(config(number), seed=number) for number in range(len(NAMES))]


def step_all(engines: list[Engine], step: int) -> None:
    for engine in engines:
        train(engine, step)


def save_all(engines: list[Engine], root: str) -> list[bool]:
    return [
        engine.save_checkpoint(f"{root}/{name}")
        for engine, name in zip(engines, NAMES, strict=True)
    ]


# ---- one link ----


def test_each_engine_is_answered_and_the_agent_hears_of_one_worker(
    worlds: WorldPool, tmp_path: Path
) -> None:
    ((saved, hellos, tags, steps),) = worlds.run(1, train_and_save, str(tmp_path))
    assert (saved, hellos) == ([True] * 3, 1)
    assert tags == ["global_step2"] * 3
    # Every step and every save is a heartbeat; the furthest engine is shown.
    assert steps == [1, 1, 1, 2, 2, 2, 2, 2, 2, 3]
    assert [find(tmp_path / name).candidates[0].manifest.step for name in NAMES] == [2, 2, 2]


def train_and_save(root: str) -> tuple[Any, ...]:
    with under_agent(root) as agent:
        engines = make_engines()
        step_all(engines, 1)
        step_all(engines, 2)
        saved = save_all(engines, root)
        engines[0].destroy()  # the others go on with the link
        train(engines[1], 3)
        for engine in engines[1:]:
            engine.destroy()
        heard = agent.told()
    hellos = [message for message in heard if isinstance(message, Hello)]
    tags = [message.tag for message in heard if isinstance(message, CommitRequest)]
    return saved, len(hellos), tags, [m.step for m in heard if isinstance(m, Progress)]


# ---- leaving ----


@pytest.mark.parametrize("how", ["script saves", "script asks"])
def test_they_leave_together_when_the_script_has_saved_all_of_them(
    worlds: WorldPool, tmp_path: Path, how: str
) -> None:
    ends_at = 2 if how == "script asks" else 4
    ranks = worlds.run(2, drained, str(tmp_path), how)
    assert [rank[0] for rank in ranks] == [ExitCode.LEFT] * 2
    assert [rank[1] for rank in ranks] == [[ends_at] * 3] * 2
    assert [rank[2] for rank in ranks] == [[Left(round=ROUND, step=ends_at)]] * 2
    assert [find(tmp_path / name).candidates[0].manifest.step for name in NAMES] == [ends_at] * 3


def drained(root: str, how: str) -> tuple[Any, ...]:
    """Rank 0 alone is asked to leave, between the first engine's step 2 and the second's."""
    asked = dist.get_rank() == 0
    with under_agent(root, leave_after=2 if asked else None) as agent:
        engines = make_engines()
        code = None
        try:
            for step in range(1, 7):
                train(engines[0], step)
                if step == 2 and asked:
                    await_leave(engines[0])
                step_all(engines[1:], step)
                asks = how == "script asks"
                if engines[0].checkpoint_due(every_steps=100) if asks else step in (1, 4, 6):
                    save_all(engines, root)
        except SystemExit as ending:
            code = int(ending.code or 0)
        for engine in engines:
            engine.destroy()
        left = [message for message in agent.told() if isinstance(message, Left)]
    return code, [engine.global_steps for engine in engines], left


def test_the_engines_that_the_script_does_not_train_any_more_are_not_waited_for(
    worlds: WorldPool, tmp_path: Path
) -> None:
    """One is destroyed, one gives its module to the next, one never trains."""
    ((code, ended_at),) = worlds.run(1, drained_beside_others, str(tmp_path))
    assert (code, ended_at) == (ExitCode.LEFT, 3)
    assert find(tmp_path / "actor").candidates[0].manifest.step == 3


def drained_beside_others(root: str) -> tuple[int, int]:
    with under_agent(root, leave_after=2):
        first, second = make_engines()[:2]
        train(second, 1)
        second.save_checkpoint(f"{root}/critic")
        second.destroy()
        engine = make_engine(config(0), model=first.module)
        reference = make_engine(config(0, optimizer=None), training_data=None)
        reference.load_checkpoint(f"{root}/critic", load_module_only=True)
        engine.save_checkpoint(f"{root}/actor")
        train(engine, 2)
        await_leave(engine)
        with pytest.raises(SystemExit) as ending:
            train(engine, 5)
        return int(ending.value.code or 0), engine.global_steps


# ---- one directory ----


def makes_run(seed: int) -> tuple[Checkpoints, Callable[[str], object]]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 3)
    run = zero_torch.protect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run, run.save


def makes_engine(seed: int) -> tuple[Engine, Callable[[str], object]]:
    engine = make_engine(config(1), seed=seed)
    return engine, engine.save_checkpoint


def save_to_one(root: str, kinds: tuple[str, str]) -> list[str]:
    """What the second of two trainings is told that saves where the first one has saved."""
    makers = {"engine": makes_engine, "run": makes_run}
    (_first, save_first), (second, save_second) = (
        makers[kind](seed) for seed, kind in enumerate(kinds)
    )
    save_first(root)
    told = []
    for until in ("both live", "the second continues the first", "the first saves again", "closed"):
        if until == "the second continues the first":
            second.load(root) if isinstance(second, Checkpoints) else second.load_checkpoint(root)
        if until == "closed":
            second.close() if isinstance(second, Checkpoints) else second.destroy()
        try:
            (save_first if until in {"the first saves again", "closed"} else save_second)(root)
            told.append("")
        except CheckpointError as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("kinds", [("engine", "engine"), ("run", "run")])
def test_where_one_saves_no_other_of_the_process_does_unless_it_continues_it(
    worlds: WorldPool, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    """Their checkpoints would take the place of each other, and a load would find either."""
    for told in worlds.run(2, save_to_one, str(tmp_path), kinds):
        assert [each.split(":")[0] for each in told] == [
            f"training 0 of this process saves to {tmp_path}, and so would training 1",
            "",
            f"training 1 of this process saves to {tmp_path}, and so would training 0",
            "",
        ]
    assert len(find(tmp_path).candidates) >= 2


# ---- loading ----


@pytest.mark.parametrize(
    ("mine", "others", "named"),
    [
        ((2, 9, {"0": 9, "1": 9}), [(0, 9, {"1": 8, "2": 8}), (1, 9, {"0": 9, "2": 8})], None),
        ((2, 9, {"0": 9, "1": 9}), [(0, 10, {"1": 9, "2": 9})], None),
        ((2, 8, {"0": 8, "1": 8}), [(0, 9, {"1": 9, "2": 9})], "training 0 of this"),
        ((0, 9, {"2": 9}), [(2, 8, {"0": 8})], "training 2 of this process resumes from step 8"),
        ((0, 9, {}), [(1, 3, {})], None),
    ],
    ids=["one after the other", "one step ahead", "older", "newer", "from several runs"],
)
def test_two_belong_together_if_one_was_saved_while_the_other_was_there(
    mine: tuple[Any, ...], others: list[tuple[Any, ...]], named: str | None
) -> None:
    def moment(number: int, step: int, beside: dict[str, int]) -> Moment:
        return Moment(number=number, step=step, beside=beside)

    problem = inconsistent(moment(*mine), [moment(*other) for other in others])
    assert problem.startswith(named) if named else problem == ""


def test_checkpoints_that_never_were_together_are_named(worlds: WorldPool, tmp_path: Path) -> None:
    worlds.run(1, save_twice, str(tmp_path))
    assert worlds.run(1, warned, str(tmp_path), [None] * 3) == [[]]
    (lines,) = worlds.run(1, warned, str(tmp_path), ["global_step2", "global_step1", None])
    assert [line.split(" if one")[0] for line in lines] == [
        "training 0 of this process resumes from step 2 and training 1 from step 1, but training 0 "
        "was at step 1 when the latter was saved:",
        "training 1 of this process resumes from step 1 and training 2 from step 2, but training 1 "
        "was at step 2 when the latter was saved:",
    ]


def save_twice(root: str) -> None:
    engines = make_engines()
    for step in (1, 2):
        step_all(engines, step)
        save_all(engines, root)


def warned(root: str, tags: list[str | None]) -> list[str]:
    with heard(logging.WARNING) as lines:
        for engine, name, tag in zip(make_engines(), NAMES, tags, strict=True):
            engine.load_checkpoint(f"{root}/{name}", tag=tag)
    return [line for line in lines if "resumes from" in line]
