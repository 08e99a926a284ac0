"""Scripts without our engine at a join: asked to leave, waited for, and told the truth about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import COLD, Cluster, whole_lines
from tests.support.waiting import wait_for

pytestmark = pytest.mark.processes

COUNTS = """
import os, pathlib, time, zero_agent
here = pathlib.Path("{directory}")
rank, world, n = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "ZERO_ROUND"))
saved = here / f"saved-{{rank}}"
step = int(saved.read_text()) if saved.exists() else 0
with (here / f"steps-{{rank}}").open("a") as told:
    while not (world == "2" and (here / "enough").exists()):
        step += 1
        told.write(f"{{n}} {{step}}\\n")
        told.flush()
        time.sleep(0.02)
        {each_step}
"""
ASKS = """if zero_agent.should_leave():
            saved.write_text(str(step))
            zero_agent.leave()"""


def join(
    tmp_path: Path, cluster: Callable[..., Cluster], each_step: str
) -> tuple[Cluster, list[str]]:
    """A node joins another whose script counts; what was said, and the steps of rank 0."""
    script = tmp_path / "counts.py"
    script.write_text(COUNTS.format(directory=tmp_path, each_step=each_step))
    job = cluster(flags=("--nnodes=1:2", "--max-restarts=0", COLD), script=[str(script)])
    job.start("a")
    steps = tmp_path / "steps-0"
    wait_for(lambda: steps.exists() and len(whole_lines(steps)) > 3, 60, "some steps")
    job.start("b")
    wait_for(
        lambda: any(line.startswith("2 ") for line in whole_lines(steps)), 60, "a step of two ranks"
    )
    (tmp_path / "enough").touch()
    job.wait_for_end()
    return job, whole_lines(steps)


def test_a_script_that_asks_saves_and_leaves_at_a_join_and_repeats_no_step(
    tmp_path: Path, cluster: Callable[..., Cluster]
) -> None:
    job, lines = join(tmp_path, cluster, ASKS)
    steps = [int(line.split()[1]) for line in lines]
    assert steps == list(range(1, len(steps) + 1))
    asked = "b joins: the script is asked to save and leave (zero_agent.should_leave), within 300 s"
    assert asked in job.agents["a"].output
    assert "rank 0: left as it was asked to" in job.agents["a"].output
    # Its batch, and so its result, is its own; rank 0's node alone says so.
    (warned,) = job.events("world size")
    assert (warned["node"], warned["round"]) == ("a", 2)
    assert "the world size is 2 and was 1, and the script has announced neither" in warned["text"]


@pytest.mark.full
def test_a_script_that_does_not_ask_is_stopped_and_the_log_says_what_that_costs(
    tmp_path: Path, cluster: Callable[..., Cluster]
) -> None:
    job, lines = join(tmp_path, cluster, "pass")
    assert lines.count("2 1") == 1
    why = "the workers are stopped at once, and what they have done since their last save is done"
    assert f"b joins; {why} again" in job.agents["a"].output


AGREES = """
import os, pathlib, torch, torch.distributed as dist, zero_agent
dist.init_process_group("gloo")
here = pathlib.Path("{directory}")
saved = here / "saved"
step = int(saved.read_text()) if saved.exists() else 0

def all_ranks(flag):
    told = torch.tensor(float(flag))
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told)

with (here / f"steps-{{dist.get_rank()}}").open("a") as told:
    while not all_ranks(dist.get_world_size() == 3 and (here / "enough").exists()):
        step += 1
        told.write(f"{{os.environ['ZERO_ROUND']}} {{step}}\\n")
        told.flush()
        if all_ranks(zero_agent.should_leave()):
            if dist.get_rank() == 0:
                saved.write_text(str(step))
            dist.barrier()
            zero_agent.leave()
"""


@pytest.mark.full
def test_ranks_that_agree_all_leave_after_the_same_step_and_none_counts_as_lost(
    tmp_path: Path, cluster: Callable[..., Cluster]
) -> None:
    script = tmp_path / "agrees.py"
    script.write_text(AGREES.format(directory=tmp_path))
    flags = ("--nnodes=2:3", "--max-restarts=0")
    job = cluster(flags=flags, script=[str(script)])
    job.start("a", "b")
    steps = [tmp_path / f"steps-{rank}" for rank in range(3)]
    wait_for(steps[1].exists, 90, "two ranks")
    job.start("c")
    wait_for(steps[2].exists, 90, "three ranks")
    (tmp_path / "enough").touch()
    job.wait_for_end()
    first, second = (whole_lines(path) for path in steps[:2])
    assert first == second
    counted = [int(line.split()[1]) for line in first]
    assert counted == list(range(1, len(counted) + 1))
