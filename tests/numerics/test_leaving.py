"""A worker and its agent: leaving at a boundary, fenced saves, peers that vanish."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_torch
from tests.support.inside import persistence_of
from tests.support.models import Tokens
from tests.support.saving import heard
from tests.support.training import config, make_engine, train
from tests.support.waiting import wait_for
from tests.support.world import GROUP_TIMEOUT_S, WorldError, WorldPool
from zero_checkpoint import find
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.place import Place, place
from zero_checkpoint.saving.departure import Departure, Script, choose_departure
from zero_contract import worker as contract
from zero_contract.errors import CommitRefused, PeerLost
from zero_contract.worker import (
    CommitReply,
    CommitRequest,
    ExitCode,
    Hello,
    Leave,
    Left,
    PeerMemoryReply,
    PeerMemoryRequest,
    Progress,
    When,
)
from zero_engine.core.engine import Engine

ROUND = 3


class Agent:
    """The other end of the socket: one worker's agent, as real as the contract describes it."""

    def __init__(
        self,
        path: Path,
        *,
        grants: bool = True,
        passing: bool = False,
        leave_after: int | None = None,
        memory: Callable[[PeerMemoryRequest], PeerMemoryReply] | None = None,
    ) -> None:
        self.heard: list[contract.Message] = []
        self.grants = grants
        self._passing = passing
        self._memory = memory
        self._leave_after = leave_after
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(None)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(None)
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                message = contract.decode(line)
                self.heard.append(message)
                for answer in self._answers(message):
                    with suppress(BrokenPipeError):  # a worker that leaves waits for none
                        connection.sendall(contract.encode(answer))

    def _answers(self, message: contract.Message) -> Iterator[contract.Message]:
        match message:
            case CommitRequest():
                reason = "" if self.grants else "round 4 is forming"
                yield CommitReply(
                    request=message.request,
                    granted=self.grants,
                    reason=reason,
                    passing=self._passing,
                )
            case PeerMemoryRequest() if self._memory is not None:
                yield self._memory(message)
            case Progress() if message.step == self._leave_after:
                yield Leave(round=ROUND, when=When.BOUNDARY, reason="drain")

    def told(self, deadline_s: float = 60.0) -> list[contract.Message]:
        """All that the worker said, once it has closed the connection."""
        self._thread.join(deadline_s)
        assert not self._thread.is_alive()
        return self.heard


@contextmanager
def under_agent(root: str, **options: Any) -> Iterator[Agent]:
    """Let the engine find an agent in the environment."""
    path = Path(root) / f"agent-{dist.get_rank()}.sock"
    agent = Agent(path, **options)
    os.environ.update({contract.ENV_SOCKET: str(path), contract.ENV_ROUND: str(ROUND)})
    try:
        yield agent
    finally:
        del os.environ[contract.ENV_SOCKET], os.environ[contract.ENV_ROUND]


def exit_code_of(engine: Engine, run: Any) -> int | None:
    """What the process would exit with."""
    try:
        run()
    except SystemExit as ending:
        return int(ending.code or 0)
    finally:
        engine.destroy()
    return None


def await_leave(engine: Engine) -> None:
    """The agent's message comes on another thread; wait until it is here."""
    wait_for(lambda: engine._link.leave_asked, 60, "the agent's message")


# ---- leaving ----


def test_a_librarys_loop_leaves_one_step_after_its_own_save_with_all_its_files(
    worlds: WorldPool, tmp_path: Path
) -> None:
    ranks = worlds.run(3, drained_in_a_librarys_loop, str(tmp_path))
    assert ranks == [(ExitCode.LEFT, 5, [Left(round=ROUND, step=4)])] * 3
    assert len(list(tmp_path.glob("loop-step4-rank*"))) == 3


