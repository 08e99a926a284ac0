"""TRL's trainers under the plug-in: one hash, whatever is killed, at any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import ROOT, TOGETHER, agent, environment, final_hash
from zero_data.ledger import read_ledger, verify

pytest.importorskip("trl", reason="TRL is not installed")
pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.full, pytest.mark.timeout(1200)]
JOB = ROOT / "tests" / "support" / "trl_job.py"
VARIABLES = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "HF_HUB_OFFLINE": "1",
}
KINDS = ("sft", "packed", "dpo", "grpo", "sft-stream", "packed-stream", "dpo-stream")
Trained = tuple[str, frozenset[Any]]
"""The hash of the weights, and (step, micro-batch, ids) of all samples."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """What one undisturbed rank trains."""
    return cache(lambda kind: alone(tmp_path_factory.mktemp(kind), kind))


def alone(directory: Path, kind: str, ranks: int = 1) -> Trained:
    (directory / "pause").write_text("0")
    flags = ("--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1")
    environ = {**environment(), **VARIABLES}
    done = agent(*flags, str(JOB), kind, str(directory), env=environ, timeout=600)
    assert done.returncode == 0, done.stderr
    return trained(directory, kind, done.stdout)


def trained(directory: Path, kind: str, output: str) -> Trained:
    entries = read_ledger(directory / "ledger")
    latest = {entry.step: entry.round for entry in sorted(entries, key=lambda it: it.round)}
    samples = {
        (entry.step, microbatch, ids)
        for entry in entries
        for microbatch, ids in entry.microbatches.items()
        if entry.round == latest[entry.step]
    }
    if kind != "grpo":  # drops the end of an epoch that fills no step, as TRL does
        size = 1 + max(number for _, _, ids in samples for number in ids)
        assert not verify(entries, None if kind.endswith("stream") else size).problems
    return final_hash(output), frozenset(samples)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_costs_a_trainer_of_trl_steps_and_no_bit(
    tmp_path: Path, expected: Any, kind: str
) -> None:
    (tmp_path / "kill").write_text("3")
    assert alone(tmp_path, kind, ranks=2) == expected(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_of_trl_is_exact_while_nodes_are_killed_and_join(
    cluster: Any, tmp_path: Path, expected: Any, kind: str
) -> None:
    job = cluster(
        flags=("--nnodes=1:3", "--max-restarts=1", TOGETHER),
        script=(str(JOB), kind, str(tmp_path)),
        pause_s=1.0,
    )
    job.start("a", "b", "c", **VARIABLES)
    job.wait_for_step(2, world=3, timeout_s=400)
    job.agents["c"].kill_node()
    job.pace(20.0)  # a node needs longer to begin than these steps take
    job.wait_for_step(3, world=2, timeout_s=400)
    job.start("d", **VARIABLES)  # the others leave at the end of a step
    job.wait_for_step(4, world=3, timeout_s=400)
    job.pace(0.0)
    job.wait_for_end(timeout_s=400)
    assert trained(tmp_path, kind, job.output) == expected(kind)


def test_prompts_of_a_stream_are_refused_before_a_step(tmp_path: Path) -> None:
    (tmp_path / "pause").write_text("0")
    flags = ("--standalone", "--nproc-per-node=2")
    environ = {**environment(), **VARIABLES}
    done = agent(*flags, str(JOB), "grpo-stream", str(tmp_path), env=environ, timeout=600)
    assert done.returncode
    assert "ConfigError: train_dataset is a stream, in which TRL repeats each prompt" in done.stderr
    assert not read_ledger(tmp_path / "ledger")
