"""Ranks that save to a real S3 server, really killed: no checkpoint, and nothing is left."""

from __future__ import annotations

import itertools

import pytest

from tests.support.saving_job import DEADLINE_S, SavingJob, SignalAtObject
from tests.unit.checkpoint.support import (
    SMALL_OBJECTS,
    adam_state,
    blank,
    load_all,
    names,
    same_bits,
    saved,
)
from zero_checkpoint import find
from zero_checkpoint.files.place import place
from zero_checkpoint.tools.cli import main

pytestmark = pytest.mark.processes

_roots = itertools.count()
OLD = adam_state(seed=1)
LARGE = adam_state(seed=2, width=100_000)
PART_BYTES = SMALL_OBJECTS.part_bytes


@pytest.fixture
def root(s3):
    root = place(f"s3://{s3.bucket}/crash-{next(_roots)}")
    saved(root, OLD, 2, step=1)
    return root


@pytest.fixture
def start(root):
    jobs = []

    def start(disks, timeout_s=6.0):
        disks = dict.fromkeys(range(2), SMALL_OBJECTS) | disks
        jobs.append(SavingJob(root, LARGE, disks, timeout_s=timeout_s))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def check_loads(root, step):
    full = {1: OLD, 2: LARGE}[step]
    target = blank(full)
    assert [r.manifest.step for r in load_all(root, target, 3)] == [step] * 3
    assert same_bits(target, full)


@pytest.mark.full
def test_a_rank_killed_in_mid_upload_costs_nothing_but_the_attempt(s3, root, start):
    before = names(root)
    job = start({1: SignalAtObject("write", "r00001", from_bytes=PART_BYTES)})
    assert job.outcome(1) == "SIGKILL"
    assert "rank 1 did not report in time" in job.outcome(0)
    assert names(root) == before
    assert s3.uploads() == [], "rank 0 has aborted what the dead rank had begun"
    check_loads(root, 1)


@pytest.mark.full
def test_what_a_save_leaves_that_died_as_a_whole_is_swept(s3, root, start, capsys):
    before = names(root)
    killed = {
        rank: SignalAtObject("write", f"r0000{rank}", from_bytes=PART_BYTES) for rank in range(2)
    }
    job = start(killed, timeout_s=DEADLINE_S)
    assert [job.outcome(rank) for rank in range(2)] == ["SIGKILL"] * 2
    assert len(s3.uploads()) == 2
    check_loads(root, 1)

    assert main(["repair", str(root), "--older-than", "0s"]) == 0
    assert "never committed" in capsys.readouterr().out
    assert s3.uploads() == []
    assert names(root) == before


@pytest.mark.parametrize(
    ("stage", "name", "step"),
    [("publish", "MANIFEST", 1), ("published", "MANIFEST", 2), ("publish", "latest", 2)],
)
@pytest.mark.full
def test_a_coordinator_killed_before_the_commit_leaves_the_old_and_after_it_the_new(
    root, start, stage, name, step
):
    job = start({0: SignalAtObject(stage, name)})
    assert job.outcome(0) == "SIGKILL"
    assert "rank 1: no verdict from rank 0 within" in job.outcome(1)
    check_loads(root, step)
    assert len(find(root).candidates) == step
