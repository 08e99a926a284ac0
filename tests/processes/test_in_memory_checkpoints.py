"""Checkpoints in memory: what is lost when processes die, and it is not more than a step.

No checkpoint is written to disk before the last step, unless a test says so. Every test ends
in the same claim as those of `test_elastic`: the hash of an undisturbed run, the exact ledger.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    COLD,
    ROOT,
    SAMPLES,
    STEPS,
    TOGETHER,
    Cluster,
    final_hash,
    paced,
    training,
)
from tests.support.suspended import suspend
from tests.support.waiting import wait_for
from zero_data.ledger import Report
from zero_orchestrator.observe import status

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

PAUSE_S = 0.25
NEVER = 10_000
IMAGE_OF_RANK_1 = "r00001.safetensors"


@pytest.fixture
def ram_job(cluster):
    """Makes jobs that keep every step in memory."""
    made: list[Cluster] = []

    def make(
        flags: tuple[str, ...],
        *,
        save_every: int = NEVER,
        pause_s: float = PAUSE_S,
        **ram: Any,
    ) -> Cluster:
        job = cluster(flags=(*flags, TOGETHER), pause_s=pause_s)
        config = json.loads((ROOT / "examples" / "gpt.json").read_text())
        config["checkpoint"] = {"ram": ram}
        path = job.directory / "config.json"
        path.write_text(json.dumps(config))
        more = (f"--save-every={save_every}", f"--config={path}")
        job.script = paced(training(job.directory, *more), job.directory)
        made.append(job)
        return job

    yield make
    for job in made:
        job.close()
        for memory in memories(job):  # of agents that were killed, and never started again
            shutil.rmtree(memory)


def ended_well(job: Cluster, undisturbed_hash: str) -> Report:
    job.wait_for_end()
    report = job.report()
    assert (report.problems, report.steps, report.samples) == ((), STEPS, SAMPLES)
    assert final_hash(job.output) == undisturbed_hash
    assert memories_of_agents(job) == []
    return report


def memories(job: Cluster) -> list[Path]:
    return sorted(Path("/dev/shm").glob(f"zero-ram.{job.job}.*"))


def memories_of_agents(job: Cluster) -> list[Path]:
    """Without those that killed agents have left."""
    return [memory for memory in memories(job) if memory.name.split(".")[2] in job.agents]


def kept_step(job: Cluster, least: int, world: int) -> int:
    """The newest step in memory as soon as it is the last one that is done, and `least` or more.

    In the memory of every node: if the node of rank 0 is killed before the others have heard its
    verdict, they never do.
    """

    def newest(memory: Path) -> int:
        manifests = memory.glob("*/step-*/MANIFEST.json")
        return max((int(manifest.parent.name[5:14]) for manifest in manifests), default=0)

    def kept() -> int | None:
        job.check_agents()
        step = min(map(newest, memories_of_agents(job)), default=0)
        return step if step >= least and step == done_steps(job, world) else None

    return wait_for(kept, 150, f"step {least} in memory")


def done_steps(job: Cluster, world: int) -> int:
    """The last step that a round of this world size has finished."""
    return max((step for step, size in job.last_steps().values() if size == world), default=0)


def loaded_steps(job: Cluster, source: str) -> list[int]:
    """The steps that rounds went on from, of those that were loaded from below a directory."""
    lines = [line for line in job.output.splitlines() if f"loaded {source}" in line]
    return [int(line.split(", step ")[1].split(",")[0]) for line in lines]


def saved_to_disk(job: Cluster) -> int:
    return job.output.count("saved /")


@pytest.mark.full
def test_the_memory_they_take_of_each_node_is_shown_beside_its_cap(ram_job, etcd_store):
    # It lasts for longer than agents take to tell the store twice.
    job = ram_job(("--nnodes=2", "--max-restarts=0"), pause_s=0.5, budget_bytes=200 << 20)
    job.start("a", "b")
    kept_step(job, least=3, world=2)

    def shown() -> list[tuple[int | None, int | None]] | None:
        rows = status.read(etcd_store, job.job).members
        use = [(row.ram_used_bytes, row.ram_budget_bytes) for row in rows]
        # A report from before the first save has the directory's own file alone.
        return use if all(used is not None and used >= 1 << 20 for used, _ in use) else None

    for used, budget in wait_for(shown, 150, "what the agents show"):
        assert budget == 200 << 20
        assert used is not None
        assert used <= budget


def test_a_lost_node_and_then_a_killed_worker_cost_a_restart_each_and_no_committed_step(
    ram_job, undisturbed_hash, etcd_store
):
    """A node's part is recovered from its neighbour, at another world size, and without a disk."""
    job = ram_job(("--nnodes=2:3", "--max-restarts=2"))
    job.start("a", "b", "c")
    kept = [kept_step(job, least=15, world=3)]
    (left,) = [path for path in memories(job) if ".b." in path.name]
    job.agents.pop("b").kill_node()
    job.wait_for_step(kept[0] + 1, world=2)
    kept.append(kept_step(job, least=kept[0] + 2, world=2))
    os.kill(job.worker_of("c"), signal.SIGKILL)
    report = ended_well(job, undisturbed_hash)
    loaded = loaded_steps(job, "/dev/shm/")
    assert [step >= least for step, least in zip(loaded, kept, strict=True)] == [True, True]
    assert report.repeated_steps <= 2, "one for each failure"
    lost, killed = [event["text"] for event in job.events("interrupt")]
    assert lost.endswith("; restart 1 of 2")
    assert re.fullmatch(r"rank [01]: killed by SIGKILL on node c; restart 2 of 2", killed)
    assert saved_to_disk(job) == 1, "the one at the end of the script"
    last = status.read(etcd_store, job.job).last_save_in_memory
    assert last is not None
    assert last.step > kept[1]
    assert min(last.size_bytes, last.stall_s, last.write_s, last.publish_s) > 0
    job.flags = (*job.flags, COLD)  # it finds that the job is done, and needs no torch
    job.start("b")
    job.wait_for_end()
    assert not left.exists(), "what the dead agent has left went with its successor"