def drained_in_a_librarys_loop(root: str) -> tuple[Any, ...]:
    """Rank 0 alone is asked to leave, after step 2; each save is followed by files of the loop."""
    asked = dist.get_rank() == 0
    batch = Tokens(2)[0][None]
    with under_agent(root, leave_after=2 if asked else None) as agent:
        engine = make_engine(config(3), training_data=None)

        def run() -> None:
            for step in range(1, 9):
                if step == 3 and asked:
                    await_leave(engine)
                engine.set_gradient_accumulation_boundary(True)
                engine.backward(engine(batch))
                engine.step()
                if step in (1, 4, 8):
                    engine.save_checkpoint(f"{root}/checkpoints")
                    Path(root, f"loop-step{step}-rank{engine.global_rank}").touch()

        code = exit_code_of(engine, run)
        left = [message for message in agent.told() if isinstance(message, Left)]
    return code, engine.global_steps, left


@pytest.mark.parametrize(
    ("known", "state", "saved", "asks", "engines", "expected"),
    [
        (True, False, False, False, 1, Departure.SAVE_AND_LEAVE),
        (True, False, True, True, 1, Departure.SAVE_AND_LEAVE),
        (True, False, False, True, 1, Departure.AWAIT_SAVE),
        (True, True, True, False, 1, Departure.AWAIT_SAVE),
        (False, True, False, True, 1, Departure.AWAIT_SAVE),
        (False, False, False, True, 1, Departure.AWAIT_SAVE),
        (False, False, False, False, 1, Departure.LEAVE),
        (True, False, True, False, 2, Departure.AWAIT_SAVE),
        (False, False, False, False, 2, Departure.LEAVE),
    ],
)
def test_how_to_leave_follows_from_what_the_script_has_done(
    known: bool, state: bool, saved: bool, asks: bool, engines: int, expected: Departure
) -> None:
    departure, _ = choose_departure(
        directory_known=known,
        script_has_state=state,
        script_has_saved=saved,
        script_asks=asks,
        engines=engines,
    )
    assert departure is expected


NEWEST, BEST = place("newest"), place("best")


@pytest.mark.parametrize(
    ("begins", "saves", "expected"),
    [
        ([], [BEST], BEST),
        ([], [BEST, NEWEST], None),
        ([(NEWEST, True)], [BEST], NEWEST),
        ([(NEWEST, True), (BEST, True)], [BEST], NEWEST),
        ([(NEWEST, False)], [], NEWEST),
        ([(NEWEST, False)], [BEST], None),
        ([(NEWEST, False)], [BEST, NEWEST, BEST], NEWEST),
    ],
)
def test_a_worker_saves_by_itself_only_where_the_next_start_loads_for_certain(
    begins: list[tuple[Place, bool]], saves: list[Place], expected: Place | None
) -> None:
    script = Script()
    for where, is_own in begins:
        script.resumes(where, is_own=is_own)
    for where in saves:
        script.saves(where)
    assert script.leaves_to == expected
    departure, _ = choose_departure(
        directory_known=True,
        script_has_state=False,
        script_has_saved=True,
        script_asks=False,
        in_doubt=script.leaves_to is None,
    )
    expects = Departure.AWAIT_SAVE if expected is None else Departure.SAVE_AND_LEAVE
    assert departure is expects


# ---- what the agent hears ----


def test_the_agent_hears_a_hello_and_every_step(worlds: WorldPool, tmp_path: Path) -> None:
    first, second = worlds.run(2, two_steps, str(tmp_path))
    assert [message for message in first if isinstance(message, Hello)] == [
        Hello(rank=0, pid=first[0].pid, can=("boundary",), round=ROUND)
    ]
    steps = [[m for m in heard if isinstance(m, Progress)] for heard in (first, second)]
    assert [(m.step, m.samples) for m in steps[0]] == [(1, 10), (2, 20)]
    untimed = [
        [msgspec.structs.replace(m, compute_s=0.0, wait_s=0.0) for m in heard] for heard in steps
    ]
    assert untimed[0] == untimed[1]  # the loss is that of the global batch
    assert all(heard[0].compute_s == 0.0 < heard[1].compute_s for heard in steps)


