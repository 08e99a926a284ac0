"""Real processes, really killed or stopped at every stage of a save.

The votes go through a TCPStore that the test hosts, so that it outlives rank 0. Processes are
forked from a server that has imported torch once.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from tests.unit.checkpoint.support import (
    SmallBlocks,
    adam_state,
    blank,
    load_all,
    names,
    same_bits,
    saved,
    share,
)
from zero_engine.checkpoint import Ballot, save
from zero_engine.errors import CheckpointError

pytestmark = pytest.mark.processes

WORLD, DEADLINE_S = 3, 60
OLD, NEW = adam_state(seed=1, width=3000), adam_state(seed=2, width=3000)


class SignalAt(SmallBlocks):
    """Sends this very process a signal, once, at one operation on one file."""

    def __init__(self, stage: str, name: str, number: int = signal.SIGKILL, share: float = 0):
        self.stage, self.name, self.number, self.share = stage, name, number, share
        self.written = 0

    def _reached(self, stage, path):
        if stage == self.stage and self.name in str(path):
            self.stage = ""
            os.kill(os.getpid(), self.number)

    def create(self, path):
        self._reached("create", path)
        return super().create(path)

    def write(self, file, data):
        super().write(file, data)
        self.written += len(data)
        if self.written >= self.share * total_bytes(rank_of(file.name)):
            file.flush()
            self._reached("write", file.name)

    def publish(self, temporary, final):
        self._reached("publish", final)
        super().publish(temporary, final)
        self._reached("published", final)


def total_bytes(rank):
    return sum(p.data.numel() * p.data.element_size() for p in share(NEW, rank, WORLD).pieces)


def rank_of(name):
    stem = Path(name).name
    return int(stem[1:6]) if stem.startswith("r") else 0


def save_as_rank(rank, root, port, disk, file_limit, timeout_s, outcome):
    """One rank, in a process of its own; tells the test how it ended."""
    torch.set_num_threads(1)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    store = TCPStore("127.0.0.1", port, None, is_master=False)
    # All begin together, so that a short limit below is not spent on starting processes.
    Ballot(PrefixStore("begin", store), rank, WORLD, timeout_s=DEADLINE_S).ask({}, lambda _: {})
    ballot = Ballot(PrefixStore("save", store), rank, WORLD, timeout_s=timeout_s)
    state = share(NEW, rank, WORLD)
    try:
        save(root, state, ballot, step=2, tag="t", round=0, fence=None, disk=disk)
    except CheckpointError as error:
        outcome.send(str(error))
    else:
        outcome.send("saved")


class Job:
    """Three ranks that save together."""

    def __init__(self, root, disks, file_limits, timeout_s):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._ends, self.processes = [], []
        for rank in range(WORLD):
            receive, send = context.Pipe(duplex=False)
            disk = disks.get(rank, SmallBlocks())
            limit = file_limits.get(rank)
            args = (rank, root, self._store.port, disk, limit, timeout_s, send)
            process = context.Process(target=save_as_rank, args=args, daemon=True)
            process.start()
            send.close()
            self._ends.append(receive)
            self.processes.append(process)

    def outcome(self, rank):
        """What a rank said at its end, or the signal that ended it."""
        assert self._ends[rank].poll(DEADLINE_S), f"rank {rank} hangs"
        try:
            return self._ends[rank].recv()
        except EOFError:
            self.processes[rank].join(DEADLINE_S)
            return signal.Signals(-self.processes[rank].exitcode).name

    def close(self):
        for process in self.processes:
            process.kill()
            process.join(DEADLINE_S)


@pytest.fixture
def root(tmp_path):
    saved(tmp_path, OLD, 2, step=1)
    return tmp_path


@pytest.fixture
def start(root):
    jobs = []

    def start(disks=None, file_limits=None, timeout_s=1.0):
        jobs.append(Job(root, disks or {}, file_limits or {}, timeout_s))
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


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_a_rank_killed_while_it_writes_costs_nothing_but_the_attempt(root, start, part):
    before = names(root)
    job = start({1: SignalAt("write", "r00001", share=part)})
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
def test_a_coordinator_killed_at_any_stage_leaves_the_old_or_the_new_whole(
    root, start, stage, name, step
):
    job = start({0: SignalAt(stage, name)})
    assert job.outcome(0) == "SIGKILL"
    for rank in (1, 2):
        assert f"rank {rank}: no verdict from rank 0 within" in job.outcome(rank)
    assert (root / "latest").read_text().startswith("step-000000001.")
    check_loads(root, step)


def test_a_stopped_rank_does_not_hold_up_the_others_and_its_late_vote_is_refused(root, start):
    before = names(root)
    job = start({2: SignalAt("write", "r00002", signal.SIGSTOP, share=0.5)})
    for rank in (0, 1):
        assert "rank 2 did not report in time" in job.outcome(rank)
    wait_for_state(job.processes[2].pid, "T")
    os.kill(job.processes[2].pid, signal.SIGCONT)
    assert "rank 2 did not report in time" in job.outcome(2)
    assert names(root) == before
    check_loads(root, 1)


def wait_for_state(pid, letter):
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != letter:
        assert time.monotonic() < deadline


def test_a_write_error_of_the_system_is_told_to_every_rank(root, start):
    before = names(root)
    job = start(file_limits={1: 20_000}, timeout_s=DEADLINE_S)
    outcomes = {job.outcome(rank) for rank in range(WORLD)}
    (text,) = outcomes
    assert "rank 1: " in text
    assert text.endswith("r00001.safetensors: File too large (errno 27)")
    assert names(root) == before
    check_loads(root, 1)
