"""Nodes join and leave, and the workers of the others stay in their processes.

Every test ends in the same claim as those of `test_elastic`: the hash is that of a run to which
nothing happened, and the ledger is exactly one pass over the data.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import LONG_S, ROOT, SAMPLES, STEPS, Cluster, final_hash, paced, training

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.full]


@pytest.fixture
def staying(cluster: Callable[..., Cluster], tmp_path: Path) -> Callable[..., Cluster]:
    """A job whose workers stay where they can."""

    def made(*flags: str, **more: Any) -> Cluster:
        settings = json.loads((ROOT / "examples" / "gpt.json").read_text())
        settings.setdefault("elastic", {})["in_place"] = True
        (tmp_path / "config.json").write_text(json.dumps(settings | more))
        script = training(tmp_path, f"--config={tmp_path}/config.json")
        return cluster(flags=flags, script=paced(script, tmp_path))

    return made


def assert_as_if_nothing_had_happened(job: Cluster, undisturbed_hash: str) -> None:
    job.wait_for_end()
    report = job.report()
    assert report.problems == ()
    assert (report.steps, report.samples) == (STEPS, SAMPLES)
    assert report.repeated_steps == 0
    assert final_hash(job.output) == undisturbed_hash
    assert job.events("interrupt") == []


def stays(job: Cluster) -> list[tuple[int, str, int]]:
    """Of each start: its round, the node, and how many workers stay in their processes."""
    return sorted((e["round"], e["node"], e["stay"]) for e in job.events("start"))


def test_a_node_joins_and_leaves_and_the_other_keeps_its_process(staying, undisturbed_hash):
    job = staying("--nnodes=1:2")
    job.start("a")
    job.wait_for_step(10, world=1)
    pid = job.worker_of("a")
    job.pace(LONG_S)
    job.start("b")
    job.wait_for_step(11, world=2)
    job.agents["b"].process.send_signal(signal.SIGTERM)
    assert job.agents.pop("b").wait() == 128 + signal.SIGTERM
    job.wait_for_step(12, world=1)
    assert job.worker_of("a") == pid
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert stays(job) == [(1, "a", 0), (2, "a", 1), (2, "b", 0), (3, "a", 1)]


def test_a_worker_whose_rank_changes_is_started_anew(staying, undisturbed_hash):
    job = staying("--nnodes=1:2")
    job.start("a", "b")
    job.wait_for_step(10, world=2)
    first, other = job.events("activate")[-1]["nodes"]
    job.agents[first].process.send_signal(signal.SIGTERM)
    assert job.agents.pop(first).wait() == 128 + signal.SIGTERM
    job.wait_for_step(11, world=1)
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert stays(job)[-1][1:] == (other, 0)