def two_steps(root: str) -> list[contract.Message]:
    with under_agent(root) as agent:
        engine = make_engine(config(1))
        train(engine, 2)
        engine.destroy()
        return agent.told()


# ---- fenced saves ----


def test_a_refused_commit_publishes_nothing_and_training_goes_on(
    worlds: WorldPool, tmp_path: Path
) -> None:
    assert worlds.run(2, save_refused, str(tmp_path)) == [(False, 2)] * 2
    assert list((tmp_path / "checkpoints").glob("*/MANIFEST.json")) == []


def save_refused(root: str) -> tuple[bool, int]:
    with under_agent(root, grants=False):
        engine = make_engine(config(1))
        train(engine, 1)
        saved = engine.save_checkpoint(f"{root}/checkpoints")
        train(engine, 2)
        with pytest.raises(CheckpointError, match="its last checkpoint, of step 1, was not saved"):
            engine.destroy()
    return saved, engine.global_steps


NOTHING = ("nothing was written for step", "nothing was published for step")
IN_A_ROW = "two saves in a row could not be published, and nothing was written"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_agent_that_is_gone_stops_training_at_the_second_save_in_a_row_that_it_costs(
    worlds: WorldPool, tmp_path: Path, asynchronous: bool
) -> None:
    """In the background nobody knows of the second before the third."""
    last = 3 if asynchronous else 2
    ((ended_at, error, lines),) = worlds.run(
        1, save_without_agent, str(tmp_path), asynchronous, False
    )
    assert (ended_at, error.startswith(IN_A_ROW)) == (last, True)
    assert [line.split(",")[0] for line in lines] == [f"{NOTHING[0]} {step}" for step in (1, 2)]


def test_saves_that_fail_only_while_etcd_is_away_never_end_the_run(
    worlds: WorldPool, tmp_path: Path
) -> None:
    ((ended_at, error, lines),) = worlds.run(1, save_without_agent, str(tmp_path), False, True)
    assert (ended_at, error) == (4, "")
    expected = [f"{NOTHING[1]} {step}" for step in range(1, 5)]
    assert [line.split(",")[0] for line in lines] == expected
    assert [c.manifest.step for c in find(tmp_path / "checkpoints").candidates] == [4]


def save_without_agent(root: str, asynchronous: bool, away: bool) -> tuple[int, str, list[str]]:
    settings = config(1, checkpoint={"async": asynchronous})
    agent = None
    if away:
        with under_agent(root, grants=False, passing=True) as agent:
            engine = make_engine(settings)
    else:
        os.environ[contract.ENV_SOCKET] = f"{root}/nobody.sock"
        engine = make_engine(settings)
        del os.environ[contract.ENV_SOCKET]
    error = ""
    with heard(logging.WARNING) as lines:
        try:
            for step in range(1, 5):
                train(engine, step)
                engine.save_checkpoint(f"{root}/checkpoints")
        except CheckpointError as problem:
            error = str(problem)
        if agent is not None:
            agent.grants = True
            engine.destroy()
        else:
            with suppress(CheckpointError, CommitRefused):
                engine.destroy()
    return engine.global_steps, error, [line for line in lines if line.startswith(NOTHING)]


def test_what_is_written_is_published_at_the_exit_also_of_a_script_that_an_error_ends(
    worlds: WorldPool, tmp_path: Path
) -> None:
    assert worlds.run(1, close_behind_an_error, str(tmp_path)) == [""]
    assert [c.manifest.step for c in find(tmp_path / "checkpoints").candidates] == [1]


def close_behind_an_error(root: str) -> str:
    with under_agent(root, grants=False, passing=True) as agent:
        engine = make_engine(config(1))
    train(engine, 1)
    assert not engine.save_checkpoint(f"{root}/checkpoints")
    try:
        raise ValueError("of the script")
    except ValueError:
        engine.destroy()
    agent.grants = True
    return persistence_of(engine).last.at_exit()


