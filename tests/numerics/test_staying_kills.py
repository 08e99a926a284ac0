"""Workers whose peer is killed go on in their processes: what is lost, and what is not."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.numerics.test_staying import SETTINGS, STEPS, follow, made, put
from tests.support.inside import await_memory, session_of
from tests.support.staying import Job
from tests.support.training import config, fingerprint
from tests.support.world import forkserver
from zero_contract import worker as contract
from zero_contract.worker import ExitCode

MOMENTS = ["a forward", "a backward", "the end of a step", "a step that has just ended"]
PLAIN = "the script's own "
"""Before a moment: of a script that calls `loss.backward()`."""


def killed(directory: str, settings: dict[str, Any], moment: str, victim: int) -> Any:
    """A script one of whose ranks dies in step 5, once."""
    engine = made({**settings, "checkpoint": {"ram": {}}})
    engine.load_checkpoint(directory)
    dies = os.environ.get(contract.ENV_ROUND) == "1" and dist.get_rank() == victim
    plain = moment.startswith(PLAIN)
    moment = moment.removeprefix(PLAIN)

    def reach(now: str) -> None:
        # Not the first step of an epoch: who loses a peer there is started anew.
        done = 5 if now == "a step that has just ended" else 4
        if now == moment and dies and engine.global_steps == done:
            os.kill(os.getpid(), signal.SIGKILL)

    middle = list(engine.module.children())[-1]
    middle.register_forward_pre_hook(lambda *_: reach("a forward"))
    middle.register_full_backward_hook(lambda *_: reach("a backward"))
    losses: dict[int, float] = {}
    while engine.global_steps < STEPS:
        for batch in engine.training_dataloader:
            await_memory(engine)  # else nothing of this epoch may be in it
            loss = engine(batch)
            if plain:
                (engine.scale(loss) if "fp16" in settings else loss).backward()
            else:
                engine.backward(loss)
            reach("the end of a step")
            before, is_last = engine.global_steps, engine.is_gradient_accumulation_boundary()
            engine.step()
            if is_last:  # also behind one that has lost a peer, which had no effect
                follow(engine, settings)
            if engine.global_steps > before:
                losses[engine.global_steps] = engine.mean_loss
                reach("a step that has just ended")
            if engine.global_steps == STEPS:
                break
    assert dist.get_rank() == int(os.environ.get("RANK", "0"))
    stays = session_of(engine).staying
    assert contract.ENV_ROUND not in os.environ or (stays is not None and not stays.why_not)
    return fingerprint(engine), losses


@pytest.mark.corners(name=["stage 2, follows"], moment=["a forward"], victim=[1])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("moment", [*MOMENTS, *(PLAIN + each for each in MOMENTS)])
@pytest.mark.parametrize(
    "name",
    [
        "stage 0",
        "stage 2, fp16",
        "stage 2, follows",
        "stage 3",
        "stage 3, follows",
        "stage 3, offloaded",
        "stage 3, a stream",
    ],
)
def test_survivors_of_a_kill_go_on_in_their_processes_with_the_same_bits(
    job: Callable[..., Job], tmp_path: Path, name: str, moment: str, victim: int
) -> None:
    settings = {**SETTINGS[name], "elastic": {"in_place": True}}
    one = job(killed, str(tmp_path / "checkpoints"), settings, moment, victim)
    one.memory = tmp_path / "memory"
    one.memory.mkdir()
    one.begin([], joining=3)
    first = {process.pid for process in one.members}
    one.wait_for_loss(victim)
    one.begin([rank for rank in range(3) if rank != victim], joining=1)
    ended = one.end()
    assert len(first & {pid for pid, _ in ended}) == 2
    context = forkserver()
    results = context.Queue()
    alone = (killed, str(tmp_path / "alone"), settings, moment, -1)
    context.Process(target=put, args=(results, *alone)).start()
    _, (expected, losses) = results.get(timeout=60)
    assert len(losses) == STEPS
    for pid, (found, seen) in ended:
        assert found == expected
        assert seen == {step: losses[step] for step in seen}
        assert (len(seen) == STEPS) is (pid in first)


def killed_and_tells(log: Path, *given: Any) -> None:
    logging.basicConfig(filename=log, level=logging.INFO)
    killed(*given)


@pytest.mark.corners(moment=[PLAIN + "a backward"])
@pytest.mark.parametrize("moment", ["a backward", PLAIN + "a backward"])
def test_a_worker_that_cannot_go_on_without_a_peer_says_why_and_is_started_anew(
    job: Callable[..., Job], tmp_path: Path, moment: str
) -> None:
    settings = {**config(2), "elastic": {"in_place": True}}
    log = tmp_path / "log"
    one = job(killed_and_tells, log, str(tmp_path / "checkpoints"), settings, moment, 0)
    one.begin([], joining=2)  # and there is no memory for checkpoints
    one.run_on()
    for process, expected in zip(one.members, [-signal.SIGKILL, ExitCode.PEER_LOST], strict=True):
        process.join(60)
        assert process.exitcode == expected
    why = "this process is started anew: no checkpoint is in memory yet; see checkpoint.ram"
    assert why in log.read_text()
