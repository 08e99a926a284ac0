"""Stock PyTorch under an agent: it leaves with a save, goes on from memory, and sees lost peers."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_torch
from tests.numerics.in_memory.nodes import checkpoints, drop, on_a_node, settle
from tests.numerics.test_leaving import under_agent
from tests.numerics.test_stock_torch import STEPS, batches, dataset, protected, trained
from tests.support.inside import persistence_of
from tests.support.world import GROUP_TIMEOUT_S, WorldError, WorldPool
from zero_contract.worker import ExitCode


def train(model: Any, run: zero_torch.Run, until: int) -> None:
    for tokens in batches(run, until):
        run.backward(model(tokens))
        run.step()


# ---- a lost peer ----


def lose_a_peer(root: str, wrapper: str, where: str) -> None:
    """Rank 2 is killed in the second step, whose calls are the script's own."""
    with under_agent(root):
        model, optimizer, run = protected(wrapper)
    rank = dist.get_rank()

    def loop() -> None:
        for tokens in batches(run, 3):
            lost = rank == 2 and run.global_step == 1
            if lost and where == "forward":
                die()
            loss = model(tokens)
            if lost:
                loss.register_hook(die)
            loss.backward()
            optimizer.step()

    began = time.monotonic()
    Path(root, f"rank{rank}").write_text(str(exit_code(run, loop)))
    assert time.monotonic() - began < GROUP_TIMEOUT_S / 2  # its patience has not ended
    os._exit(0)  # as a script's error ends it: a peer may wait for this survivor, not for the dead


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_code(run: zero_torch.Run, loop: Any) -> int | str | None:
    try:
        loop()
    except SystemExit as ending:
        return ending.code
    finally:
        run._link.close()
    return None


@pytest.mark.parametrize(
    ("wrapper", "world", "where"),
    [
        ("ddp", 3, "backward"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in itertools.product(("fsdp2", "hsdp"), (4,), ("forward", "backward"))
        ),
    ],
)
def test_survivors_of_a_peer_that_is_killed_in_a_call_of_the_script_say_so(
    worlds: WorldPool, tmp_path: Path, wrapper: str, world: int, where: str
) -> None:
    with pytest.raises(WorldError, match="rank 2 died, exit -9"):
        worlds.run(world, lose_a_peer, str(tmp_path), wrapper, where)
    survivors = [rank for rank in range(world) if rank != 2]
    codes = {(tmp_path / f"rank{rank}").read_text() for rank in survivors}
    assert codes == {str(int(ExitCode.PEER_LOST))}


# ---- in memory, and in the background ----


def resumed(wrapper: str, root: str) -> tuple[int, str]:
    model, _, run = protected(wrapper, seed=5)
    run.load(f"{root}/checkpoints")
    begun = run.global_step
    train(model, run, STEPS)
    run.close()
    return begun, run.weight_hash()


def kept_in_memory(root: str, wrapper: str, until: int, seed: int = 0) -> tuple[int, str]:
    """Go on from the newest checkpoint of the nodes' memories; end as a crash does."""
    with on_a_node(root):
        model, _, run = protected(wrapper, config={"checkpoint": {"ram": {}}}, seed=seed)
        run.load(checkpoints(root))
        begun = run.global_step
        for step in range(begun + 1, until + 1):
            train(model, run, step)
            settle(run)
        digest = run.weight_hash()
        drop(run)  # type: ignore[arg-type]
        return begun, digest


def test_a_run_goes_on_from_the_memory_of_its_nodes_under_another_wrapper(
    worlds: WorldPool, tmp_path: Path
) -> None:
    root = str(tmp_path)
    assert [begun for begun, _ in worlds.run(2, kept_in_memory, root, "ddp", 3)] == [0, 0]
    assert not list(checkpoints(root).glob("step-*"))
    (expected, *_) = worlds.run(1, trained, "plain")
    found = worlds.run(2, kept_in_memory, root, "fsdp2", STEPS, 5)
    assert found == [(3, expected[0])] * 2


def evaluated_and_saved(root: str, wrapper: str) -> str:
    """A forward without a backward leaves the root module of FSDP2 gathered."""
    model, _, run = protected(wrapper)
    train(model, run, 3)
    model.eval()
    with torch.no_grad():
        model(dataset()[:2][0])
    model.train()
    weights = run.weight_hash()
    run.save(f"{root}/checkpoints")
    run.close()
    return weights


def test_a_save_after_an_evaluation_has_the_state_of_all_parameters(
    worlds: WorldPool, tmp_path: Path
) -> None:
    worlds.run(2, evaluated_and_saved, str(tmp_path), "fsdp2")
    (expected, *_) = worlds.run(1, trained, "plain")
    assert worlds.run(1, resumed, "plain", str(tmp_path)) == [(3, expected[0])]


def saved_twice(root: str, wrapper: str) -> tuple[str, bool]:
    model, _, run = protected(wrapper)
    layouts = []
    for step in (2, 3):
        train(model, run, step)
        run.save(f"{root}/checkpoints")
        layouts.append(persistence_of(run).saver._layout)
    run.close()
    return run.weight_hash(), layouts[0] is layouts[1]


def test_a_second_save_has_the_layout_of_the_first_and_the_new_weights(
    worlds: WorldPool, tmp_path: Path
) -> None:
    found = worlds.run(2, saved_twice, str(tmp_path), "fsdp2")
    assert found == [(*worlds.run(1, weights_of, str(tmp_path)), True)] * 2


def saved_in_the_background(root: str, wrapper: str) -> tuple[str, bool]:
    """The weights of step 2, of which a save is made while step 3 changes them."""
    model, _, run = protected(wrapper, config={"checkpoint": {"async": True}})
    train(model, run, 2)
    weights = run.weight_hash()
    run.save(f"{root}/checkpoints")
    train(model, run, 3)
    changed = run.weight_hash() != weights
    run.close()
    return weights, changed


@pytest.mark.full
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_save_in_the_background_is_of_the_step_that_it_was_asked_for(
    worlds: WorldPool, tmp_path: Path, wrapper: str
) -> None:
    found = set(worlds.run(2, saved_in_the_background, str(tmp_path), wrapper))
    assert found == {(*worlds.run(1, weights_of, str(tmp_path)), True)}


def weights_of(root: str) -> str:
    _, _, run = protected("plain", seed=5)
    run.load(f"{root}/checkpoints")
    weights = run.weight_hash()
    run.close()
    return weights