# ---- peers that vanish ----


def lose_a_peer(root: str, agent: bool, where: str, stage: int) -> Any:
    """Rank 2 is killed at some point of step 2; what becomes of the others."""
    if agent:
        with under_agent(root):
            engine = make_engine(config(stage))
    else:
        engine = make_engine(config(stage))
    train(engine, 1)
    rank = dist.get_rank()

    def run() -> None:
        if rank == 2:
            die_in(engine, where)
        train(engine, 3)

    began = time.monotonic()
    try:
        code = exit_code_of(engine, run)
    except PeerLost as error:
        code = f"PeerLost: {error}"
    assert time.monotonic() - began < GROUP_TIMEOUT_S / 2  # its patience has not ended
    Path(root, f"rank{rank}").write_text(str(code))
    os._exit(0)  # as a script's error ends it: a peer may wait for this survivor, not for the dead


def die_in(engine: Engine, where: str) -> None:
    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    match where:
        case "forward":
            engine.module.blocks[1].register_forward_pre_hook(die)
        case "backward":
            engine.module.blocks[0].up.weight.register_hook(die)
        case "step":
            engine.optimizer.register_step_pre_hook(die)


def test_without_an_agent_a_killed_peer_is_an_error_that_says_what_was_going_on(
    worlds: WorldPool, tmp_path: Path
) -> None:
    with pytest.raises(WorldError, match="rank 2 died, exit -9"):
        worlds.run(3, lose_a_peer, str(tmp_path), False, "backward", 2)
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}").read_text().startswith("PeerLost: gradients of blocks.")


def drained_between_two_places(root: str, best_first: bool) -> tuple[int | None, list[int]]:
    """Saves the best so far, and the newest, in this order or the other; the steps of both."""
    places = [f"{root}/best", f"{root}/newest"]
    with under_agent(root, leave_after=2):
        engine = make_engine(config(1))
        engine.load_checkpoint(places[1])

        def run() -> None:
            for step in range(1, 9):
                train(engine, step)
                if step == 2:
                    await_leave(engine)
                if step in (1, 3):
                    for place in places if best_first else reversed(places):
                        engine.save_checkpoint(place)

        code = exit_code_of(engine, run)
    return code, [find(Path(place)).candidates[0].manifest.step for place in places]


@pytest.mark.parametrize("best_first", [False, True])
def test_a_worker_leaves_with_a_checkpoint_where_its_script_has_loaded_from(
    worlds: WorldPool, tmp_path: Path, best_first: bool
) -> None:
    """Not where the script keeps the best so far, which it has saved if that comes first."""
    found = worlds.run(2, drained_between_two_places, str(tmp_path), best_first)
    assert found == [(ExitCode.LEFT, [3 if best_first else 1, 3])] * 2


def drained_without_a_loader(root: str) -> tuple[Any, list[int]]:
    """A run that tells its client state saves the best so far in the step that it leaves after."""
    places, code = [f"{root}/best", f"{root}/newest"], None
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with under_agent(root, leave_after=2):
        run = zero_torch.protect(model, optimizer)
        run.keep_client_state(lambda: {"position": run.global_step})
        run.load(places[1])
        try:
            for step in range(1, 9):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                if step == 3:
                    wait_for(lambda: run._link.leave_asked, 60, "the agent's message")
                if step in (1, 3):
                    run.save(places[0])
        except SystemExit as ending:
            code = ending.code
        finally:
            run._link.close()
    return code, [find(Path(place)).candidates[0].manifest.step for place in places]


def test_without_a_loader_the_best_is_saved_before_its_worker_leaves(
    worlds: WorldPool, tmp_path: Path
) -> None:
    assert worlds.run(2, drained_without_a_loader, str(tmp_path)) == [(ExitCode.LEFT, [3, 3])] * 2
