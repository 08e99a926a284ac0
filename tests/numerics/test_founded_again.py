"""A process outlives its process group: it founds the next one, with those that are left."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.world import forkserver
from zero_comm.exchange.collectives import Collectives, Pending, wait
from zero_comm.topology import Topology
from zero_comm.waiting import Interrupt
from zero_comm.worker.distributed import found_again
from zero_contract.errors import PeerLost

HOST = torch.device("cpu")
MICROBATCHES, NUMEL = 12, 12 << 10
"""Divided by 4, 3 and 2 ranks."""


def gradient(index: int) -> torch.Tensor:
    """A sum of these depends on their order."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(index)) * 10.0**index


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def total(group: Collectives, _: Interrupt, dies: bool) -> torch.Tensor:
    """The sum of all micro-batches in their order; perhaps a rank dies within it."""
    own = torch.zeros(NUMEL // group.world)
    for first in range(0, MICROBATCHES, group.world):
        sent = gradient(first + group.rank)
        received = torch.empty(NUMEL // group.world * (group.world - 1))
        pending = group.exchange_gradients(sent, received, "gradients")
        if dies and first == group.world:
            die()
        wait(pending)
        for each in group.in_microbatch_order(sent, received):
            own += each
    whole = torch.empty(NUMEL)
    group.own(whole).copy_(own)
    wait(group.all_gather(whole, "sum"))
    return whole


Buffers = tuple[torch.Tensor, list[torch.Tensor], Pending]
"""Of an exchange: what is sent, what arrives."""


def gathered(group: Collectives, own: torch.Tensor) -> Buffers:
    full = torch.full((group.world * own.numel(),), 7.0)
    group.own(full).copy_(own)
    start, stop = group.interval(full.numel(), group.rank)
    return group.own(full), [full[:start], full[stop:]], group.all_gather(full, "gather")


def gathered_over_nodes(group: Collectives, own: torch.Tensor) -> Buffers:
    group.lay_out(Topology(nodes=(2, 2)))
    return gathered(group, own)


def shared(group: Collectives, own: torch.Tensor) -> Buffers:
    group.lay_out(Topology(nodes=(2, 2)))
    rows = {rank: torch.full((rank + 1,), 7.0) for rank in range(group.world)}
    own = rows[group.rank].copy_(own[: group.rank + 1])
    others = [rows[rank] for rank in rows if rank != group.rank]
    return own, others, group.share(rows, "shared")


def scattered(group: Collectives, own: torch.Tensor) -> Buffers:
    sent = own.repeat(group.world)
    received = torch.full((own.numel() * (group.world - 1),), 7.0)
    return sent, [received], group.exchange_gradients(sent, received, "gradients")


def passed_around(group: Collectives, own: torch.Tensor) -> Buffers:
    wanted = {rank: torch.full_like(own, 7.0) for rank in range(group.world) if rank != group.rank}
    held = dict.fromkeys(wanted, own)
    return own, list(wanted.values()), group.exchange_pieces(held, wanted, "pieces")


def lost(group: Collectives, interrupt: Interrupt, dies: bool, begin: Any) -> list[Any]:
    """What this rank sends, and what arrives, when a rank dies in the first of two exchanges."""
    interrupt.fills_forward = True
    told = []
    for _ in range(2):
        if dies:
            die()
        sent, arriving, pending = begin(group, torch.full((4,), group.rank + 1.0))
        wait(pending)
        told.append((sent.unique().tolist(), torch.cat(arriving).unique().tolist()))
    return told


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
        environ, work, dies = asked.recv()
        try:
            found_again(environ)
            interrupt = Interrupt()
            group = Collectives(interrupt=interrupt)
            group.meet(HOST)
            asked.send((work(group, interrupt, dies), used()))
            if interrupt.lost is not None:
                die()  # for those who wait for this rank alone
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

    def found(
        self, members: list[int], killed: int | None = None, work: Callable[..., Any] = total
    ) -> dict[int, Any]:
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
            self._pipes[member].send((environ, work, member == killed))
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


@pytest.mark.corners(begin=[gathered, shared])
@pytest.mark.parametrize("begin", [gathered, gathered_over_nodes, shared, scattered, passed_around])
def test_a_step_without_effect_gets_zeros_for_a_lost_peer_and_keeps_what_it_sends(
    processes: Processes, begin: Callable[..., Any]
) -> None:
    """A copy of what is sent may be under way to a checkpoint."""
    for member, (told, _) in processes.found([0, 1, 2, 3], 3, partial(lost, begin=begin)).items():
        assert told == [([member + 1.0], [0.0])] * 2


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
