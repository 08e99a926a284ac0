"""A pool of worker processes that form small worlds, one call after the other.

Importing torch costs seconds, forming a gloo group milliseconds: so the processes are started
once for a whole test run, and each call forms a fresh process group among the first `world` of
them. A call ends by its deadline. A worker that dies or hangs fails the test with what is known
of it, and is replaced before the next call.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest

_DEATH_S = 30.0
"""How long the end of a process whose pipe is closed may take to be known here."""
GROUP_TIMEOUT_S = 30.0
"""How long a rank waits for the others of its group."""


class WorldError(AssertionError):
    """A rank raised, died or hung; the message holds every rank's story."""


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Connection

    def stop(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


def forkserver() -> ForkServerContext:
    """Starts processes that share one import of torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context


class WorldPool:
    """Runs functions as the ranks of a world. `close` it when done."""

    def __init__(self, size: int) -> None:
        """Start `size` processes, which share one import of torch."""
        import torch.distributed as dist

        self._context = forkserver()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers = [self._start() for _ in range(size)]
        self._calls = 0
        # The workers may have children of their own, so they are no daemons; and Python waits at
        # its end for those that are not.
        atexit.register(self.close)

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._store.port))
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def run(
        self,
        world: int,
        job: Callable[..., Any],
        *args: Any,
        deadline_s: float = 120.0,
        grace_s: float = 20.0,
        backend: str = "gloo",
    ) -> list[Any]:
        """Call `job(*args)` on each rank inside a process group; results in rank order.

        `job` must be a module-level function. After the first error or death the other ranks may
        go on for `grace_s`, to tell their own. `backend`: of the group. Raises WorldError.
        """
        self._calls += 1
        self._workers += [self._start() for _ in range(len(self._workers), world)]
        workers = self._workers[:world]
        for rank, worker in enumerate(workers):
            worker.pipe.send_bytes(pickle.dumps((self._calls, rank, world, backend, job, args)))
        answers = _collect(workers, time.monotonic() + deadline_s, grace_s)
        stories = [_story(rank, workers[rank], answers.get(rank)) for rank in range(world)]
        for rank in range(world):
            if rank not in answers:
                self._workers[rank].stop()
                self._workers[rank] = self._start()
        if any(stories):
            raise WorldError("\n".join(story for story in stories if story))
        return [answers[rank][1] for rank in range(world)]

    def close(self) -> None:
        """End all processes."""
        while self._workers:
            self._workers.pop().stop()


def _collect(
    workers: list[_Worker], deadline: float, grace_s: float
) -> dict[int, tuple[bool, Any]]:
    """The answers by rank, until all are in, the deadline, or a grace after the first failure."""
    answers: dict[int, tuple[bool, Any]] = {}
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), timeout=left_s):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pickle.loads(pipe.recv_bytes())
                failed = not answers[rank][0]
            except EOFError:
                workers[rank].process.join(_DEATH_S)
                failed = True
            if failed:
                deadline = min(deadline, time.monotonic() + grace_s)
    return answers


def _story(rank: int, worker: _Worker, answer: tuple[bool, Any] | None) -> str:
    """What went wrong on a rank; empty if nothing did."""
    if answer is not None:
        return "" if answer[0] else f"rank {rank} raised:\n{answer[1]}"
    code = worker.process.exitcode
    return f"rank {rank} {'did not answer in time' if code is None else f'died, exit {code}'}"


def _serve(pipe: Connection, port: int) -> None:
    """A worker's life: one call after the other until the pipe closes."""
    import torch
    import torch.distributed as dist

    from tests.support import queued

    # Loaders' processes start as those of a script do, and import nothing again.
    multiprocessing.set_start_method("fork", force=True)
    gc.freeze()  # a collection then looks at what calls have left, and at nothing else
    gc.enable()
    # As a script may: no socket of ours has it. Those by which torch passes files have.
    socket.setdefaulttimeout(1)
    torch.manual_seed(0)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    while True:
        try:
            call, rank, world, backend, job, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        torch.set_num_threads(1)  # each time: Lightning sets another number
        queued.register()
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"call{call}", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        # A rank may be connected while others are still connecting: to those, a job that soon ends
        # its group, or itself, would look like a peer that failed.
        dist.barrier()
        try:
            answer = (True, job(*args))
        except BaseException as error:
            answer = (False, "".join(traceback.format_exception(error)))
            sys.stdout.flush()
            if backend == queued.BACKEND and dist.is_initialized():  # nothing else ends its waits
                dist.distributed_c10d._abort_process_group()
        if dist.is_initialized():  # the job may have ended it
            dist.destroy_process_group()
        # Engines are cycles, and each keeps the threads of its group, which poll: hundreds of them
        # would take the time of the tests that follow.
        gc.collect()
        pipe.send_bytes(pickle.dumps(answer))


def pids() -> list[int]:
    """The process ids of all ranks, in rank order. All ranks must call it."""
    import torch.distributed as dist

    found = [0] * dist.get_world_size()
    dist.all_gather_object(found, os.getpid())
    return found


def one_result(worlds: WorldPool, job: Any, *args: Any, sizes: tuple[int, ...] = (1, 3)) -> Any:
    """The result of `job`, which must be the same on every rank of every size."""
    results = [result for world in sizes for result in worlds.run(world, job, *args)]
    assert all(result == results[0] for result in results)
    return results[0]


of_stages = pytest.mark.parametrize(
    "stages",
    [
        pytest.param({1: (0,), 2: (1, 3), 3: (2,)}, id="each once"),
        pytest.param(dict.fromkeys((1, 3), (0, 1, 2, 3)), id="all", marks=pytest.mark.full),
    ],
)
"""By world size, the stages that are trained there; see `one_of_stages`."""
Stages = dict[int, tuple[int, ...]]


def one_of_stages(worlds: WorldPool, stages: Stages, job: Any, *args: Any) -> Any:
    """The result of `job(stage, *args)`, which must be the same at every stage on every rank."""
    ranks = [
        rank for world in stages for rank in worlds.run(world, _of_each, stages[world], job, *args)
    ]
    results = [result for rank in ranks for result in rank]
    assert all(result == results[0] for result in results)
    return results[0]


def _of_each(stages: tuple[int, ...], job: Any, *args: Any) -> list[Any]:
    return [job(stage, *args) for stage in stages]
