"""A slow link between two nodes of a job is named, with its figures, within a minute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.test_partitions import on_machines
from tests.support.cluster import TOGETHER, Cluster, environment
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.netns, pytest.mark.full]

SCRIPT = str(Path(__file__).parents[1] / "support" / "slow_ranks.py")
WIDTH = "512"
"""Gradients of 1 MiB in each step."""


@pytest.fixture
def machines(tmp_path, tmp_path_factory):
    """With a job of three nodes."""

    def job(endpoint):
        flags = ("--nnodes=3", TOGETHER)
        return Cluster(tmp_path, endpoint, flags=flags, script=[SCRIPT, str(tmp_path), WIDTH])

    with on_machines(tmp_path_factory.mktemp("etcd"), job, "abc") as found:
        yield found


def probe(machines):
    """The links that `zero-ctl probe --json` prints."""
    where = f"--rdzv-endpoint={machines.job.endpoint}"
    command = [sys.executable, "-m", "zero_orchestrator", "probe", "--json", where]
    with machines.net.inside("store"):
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_node_whose_link_becomes_slow_is_named_within_a_minute(machines):
    job = machines.job
    machines.start(*"abc")
    begun = job.directory / "stepped"
    wait_for(lambda: begun.exists() or job.check_agents(), 150, "steps")
    links = probe(machines)
    assert len(links) == 6
    assert all(link["bytes_per_s"] > 0 for link in links), links
    many = job.directory / "stepped-200"  # which the job is compared with
    wait_for(lambda: many.exists() or job.check_agents(), 120, "many steps")
    assert job.events("slow link") == [], "of an undisturbed job"
    machines.net.slow_down("c", "rate 20mbit")
    wait_for(lambda: job.events("slow link") or job.check_agents(), 60, "the verdict")
    (told,) = job.events("slow link")
    assert (told["source"], told["host"], told["slow"]) == ("c", "c", True)
    assert 1e6 < told["bytes_per_s"] < 5e6, told["text"]
    assert job.events("straggler") == []
