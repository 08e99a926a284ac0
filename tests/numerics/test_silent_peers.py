"""A peer that is stopped, not dead: its sockets stay open, and nothing ever comes from it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ports import free_port
from tests.support.suspended import is_suspended, suspend
from tests.support.training import config, make_engine, train
from tests.support.waiting import wait_for
from tests.support.world import GROUP_TIMEOUT_S, WorldError, WorldPool, forkserver, pids
from zero_comm.waiting import Waiter
from zero_comm.worker.agent_link import AgentLink
from zero_contract import worker as contract
from zero_contract.worker import ExitCode, Leave, When
from zero_engine.core.engine import Engine

ROUND = 3


class Agent:
    """A worker's agent that says one thing, when it is told to."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(None)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._connection: socket.socket | None = None

    def say(self, message: contract.Message) -> None:
        """Take the worker's connection that is open, and write to it: it has begun with another."""
        while self._connection is None:
            connection, _ = self._listener.accept()
            connection.settimeout(None)
            try:
                connection.sendall(contract.encode(message))
                self._connection = connection
            except BrokenPipeError:
                connection.close()

    def close(self) -> None:
        """Close the connection and the socket."""
        self._listener.close()
        if self._connection is not None:
            self._connection.close()


def stop_in(engine: Engine, where: str) -> None:
    """Stop this process at some point of the next step."""

    def stop(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    match where:
        case "forward":
            engine.module.blocks[1].register_forward_pre_hook(stop)
        case "backward":
            engine.module.blocks[0].up.weight.register_hook(stop)
        case "step":
            engine.optimizer.register_step_pre_hook(stop)


def main_thread_waits() -> bool:
    """Whether this process is where it would be for ever."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return any(
        each.f_code is Waiter._wait_until_settled.__code__
        for each, _ in traceback.walk_stack(frame)
    )


def wait_beside_a_stopped_peer(root: str, stage: int, where: str, how: str) -> None:
    """Rank 1 stops itself; what becomes of rank 0, which then kills it."""
    # An engine without an agent that this process had before heeds Ctrl-C at the end of its steps.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank, directory = dist.get_rank(), Path(root)
    path = directory / f"agent-{rank}.sock"
    agent = Agent(path)
    os.environ.update({contract.ENV_SOCKET: str(path), contract.ENV_ROUND: str(ROUND)})
    try:
        engine = make_engine(config(stage))
    finally:
        del os.environ[contract.ENV_SOCKET], os.environ[contract.ENV_ROUND]
    train(engine, 1)
    _, peer = pids()
    if rank == 1:
        stop_in(engine, where)
        train(engine, 3)
        return
    told = []

    def interrupt() -> None:
        wait_for(lambda: is_suspended(peer) and main_thread_waits(), 30, "rank 0 waits for rank 1")
        told.append(time.monotonic())
        if how == "agent":
            agent.say(Leave(round=ROUND, when=When.NOW, reason="lost node b"))
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        train(engine, 3)
        ended = "trained"
    except SystemExit as ending:
        ended = f"exit {ending.code}"
    except KeyboardInterrupt:
        ended = "Ctrl-C"
    took_s = time.monotonic() - told[0]
    at_once = took_s < GROUP_TIMEOUT_S / 2  # and not by the patience of the group
    (directory / "ended").write_text(f"{ended}, {'at once' if at_once else took_s}")
    os.kill(peer, signal.SIGKILL)


@pytest.mark.parametrize(
    ("stage", "where", "how", "ended"),
    [
        (0, "backward", "agent", f"exit {int(ExitCode.PEER_LOST)}"),
        (2, "step", "agent", f"exit {int(ExitCode.PEER_LOST)}"),
        (3, "forward", "agent", f"exit {int(ExitCode.PEER_LOST)}"),
        (3, "backward", "agent", f"exit {int(ExitCode.PEER_LOST)}"),
        (2, "backward", "Ctrl-C", "Ctrl-C"),
        (3, "forward", "Ctrl-C", "Ctrl-C"),
    ],
)
def test_a_rank_leaves_a_silent_peer_at_once_when_it_is_asked_to(
    worlds: WorldPool, tmp_path: Path, stage: int, where: str, how: str, ended: str
) -> None:
    with pytest.raises(WorldError, match="rank 1 died, exit -9"):
        worlds.run(2, wait_beside_a_stopped_peer, str(tmp_path), stage, where, how)
    assert (tmp_path / "ended").read_text() == f"{ended}, at once"


SCRIPT = """
import os, signal, sys
import torch, zero_deepspeed
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
engine, *_ = zero_deepspeed.initialize(model=model, config={
    "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}})
if engine.global_rank == 1:
    engine.module.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGSTOP))
engine.backward(engine(torch.ones(1, 64)).sum())
"""


@pytest.mark.full
def test_a_process_that_leaves_a_silent_peer_really_ends(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    agent, port = Agent(path), free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": os.pathsep.join(sys.path),
                **({contract.ENV_SOCKET: str(path)} if rank == 0 else {}),
            },
        )
        for rank in (0, 1)
    ]
    try:
        wait_for(lambda: is_suspended(ranks[1].pid), 60, "rank 1 is stopped")
        agent.say(Leave(round=0, when=When.NOW, reason="lost node b"))
        assert ranks[0].wait(60) == ExitCode.PEER_LOST
    finally:
        agent.close()
        for process in ranks:
            process.kill()
            process.wait(60)


# ---- the host of the store ----


def hosts(ports: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    ports.put(store.port)
    signal.pause()


@pytest.mark.parametrize("when", [When.LOST, When.NOW])
def test_who_is_to_leave_at_once_waits_for_no_store_that_answers_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: When
) -> None:
    """Every descriptor stays. A save in flight asks the store, and the process waits for it."""
    context = forkserver()
    ports = context.Queue()
    host = context.Process(target=hosts, args=(ports,), daemon=True)
    host.start()
    port = ports.get(timeout=60)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            store.check(["a verdict"])
        except RuntimeError as error:
            errors.append(error)

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    assert host.pid is not None
    suspend(host.pid)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "agent.sock"))
    listener.listen()
    link = AgentLink(rank=0, path=str(tmp_path / "agent.sock"))
    agent, _ = listener.accept()
    monkeypatch.setattr(socket, "socket", partial(pytest.fail, "it would change how one blocks"))
    try:
        asks = threading.Thread(target=ask)
        asks.start()
        before = sorted(os.listdir("/proc/self/fd"))
        agent.sendall(contract.encode(Leave(round=0, when=when, reason="lost node b")))
        wait_for(lambda: errors, 10, "the call has ended")
        assert sorted(os.listdir("/proc/self/fd")) == before
        asks.join()
    finally:
        host.kill()
        for each in (link, agent, listener):
            each.close()
