"""Real processes, really killed or stopped at every stage of a save.

The votes go through a TCPStore that the test hosts, so that it outlives rank 0. Processes are
forked from a server that has imported torch once.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.saving_job import DEADLINE_S, SavingJob, SignalAt, own_bytes
from tests.support.waiting import wait_for
from tests.unit.checkpoint.support import (
    SMALL,
    adam_state,
    blank,
    load_all,
    names,
    same_bits,
    saved,
)

pytestmark = pytest.mark.processes

WORLD = 3
OLD, NEW = adam_state(seed=1, width=3000), adam_state(seed=2, width=3000)


@pytest.fixture
def root(tmp_path):
    saved(tmp_path, OLD, 2, step=1)
    return tmp_path


@pytest.fixture
def start(root):
    jobs = []

    def start(disks=None, file_limits=None, timeout_s=5.0):
        disks = dict.fromkeys(range(WORLD), SMALL) | (disks or {})
        jobs.append(SavingJob(root, NEW, disks, file_limits or {}, timeout_s))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def check_loads(root, step):
    target = blank(OLD)
    assert [r.manifest.step for r in load_all(root, target, 4)] == [step] * 4
    assert same_bits(target, {1: OLD, 2: NEW}[step])


def test_processes_save_together(root, start):
    job = start(timeout_s=DEADLINE_S)
    assert [job.outcome(rank) for rank in range(WORLD)] == ["saved"] * WORLD
    check_loads(root, 2)


@pytest.mark.full
@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_a_rank_killed_while_it_writes_costs_nothing_but_the_attempt(root, start, part):
    before = names(root)
    job = start({1: SignalAt("write", "r00001", from_bytes=part * own_bytes(NEW, 1, WORLD))})
    assert job.outcome(1) == "SIGKILL"
    for rank in (0, 2):
        assert "rank 1 did not report in time: it has died or stalls" in job.outcome(rank)
    assert names(root) == before
    check_loads(root, 1)


@pytest.mark.parametrize(
    ("stage", "name", "step"),
    [
        ("write", "r00000", 1),
        ("create", "MANIFEST", 1),  # after all votes
        ("publish", "MANIFEST", 1),  # after the fsync of the temporary manifest
        ("published", "MANIFEST", 2),  # after the rename, before the hint
        ("publish", "latest", 2),
    ],
)
@pytest.mark.corners(stage=["publish"], name=["MANIFEST"])
def test_a_coordinator_killed_at_any_stage_leaves_the_old_or_the_new_whole(
    root, start, stage, name, step
):
    job = start({0: SignalAt(stage, name)})
    assert job.outcome(0) == "SIGKILL"
    for rank in (1, 2):
        assert f"rank {rank}: no verdict from rank 0 within" in job.outcome(rank)
    assert (root / "latest").read_text().startswith("step-000000001.")
    check_loads(root, step)


@pytest.mark.full
def test_a_stopped_rank_does_not_hold_up_the_others_and_its_late_vote_is_refused(root, start):
    before = names(root)
    job = start({2: SignalAt("write", "r00002", signal.SIGSTOP)})
    for rank in (0, 1):
        assert "rank 2 did not report in time" in job.outcome(rank)
    pid = job.processes[2].pid
    wait_for(lambda: state_of(pid) == "T", DEADLINE_S, f"process {pid} is stopped")
    os.kill(pid, signal.SIGCONT)
    assert "rank 2 did not report in time" in job.outcome(2)
    assert names(root) == before
    check_loads(root, 1)


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_write_error_of_the_system_is_told_to_every_rank(root, start):
    before = names(root)
    job = start(file_limits={1: 20_000}, timeout_s=DEADLINE_S)
    outcomes = {job.outcome(rank) for rank in range(WORLD)}
    (text,) = outcomes
    assert "rank 1: " in text
    assert text.endswith("r00001.safetensors: File too large (errno 27)")
    assert names(root) == before
    check_loads(root, 1)
