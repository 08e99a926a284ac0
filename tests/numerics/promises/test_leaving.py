"""A training leaves when it is asked to, another goes on, and a lost peer is an exit code."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.numerics.promises.back_ends import BACK_ENDS, WITH_EVERYTHING, training
from tests.numerics.test_leaving import ROUND, under_agent
from tests.support.saving import heard
from tests.support.waiting import wait_for
from tests.support.world import GROUP_TIMEOUT_S, WorldError, WorldPool
from zero_checkpoint import find
from zero_contract.worker import CommitRequest, ExitCode, Left

UNTIL = 5
ORDER = list(BACK_ENDS)


def drained(root: str, back_end: str, how: str) -> tuple[Any, ...]:
    """Rank 0 alone is asked to leave, after step 2; what every rank does."""
    asked = dist.get_rank() == 0
    with under_agent(root, leave_after=2 if asked else None) as agent:
        own = training(WITH_EVERYTHING, back_end)
        session, checkpoints = own.session, f"{root}/checkpoints"
        if how != "unknown directory":
            own.load(checkpoints)
        code = None
        try:
            for step in range(1, UNTIL + 1):
                if step == 3 and asked:
                    wait_for(lambda: session._link.leave_asked, 60, "the agent's message")
                own.train(step)
                due = how == "script asks" and session.due(every_steps=100)
                if due or (how == "script has state" and step in (1, 4)):
                    own.save(checkpoints, {"step": step})
        except SystemExit as ending:
            code = ending.code
        finally:
            session._link.close()
        told = agent.told()
    left = [message for message in told if isinstance(message, Left)]
    tags = [message.tag for message in told if isinstance(message, CommitRequest)]
    return code, own.step, left, tags


def resumed(root: str, back_end: str) -> tuple[int, dict[str, Any], str]:
    """Goes on to the end; if there is something to go on from, all weights come from there."""
    own = training(WITH_EVERYTHING, back_end, weights=int(Path(root, "checkpoints").exists()))
    client = own.load(f"{root}/checkpoints")
    begun = own.step
    own.train(UNTIL)
    own.close()
    return begun, client, own.hash()


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
@pytest.mark.corners(how=["directory known"], back_end=["stage3", "ddp"])
def test_all_ranks_leave_at_one_boundary_with_a_save_from_which_another_goes_on_to_the_same_bits(
    worlds: WorldPool,
    tmp_path: Path,
    back_end: str,
    how: str,
    ends_at: int,
    saved: int,
    tags: list[str],
) -> None:
    world = BACK_ENDS[back_end]
    ranks = worlds.run(world, drained, str(tmp_path), back_end, how)
    left = [Left(round=ROUND, step=saved)]
    assert [rank[:3] for rank in ranks] == [(ExitCode.LEFT, ends_at, left)] * world
    # The coordinator alone asks to commit.
    assert [rank[3] for rank in ranks] == [tags, *[[]] * (world - 1)]
    assert len(find(tmp_path / "checkpoints").candidates) == len(tags)
    client = {"step": saved} if "script" in how else {}
    (undisturbed,) = worlds.run(1, resumed, str(tmp_path / "none"), "plain")
    other = ORDER[ORDER.index(back_end) - 1]
    world = BACK_ENDS[other]
    found = worlds.run(world, resumed, str(tmp_path), other)
    assert found == [(saved, client, undisturbed[2])] * world


def evaluates(root: str, back_end: str, asked: bool) -> tuple[int | None, list[int], str]:
    """Evaluates in front of every third step; the steps before which it has, and the last hash."""
    with under_agent(root, leave_after=2) if asked else nullcontext():
        own = training(WITH_EVERYTHING, back_end)
        own.load(f"{root}/checkpoints")
        code, evaluated = None, list[int]()
        try:
            while own.step < UNTIL:
                for (batch,) in own.loader:
                    if own.step % 3 == 0 and own.step not in evaluated:
                        evaluated.append(own.step)
                        with torch.no_grad():
                            own.called.eval()(batch)
                        own.called.train()
                    if asked and own.step == 2:
                        wait_for(lambda: own.session._link.leave_asked, 60, "the agent's message")
                    own.backward(batch)
                    own.end()
                    if own.step == UNTIL:
                        break
        except SystemExit as ending:
            code = ending.code
        finally:
            own.session._link.close()
    return code, evaluated, own.hash() if code is None else ""


@pytest.mark.parametrize("back_end", ["plain", "ddp", "fsdp2", "stage1", "stage3"])
@pytest.mark.corners(back_end=["ddp", "stage1"])
def test_who_is_asked_to_leave_before_an_evaluation_in_front_of_a_step_leaves_without_it(
    worlds: WorldPool, tmp_path: Path, back_end: str
) -> None:
    """And the next start makes it."""
    root, world = str(tmp_path), BACK_ENDS[back_end]
    (alone,) = worlds.run(1, evaluates, str(tmp_path), "plain", False)
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    assert worlds.run(world, evaluates, root, back_end, True) == [(ExitCode.LEFT, [0], "")] * world
    again = worlds.run(world, evaluates, root, back_end, False)
    assert again == [(None, [3], alone[2])] * world


def with_another_seed(root: str, back_end: str) -> list[str]:
    own = training(replace(WITH_EVERYTHING, seed=7), back_end)
    with heard() as lines:
        own.load(root)
    own.close()
    return [line for line in lines if "when the checkpoint was made" in line]


def saved_at_once(root: str) -> None:
    own = training(WITH_EVERYTHING, "plain")
    own.train(1)
    own.save(root)
    own.close()


@pytest.mark.parametrize("back_end", list(BACK_ENDS)[1:])
@pytest.mark.corners(back_end=["stage0", "fsdp2"])
def test_a_resumed_run_that_is_not_as_it_was_is_told_what_to_set(
    worlds: WorldPool, tmp_path: Path, back_end: str
) -> None:
    worlds.run(1, saved_at_once, str(tmp_path))
    first, *others = worlds.run(BACK_ENDS[back_end], with_another_seed, str(tmp_path), back_end)
    name = "seed" if back_end.startswith(("stage", "offload")) else "elastic.seed"
    assert first == [
        f"{name} is 7 and was 42 when the checkpoint was made: order of the samples and dropout "
        "change, from here on the results are not those of the uninterrupted run; set it as it was"
    ]
    assert others == [[]] * len(others)


# ---- peers that vanish ----


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_a_peer(root: str, back_end: str, where: str, own_loop: bool) -> None:
    """Rank 2 is killed at some point of step 2; each survivor writes its exit code."""
    with under_agent(root):
        own = training(replace(WITH_EVERYTHING, own_loop=own_loop), back_end)
    own.train(1)
    rank, began, code = dist.get_rank(), time.monotonic(), None
    if rank == 2:
        match where:
            case "forward":
                own.module.get_submodule("blocks.1").register_forward_pre_hook(die)
            case "backward":
                own.module.get_submodule("blocks.1").register_full_backward_pre_hook(die)
            case "step":
                own.optimizer.register_step_pre_hook(die)
    try:
        own.train(3)
    except SystemExit as ending:
        code = ending.code
    finally:
        own.session._link.close()
    assert time.monotonic() - began < GROUP_TIMEOUT_S / 2  # its patience has not ended
    Path(root, f"rank{rank}").write_text(str(code))
    os._exit(0)  # as a script's error ends it: a peer may wait for this survivor, not for the dead


LOSSES = [
    (back_end, where)
    for back_end in list(BACK_ENDS)[1:]
    for where in ("forward", "backward", "step")
    if (back_end, where) != ("ddp", "step")  # the next forward's broadcast is DDP's own
]


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize(("back_end", "where"), LOSSES)
@pytest.mark.corners(back_end=["ddp", "stage3"], where=["backward"], own_loop=[True])
def test_under_an_agent_survivors_of_a_killed_peer_say_so_by_their_exit_code(
    worlds: WorldPool, tmp_path: Path, back_end: str, where: str, own_loop: bool
) -> None:
    world = max(BACK_ENDS[back_end], 3)
    with pytest.raises(WorldError, match="rank 2 died, exit -9"):
        worlds.run(world, lose_a_peer, str(tmp_path), back_end, where, own_loop)
    codes = [(tmp_path / f"rank{rank}").read_text() for rank in range(world) if rank != 2]
    assert codes == [str(int(ExitCode.PEER_LOST))] * (world - 1)
