"""What every training does alike, whoever shards it: it leaves, resumes, and says what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_engine
from tests.numerics.test_leaving import ROUND, under_agent
from tests.numerics.test_stock_torch import MICROBATCHES, batches, dataset, protected
from tests.support.inside import session_of
from tests.support.saving import heard
from tests.support.stock import GPT
from tests.support.waiting import wait_for
from tests.support.world import WorldPool
from zero_checkpoint import find
from zero_contract.worker import CommitRequest, ExitCode, Left
from zero_step import Session

BACK_ENDS = ("stage 0", "stage 3", "ddp", "fsdp2")
UNTIL = 5


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training as its script has it."""

    session: Session
    """With what the engine calls save_checkpoint, load_checkpoint and so on."""
    train: Callable[[int], None]
    """Up to a step."""
    step: Callable[[], int]
    weight_hash: Callable[[], str]


def job(back_end: str, seed: int = 42, weights: int = 0) -> Job:
    """The same training of a small GPT, which begins with weights of their own seed."""
    if not back_end.startswith("stage"):
        model, _, run = protected(back_end, config={"elastic": {"seed": seed}}, seed=weights)

        def train_run(until: int) -> None:
            for tokens in batches(run, until):
                run.backward(model(tokens))
                run.step()

        return Job(
            session=run,
            train=train_run,
            step=lambda: run.global_step,
            weight_hash=run.weight_hash,
        )
    torch.manual_seed(weights)
    whole = GPT()
    engine = zero_engine.initialize(
        whole,
        training_data=dataset(),
        optimizer=torch.optim.AdamW(whole.parameters(), lr=1e-2, foreach=True),
        config={
            "train_batch_size": 2 * MICROBATCHES,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0,
            "zero_optimization": {"stage": int(back_end.removeprefix("stage "))},
            "seed": seed,
        },
    )
    loader: Any = engine.training_dataloader

    def train(until: int) -> None:
        while engine.global_steps < until:
            for (tokens,) in loader:
                engine.backward(engine(tokens))
                engine.step()
                if engine.global_steps == until:
                    return

    return Job(
        session=session_of(engine),
        train=train,
        step=lambda: engine.global_steps,
        weight_hash=engine.weight_hash,
    )


def drained(root: str, back_end: str, how: str) -> tuple[Any, ...]:
    """Rank 0 alone is asked to leave, after step 2; what every rank does."""
    asked = dist.get_rank() == 0
    with under_agent(root, leave_after=2 if asked else None) as agent:
        own = job(back_end)
        session, checkpoints = own.session, f"{root}/checkpoints"
        if how != "unknown directory":
            session.load(checkpoints)
        code = None
        try:
            for step in range(1, UNTIL + 1):
                if step == 3 and asked:
                    wait_for(lambda: session._link.leave_asked, 60, "the agent's message")
                own.train(step)
                due = how == "script asks" and session.due(every_steps=100)
                if due or (how == "script has state" and step in (1, 4)):
                    session.save(checkpoints, client_state={"step": step})
        except SystemExit as ending:
            code = ending.code
        finally:
            session._link.close()
        told = agent.told()
    left = [message for message in told if isinstance(message, Left)]
    tags = [message.tag for message in told if isinstance(message, CommitRequest)]
    return code, own.step(), left, tags


def resumed(root: str, back_end: str) -> tuple[int, dict[str, Any], str]:
    """Goes on to the end; if there is something to go on from, all weights come from there."""
    own = job(back_end, weights=int(Path(root, "checkpoints").exists()))
    own.session.load(f"{root}/checkpoints")
    begun = own.step()
    own.train(UNTIL)
    own.session.close()
    return begun, own.session.client_state, own.weight_hash()


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize(
    ("how", "ends_at", "saved", "tags"),
    [
        ("directory known", 3, 3, ["global_step3"]),
        ("script asks", 3, 3, ["global_step3"]),
        ("script has state", 4, 4, ["global_step1", "global_step4"]),
        ("unknown directory", 3, 0, []),
    ],
)
@pytest.mark.corners(how=["directory known"], back_end=["stage 3", "ddp"])
def test_all_ranks_leave_at_one_boundary_with_a_save_from_which_another_goes_on_to_the_same_bits(
    worlds: WorldPool,
    tmp_path: Path,
    back_end: str,
    how: str,
    ends_at: int,
    saved: int,
    tags: list[str],
) -> None:
    ranks = worlds.run(3, drained, str(tmp_path), back_end, how)
    left = [Left(round=ROUND, step=saved)]
    assert [rank[:3] for rank in ranks] == [(ExitCode.LEFT, ends_at, left)] * 3
    assert [rank[3] for rank in ranks] == [tags, [], []]  # the coordinator alone asks to commit
    assert len(find(tmp_path / "checkpoints").candidates) == len(tags)
    client = {"step": saved} if "script" in how else {}
    (undisturbed,) = worlds.run(1, resumed, str(tmp_path / "none"), "plain")
    other = BACK_ENDS[BACK_ENDS.index(back_end) - 1]
    found = worlds.run(2, resumed, str(tmp_path), other)
    assert found == [(saved, client, undisturbed[2])] * 2


def with_another_seed(root: str, back_end: str) -> list[str]:
    own = job(back_end, seed=7)
    with heard() as lines:
        own.session.load(root)
    own.session.close()
    return [line for line in lines if "when the checkpoint was made" in line]


def saved_at_once(root: str) -> None:
    own = job("plain")
    own.train(1)
    own.session.save(root)
    own.session.close()


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.corners(back_end=["stage 0", "fsdp2"])
def test_a_resumed_run_that_is_not_as_it_was_is_told_what_to_set(
    worlds: WorldPool, tmp_path: Path, back_end: str
) -> None:
    worlds.run(1, saved_at_once, str(tmp_path))
    first, second = worlds.run(2, with_another_seed, str(tmp_path), back_end)
    name = "seed" if "stage" in back_end else "elastic.seed"
    assert first == [
        f"{name} is 7 and was 42 when the checkpoint was made: order of the samples and dropout "
        "change, from here on the results are not those of the uninterrupted run; set it as it was"
    ]
    assert second == []
