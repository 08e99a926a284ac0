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
    wait_for((tmp_path / "steps-1").exists, 60, "two ranks")
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


@pytest.mark.full
def test_a_script_that_does_not_ask_is_stopped_and_the_log_says_what_that_costs(
    tmp_path: Path, cluster: Callable[..., Cluster]
) -> None:
    job, lines = join(tmp_path, cluster, "pass")
    assert lines.count("2 1") == 1
    why = "the workers are stopped at once, and what they have done since their last save is done"
    assert f"b joins; {why} again" in job.agents["a"].output