@pytest.mark.full
def test_all_agents_crash_at_once_and_their_successors_adopt_the_checkpoint_in_memory(
    ram_job, undisturbed_hash
):
    job = ram_job(("--nnodes=2", "--max-restarts=3"))
    job.start("a", "b")
    kept = kept_step(job, least=15, world=2)
    for node in "ab":
        job.agents[node].process.kill()
    for node in "ab":
        job.agents[node].process.wait()
    job.start("a", "b")
    ended_well(job, undisturbed_hash)
    assert loaded_steps(job, "/dev/shm/")[0] >= kept
    assert job.output.count("its memory is adopted") == 2
    assert saved_to_disk(job) == 1, "the one at the end of the script"


@pytest.mark.full
def test_two_neighbours_lost_at_once_mean_the_checkpoint_on_disk(ram_job, undisturbed_hash):
    job = ram_job(("--nnodes=1:3", "--max-restarts=4"), save_every=10)
    job.start("a", "b", "c")
    job.wait_for_step(15, world=3)
    for node in ("b", "c"):
        job.agents.pop(node).kill_node()
    ended_well(job, undisturbed_hash)
    assert loaded_steps(job, f"{job.directory}/checkpoints/")[0] in (10, 20)
    assert "went with the nodes that held" in job.output


@pytest.mark.full
def test_without_a_good_copy_in_memory_the_damage_is_named_and_the_disk_is_used(
    ram_job, undisturbed_hash
):
    job = ram_job(("--nnodes=2:3", "--max-restarts=3"), save_every=10)
    job.start("a", "b", "c")
    kept_step(job, least=15, world=3)
    with stopped(job):
        copies = copies_of(job, "b")
        for copy in copies:
            damage(copy)
        job.agents.pop("b").kill_node()
    ended_well(job, undisturbed_hash)
    name = re.escape(copies[0].name)
    found = re.search(rf"falling back .*/dev/shm/\S+/{name}: block \d+ \(bytes .*", job.output)
    assert found is not None
    assert re.search(r"is not what was saved .* it holds (param|exp_avg)", found[0])
    assert loaded_steps(job, f"{job.directory}/checkpoints/")[-1] in (10, 20)


@pytest.mark.full
def test_a_damaged_copy_in_memory_is_named_and_replaced_by_the_other_one(ram_job, undisturbed_hash):
    job = ram_job(("--nnodes=2:3", "--max-restarts=3"), replicas=2)
    job.start("a", "b", "c")
    kept = kept_step(job, least=15, world=3)
    with stopped(job):
        # Both of the other ranks need a part of what the one between them had.
        (lost,) = [node for node in job.agents if own_images(job, node) == {IMAGE_OF_RANK_1}]
        copies = copies_of(job, lost)
        holder = copies[0].parents[2]
        for copy in copies:
            if copy.is_relative_to(holder):
                damage(copy)
        job.agents.pop(lost).kill_node()
    report = ended_well(job, undisturbed_hash)
    damaged = rf"{holder}/\S+/{IMAGE_OF_RANK_1}: block \d+ .* is not what was saved"
    assert re.search(f"another copy is read: {damaged}", job.output)
    assert loaded_steps(job, "/dev/shm/")[0] >= kept
    assert report.repeated_steps <= len(job.events("interrupt")), "one for each failure"


@contextmanager
def stopped(job: Cluster) -> Iterator[None]:
    """While no worker runs: what is in memory stays as it is."""
    workers = [job.worker_of(node) for node in job.agents]
    suspend(*workers)
    try:
        yield
    finally:
        for pid in workers:
            with suppress(ProcessLookupError):  # of a node that was killed meanwhile
                os.kill(pid, signal.SIGCONT)


def copies_of(job: Cluster, node: str) -> list[Path]:
    """The copies that other nodes keep of a node's own images."""
    (memory,) = [path for path in memories(job) if f".{node}." in path.name]
    own, others = own_images(job, node), [path for path in memories(job) if path != memory]
    return [p for other in others for p in other.glob("*/step-*/r*") if p.name in own]


def own_images(job: Cluster, node: str) -> set[str]:
    """The names of the images of a node's own workers, which are links to their staging buffers."""
    (memory,) = [path for path in memories(job) if f".{node}." in path.name]
    images = memory.glob("*/step-*/r*.safetensors")
    return {path.name for path in images if path.stat().st_nlink > 1}


def damage(path: Path) -> None:
    """Flip a bit in every page."""
    data = bytearray(path.read_bytes())
    data[::4096] = bytes(byte ^ 1 for byte in data[::4096])
    path.write_bytes(data)
