"""A rank that is lost in a load, when weights are on their way and nobody has voted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.numerics.test_silent_peers import Agent
from tests.support.suspended import is_suspended
from tests.support.training import config, fingerprint, make_engine, train
from tests.support.waiting import wait_for
from tests.support.world import GROUP_TIMEOUT_S, WorldError, WorldPool, pids
from zero_checkpoint import find
from zero_checkpoint.loading import reader, restore
from zero_comm.exchange.cpu.same_host import SWITCH
from zero_contract import worker as contract
from zero_contract.errors import PeerLost, ZeroError
from zero_contract.worker import ExitCode, Leave, When

WORLD, SAVED_AT, ENDS_AT = 3, 2, 4
TIMEOUT_S = 8.0
"""Of a group that gives up in time, and in which no rank is slow for so long."""


def save_and_end(root: str, stage: int) -> tuple[Any, ...]:
    engine = make_engine(config(stage))
    train(engine, SAVED_AT)
    engine.save_checkpoint(root)
    train(engine, ENDS_AT)
    return fingerprint(engine)


def load_and_end(root: str, stage: int) -> tuple[Any, ...]:
    engine = make_engine(config(stage), seed=8)
    engine.load_checkpoint(root)
    train(engine, ENDS_AT)
    return fingerprint(engine)


def form_impatient_group() -> None:
    """The same ranks, in a group that waits for a few seconds at most."""
    store = dist.PrefixStore("impatient", dist.distributed_c10d._get_default_store())
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def end_between_weights_and_vote(how: signal.Signals) -> None:
    """Let a signal come when this rank has passed its weights on and reads the rest."""
    read, weights = reader._Reader.read, iter([True])

    def deadly(self: Any, reads: Sequence[Any]) -> int:
        if next(weights, False):
            return read(self, reads)
        os.kill(os.getpid(), how)
        return read(self, reads)

    reader._Reader.read = deadly  # type: ignore[method-assign]


def load_beside_a_lost_rank(
    root: str, told: str, stage: int, lost: int, how: signal.Signals, switch: str
) -> None:
    """What the others hear, before the group's patience would have ended."""
    os.environ[SWITCH] = switch
    rank = dist.get_rank()
    try:
        if how == signal.SIGSTOP:
            form_impatient_group()
        engine = make_engine(config(stage), seed=8)
    finally:
        del os.environ[SWITCH]
    pid = pids()[lost]
    if rank == lost:
        end_between_weights_and_vote(how)
    begun_s = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        engine.load_checkpoint(root)
    took_s = time.monotonic() - begun_s
    with pytest.raises(ZeroError, match="because a load was interrupted"):
        engine.weight_hash()
    assert took_s < GROUP_TIMEOUT_S
    (Path(told) / f"rank{rank}").write_text(str(caught.value))
    others = {f"rank{each}" for each in range(WORLD)} - {f"rank{lost}"}
    wait_for(lambda: others <= set(os.listdir(told)), 60, "the others")
    if how == signal.SIGSTOP and f"rank{rank}" == min(others):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("stage", "lost", "how", "switch", "why"),
    [
        (0, 1, signal.SIGKILL, "1", "connection closed by rank 1"),
        (2, 0, signal.SIGKILL, "1", "connection closed by rank 0"),
        (3, 2, signal.SIGKILL, "0", "connection"),
        (2, 1, signal.SIGSTOP, "1", "timed out waiting for 8 s"),
        (3, 0, signal.SIGSTOP, "0", "timed out waiting"),
    ],
)
@pytest.mark.corners(stage=[0])
def test_a_rank_lost_between_its_weights_and_its_vote_is_missed_and_the_load_begins_anew(
    worlds: WorldPool,
    tmp_path: Path,
    stage: int,
    lost: int,
    how: signal.Signals,
    switch: str,
    why: str,
) -> None:
    root, told = tmp_path / "root", tmp_path / "told"
    told.mkdir()
    ends = worlds.run(WORLD, save_and_end, str(root), stage)
    with pytest.raises(WorldError, match=f"rank {lost} died, exit -9"):
        worlds.run(WORLD, load_beside_a_lost_rank, str(root), str(told), stage, lost, how, switch)
    for rank in {0, 1, 2} - {lost}:
        text = (told / f"rank{rank}").read_text()
        assert text.startswith("all ranks have read step-000000002.g0.")
        assert why in text.lower()  # gloo's own words, where it is the first to say so
    assert len(find(root).candidates) == 1
    assert worlds.run(WORLD, load_and_end, str(root), stage) == ends


def wait_for_a_search_that_stops(told: str) -> None:
    """Rank 0 stops before it has found anything; what becomes of rank 1, which then kills it."""
    rank, directory = dist.get_rank(), Path(told)
    path = directory / f"agent{rank}.sock"
    agent = Agent(path)
    os.environ[contract.ENV_SOCKET] = str(path)
    try:
        engine = make_engine(config(1))
    finally:
        del os.environ[contract.ENV_SOCKET]
    stopped, _ = pids()
    if rank == 0:
        restore._newest_first = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
        engine.load_checkpoint(told)

    def interrupt() -> None:
        wait_for(lambda: is_suspended(stopped), 30, "rank 0 is stopped")
        agent.say(Leave(round=0, when=When.NOW, reason="lost node a"))

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(SystemExit) as left:
        engine.load_checkpoint(told)
    (directory / "left").write_text(f"{left.value.code}: {left.value.__cause__}")
    os.kill(stopped, signal.SIGKILL)


def test_a_rank_that_waits_for_the_search_leaves_when_its_agent_asks(
    worlds: WorldPool, tmp_path: Path
) -> None:
    with pytest.raises(WorldError, match="rank 0 died, exit -9"):
        worlds.run(2, wait_for_a_search_that_stops, str(tmp_path))
    left = (tmp_path / "left").read_text()
    assert left == f"{int(ExitCode.PEER_LOST)}: loading: asked to leave: lost node a"
