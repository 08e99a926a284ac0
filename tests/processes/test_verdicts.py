"""A rank that is slow, or stuck, is named, with its node, within a minute."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.support.waiting import wait_for
from zero_orchestrator.ctl import status

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

SCRIPT = str(Path(__file__).parents[1] / "support" / "slow_ranks.py")


def told_within(job, event, limit_s):
    """The first event of this name, and how long it took."""
    began_s = time.monotonic()
    wait_for(lambda: job.events(event) or job.check_agents(), limit_s, f"an event {event}")
    return job.events(event)[0], time.monotonic() - began_s


def test_a_slow_rank_is_named_with_its_node_and_its_step(cluster, etcd_store, tmp_path):
    job = cluster(flags=("--nnodes=1", "--nproc-per-node=3"), script=[SCRIPT, str(tmp_path)])
    (tmp_path / "slow-1").write_text("0.1")
    job.start("a")
    told, _ = told_within(job, "straggler", 90)
    assert (told["rank"], told["host"], told["slow"]) == (1, "a", True)
    assert 1.5 < told["factor"] < 2.5, told
    assert re.match(r"rank 1 on a computes \d\.\d x slower since step \d+, and", told["text"])
    now = status.read(etcd_store, job.job)
    assert [(one.rank, one.text) for one in now.verdicts] == [(1, told["text"])]
