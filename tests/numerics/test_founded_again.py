"""A process outlives its process group: it founds the next one, with those that are left."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.world import forkserver
from zero_comm.exchange.collectives import Collectives, wait
from zero_comm.worker.distributed import found_again
from zero_contract.errors import PeerLost

HOST = torch.device("cpu")
MICROBATCHES, NUMEL = 12, 12 << 10
"""Divided by 4, 3 and 2 ranks."""


def gradient(index: int) -> torch.Tensor:
    """A sum of these depends on their order."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(index)) * 10.0**index


def total(group: Collectives, killed_in: int | None) -> torch.Tensor:
    """The sum of all micro-batches in their order; perhaps a rank dies within it."""
    own = torch.zeros(NUMEL // group.world)
    for first in range(0, MICROBATCHES, group.world):
        sent = gradient(first + group.rank)
        received = torch.empty(NUMEL // group.world * (group.world - 1))
        pending = group.exchange_gradients(sent, received, "gradients")
        if first == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        wait(pending)
        for each in group.in_microbatch_order(sent, received):
            own += each
    whole = torch.empty(NUMEL)
    group.own(whole).copy_(own)
    wait(group.all_gather(whole, "sum"))
    return whole


def used() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared memory": sum("/dev/shm/" in line for line in open("/proc/self/maps")),
        "KiB": int(Path("/proc/self/statm").read_text().split()[1]) * 4,
    }


def serve(asked: Connection) -> None:
    """Found one group after the other, in this process."""
    torch.set_num_threads(1)
    while True:
        environ, killed_in = asked.recv()
        try:
            found_again(environ)
            group = Collectives()
            group.meet(HOST)
            asked.send((total(group, killed_in), used()))
        except PeerLost as lost:
            asked.send((lost, used()))


class Processes:
    """Four of them; each group that they found has a store of its own, as from an agent."""

    def __init__(self) -> None:
        context = forkserver()
        self._pipes, self._processes = [], []
        for _ in range(4):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def found(self, members: list[int], killed: int | None = None) -> dict[int, Any]:
        """What each member answers; `killed` dies in the middle of it."""
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        for rank, member in enumerate(members):
            environ = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(members)),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            self._pipes[member].send((environ, 4 if member == killed else None))
        answers = {}
        for member in members:
            if member != killed:
                assert self._pipes[member].poll(60), f"process {member} does not answer"
                answers[member] = self._pipes[member].recv()
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.close()


def expected() -> torch.Tensor:
    summed = torch.zeros(NUMEL)
    for index in range(MICROBATCHES):
        summed += gradient(index)
    return summed


@pytest.mark.corners(killed=[2])
@pytest.mark.parametrize("killed", range(4))
def test_survivors_of_a_kill_within_an_exchange_go_on_in_their_processes_with_the_same_bits(
    processes: Processes, killed: int
) -> None:
    for answer, _ in processes.found([0, 1, 2, 3]).values():
        assert torch.equal(answer, expected())
    survivors = [member for member in range(4) if member != killed]
    for answer, _ in processes.found([0, 1, 2, 3], killed).values():
        assert isinstance(answer, PeerLost)
    for answer, _ in processes.found(survivors).values():
        assert torch.equal(answer, expected())


@pytest.mark.full
def test_two_hundred_groups_in_one_process_leave_nothing_behind(processes: Processes) -> None:
    worlds = [[0, 1, 2], [0, 1, 2, 3], [1, 0]]
    for turn in range(12):
        before = processes.found(worlds[turn % 3])
    for turn in range(12, 201):
        after = processes.found(worlds[turn % 3])
    for member in worlds[2]:
        answer, now = after[member]
        then = before[member][1]
        assert torch.equal(answer, expected())
        assert now["KiB"] < then["KiB"] + 2048
        assert {**now, "KiB": 0} == {**then, "KiB": 0}
