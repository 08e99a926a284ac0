"""Workers stay in their processes when the ranks of the job change at a step boundary.

The launcher's end of the contract is the product's own; what it decides is decided here.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.inside import persistence_of
from tests.support.lane_data import Rows, StatefulRows
from tests.support.loops import ahead
from tests.support.models import Tokens
from tests.support.staying import Job
from tests.support.training import (
    DATASET_SIZE,
    DIVIDED,
    config,
    fingerprint,
    make_engine,
    run_micro_step,
    train,
)
from tests.support.waiting import wait_for
from tests.support.world import forkserver
from zero_checkpoint import find
from zero_checkpoint.format.manifest import MANIFEST
from zero_contract import worker as contract
from zero_contract.worker import ExitCode
from zero_engine.core.engine import Engine
from zero_step import staying

STEPS = 9
"""In three epochs of three steps."""


def made(settings: dict[str, Any]) -> Engine:
    """The engine of a script, whose data may be a "stream"."""
    settings = dict(settings)
    settings.pop("follows", None)
    if (stream := settings.pop("stream", None)) is None:
        return make_engine(settings)
    samples = [Tokens(DATASET_SIZE)[index] for index in range(DATASET_SIZE)]
    return make_engine(settings, training_data=stream(samples))


def follow(engine: Engine, settings: dict[str, Any]) -> None:
    """What a script may do behind each step: to the rate of the next one, and to its weights."""
    if "follows" in settings:
        for group in engine.optimizer.param_groups:  # type: ignore[union-attr]
            group["lr"] *= 0.9
        if engine.zero_optimization_stage() < 3:
            with torch.no_grad():
                for each in engine.module.parameters():
                    each.mul_(0.99)


def trained(directory: str, settings: dict[str, Any]) -> Any:
    """What a script does: make, load, train; the losses that this process has seen."""
    engine = made(settings)
    engine.load_checkpoint(directory)
    losses = train(engine, STEPS, lambda: follow(engine, settings))
    return fingerprint(engine), losses, engine.world_size, dist.get_world_size()


def trained_and_saved(directory: str, settings: dict[str, Any]) -> Any:
    """The same by a script that saves after each step, and once more at its end."""
    engine = make_engine(settings)
    engine.load_checkpoint(directory)
    losses = []
    while engine.global_steps < STEPS:
        losses += train(engine, engine.global_steps + 1)
        assert engine.save_checkpoint(directory)
    assert engine.save_checkpoint(directory)
    return fingerprint(engine), losses, engine.world_size, dist.get_world_size()


def undisturbed(settings: dict[str, Any]) -> Any:
    engine = made(settings)
    losses = train(engine, STEPS, lambda: follow(engine, settings))
    return fingerprint(engine), losses


SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": config(0),
    "stage 1, bf16": config(1, bf16=True),
    "stage 2, fp16": {**config(2), "fp16": {"enabled": True}},
    "stage 3": config(3),
    "stage 3, offloaded": {
        **config(3),
        "zero_optimization": {
            **DIVIDED,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    },
    "stage 2, schedule": {
        **config(2),
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
    },
    "stage 3, a stream": {**config(3), "stream": Rows},
    "stage 1, a stream with a state": {**config(1), "stream": StatefulRows},
    "stage 2, follows": {**config(2), "follows": True},
    "stage 3, follows": {**config(3), "follows": True},
    "stage 1, Muon": {**config(1), "optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
}


def put(results: Any, script: Callable[..., Any], *given: Any) -> None:
    torch.set_num_threads(1)
    results.put((os.getpid(), script(*given)))


def begin_undisturbed(settings: dict[str, Any]) -> Any:
    """Train in a process of its own, beside the job; returns the queue of its result."""
    context = forkserver()
    results = context.Queue()
    given = (results, undisturbed, settings)
    context.Process(target=put, args=given, daemon=True).start()
    return results


def test_a_worker_that_is_joined_goes_on_in_its_process_with_the_same_bits(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    settings = {**config(3), "elastic": {"in_place": True}}
    alone = begin_undisturbed(settings)
    one = job(trained, str(tmp_path / "checkpoints"), settings)
    one.begin([], joining=1)
    (first,) = (process.pid for process in one.members)
    step = one.leave_at(1)
    one.begin([0], joining=1)
    ended = dict(one.end())
    _, (expected, losses) = alone.get(timeout=60)
    assert ended.pop(first) == (expected, losses, 2, 2)
    assert list(ended.values()) == [(expected, losses[step:], 2, 2)]


def by_epochs(directory: str, settings: dict[str, Any], dies_in: int = 0) -> Any:
    """What a script does that counts epochs; its rank 1 dies at the end of a step, once."""
    engine = make_engine(settings)
    engine.load_checkpoint(directory)
    loader: Any = engine.training_dataloader
    dies = os.environ.get(contract.ENV_ROUND) == "1" and dist.get_rank() == 1
    for _ in range(loader.epoch, STEPS // 3):
        for batch in loader:
            engine.backward(engine(batch))
            at_end = engine.is_gradient_accumulation_boundary()
            if dies and at_end and engine.global_steps == dies_in - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.step()
            wait_until_kept(engine)
    return fingerprint(engine)


def wait_until_kept(training: Any) -> None:
    if (ram := persistence_of(training).ram) is not None:
        wait_for(lambda: not ram.busy, 60, "the step is kept in memory")


ENDS_OF_EPOCHS = [(6, 1), (9, 5)]
"""The step in which a rank dies, and the steps between two checkpoints in memory."""


@pytest.mark.parametrize(("dies_in", "every"), ENDS_OF_EPOCHS)
@pytest.mark.corners(dies_in=[6])
def test_who_loses_a_peer_at_the_end_of_an_epoch_trains_what_is_left_of_it(
    job: Callable[..., Job], tmp_path: Path, dies_in: int, every: int
) -> None:
    """Also if the checkpoint in memory is of an epoch before."""
    settings = {**config(2), "elastic": {"in_place": True}}
    alone = begin_undisturbed(settings)
    kept = {**settings, "checkpoint": {"ram": {"every_steps": every}}}
    one = job(by_epochs, str(tmp_path / "checkpoints"), kept, dies_in)
    one.memory = tmp_path / "memory"
    one.memory.mkdir()
    one.begin([], joining=2)
    first = one.members[0].pid
    one.wait_for_loss(1)
    one.begin([0], joining=1)
    ended = dict(one.end())
    _, (expected, _) = alone.get(timeout=60)
    assert first in ended
    assert [*ended.values()] == [expected] * 2


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.corners(step=[2])
def test_who_stays_at_the_end_of_an_epoch_begins_the_next_one_once(
    job: Callable[..., Job], tmp_path: Path, step: int
) -> None:
    """It leaves one step later."""
    settings = {**config(2), "elastic": {"in_place": True}}
    alone = begin_undisturbed(settings)
    one = job(by_epochs, str(tmp_path / "checkpoints"), settings)
    one.begin([], joining=1)
    one.leave_at(step)
    one.begin([0], joining=1)
    ended = dict(one.end())
    _, (expected, _) = alone.get(timeout=60)
    assert [*ended.values()] == [expected] * 2


def test_a_newcomer_that_has_warmed_up_joins_in_its_process_with_the_same_bits(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    settings = {**config(2), "elastic": {"in_place": True}}
    alone = begin_undisturbed(settings)
    one = job(trained, str(tmp_path / "checkpoints"), settings)
    one.begin([], joining=1)
    step = one.leave_at(1)
    one.warm_up(1)
    pids = [process.pid for process in one.members]
    one.begin([0, 1])
    ended = dict(one.end())
    _, (expected, losses) = alone.get(timeout=60)
    assert [ended[pid] for pid in pids] == [
        (expected, losses, 2, 2),
        (expected, losses[step:], 2, 2),
    ]


def saved_in_two_places(directory: str, settings: dict[str, Any]) -> Any:
    """Such as the best so far, and the newest."""
    engine = make_engine(settings)
    engine.load_checkpoint(directory)
    saved = []
    while engine.global_steps < STEPS:
        train(engine, engine.global_steps + 1)
        saved.append(engine.save_checkpoint(f"{directory}-best"))
        assert engine.save_checkpoint(directory)
    return fingerprint(engine)[0], saved


def test_a_script_that_saves_in_two_places_is_joined_at_a_step_of_one(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    settings = {**config(2), "elastic": {"in_place": True}}
    alone = begin_undisturbed(settings)
    one = job(saved_in_two_places, str(tmp_path / "checkpoints"), settings)
    one.begin([], joining=1)
    step = one.leave_at(2)
    first = one.members[0].pid
    one.begin([0], joining=1)
    ended = dict(one.end())
    _, (expected, _) = alone.get(timeout=60)
    assert ended.pop(first) == (expected[0], [True] * STEPS)
    assert list(ended.values()) == [(expected[0], [True] * (STEPS - step))]


@pytest.mark.corners(after=[1])
@pytest.mark.parametrize("after", [1, STEPS - 1])
def test_a_script_that_saves_after_each_step_is_joined_by_one_that_saves_less(
    job: Callable[..., Job], tmp_path: Path, after: int
) -> None:
    """Who stays comes out of the end of a step, and saves where a newcomer never comes."""
    settings = {**config(2), "elastic": {"in_place": True}}
    alone = begin_undisturbed(settings)
    one = job(trained_and_saved, str(tmp_path / "checkpoints"), settings)
    one.begin([], joining=1)
    step = one.leave_at(after)
    first = one.members[0].pid
    one.begin([0], joining=1)
    ended = dict(one.end())
    _, (expected, losses) = alone.get(timeout=60)
    assert ended.pop(first) == (expected, losses, 2, 2)
    ((weights, others, *worlds),) = ended.values()
    assert (weights[0], others, worlds) == (expected[0], losses[step:], [2, 2])


@pytest.mark.full
def test_who_stays_goes_on_from_the_checkpoint_before_a_damaged_one(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    settings = {**config(2), "elastic": {"in_place": True}}
    alone = begin_undisturbed(settings)
    checkpoints = tmp_path / "checkpoints"
    one = job(trained_and_saved, str(checkpoints), settings)
    one.begin([], joining=1)
    one.leave_at(3)
    (find(checkpoints).candidates[0].path / MANIFEST).write_text("damaged")
    first = one.members[0].pid
    one.begin([0], joining=1)
    ended = dict(one.end())
    _, (expected, _) = alone.get(timeout=60)
    assert first in ended
    assert [weights[0] for weights, *_ in ended.values()] == [expected[0]] * 2


def test_who_stays_and_finds_no_checkpoint_any_more_is_started_anew(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """Its weights would be undefined."""
    one = that_waits(job, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    one.begin([0])
    (process,) = one.members
    process.join(60)
    assert process.exitcode == ExitCode.LEFT


def exported(directory: str, other: str, settings: dict[str, Any]) -> Any:
    engine = make_engine(settings)
    engine.load_checkpoint(directory)
    assert engine.save_checkpoint(directory)
    assert engine.save_checkpoint(other)
    engine.destroy()
    return [len(find(Path(each)).candidates) for each in (directory, other)]


def test_a_script_that_saves_what_it_has_loaded_writes_it_elsewhere_alone(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    settings = {**config(2), "elastic": {"in_place": True}}
    one = job(exported, str(tmp_path / "a"), str(tmp_path / "b"), settings)
    found = []
    for _ in range(2):
        one.begin([], joining=1)
        ((_, checkpoints),) = one.end()
        found.append(checkpoints)
    assert found == [[1, 1], [1, 2]]


def test_a_newcomer_that_has_warmed_up_for_no_round_ends_without_an_error(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    one = that_waits(job, tmp_path)
    one.warm_up(1)
    one.let_go()
    one.members[1].join(60)
    assert one.members[1].exitcode == 0


@pytest.mark.corners(name=["stage 2, follows"])
@pytest.mark.parametrize("name", SETTINGS)
def test_survivors_of_joins_and_drains_go_on_in_their_processes_with_the_same_bits(
    job: Callable[..., Job], tmp_path: Path, name: str
) -> None:
    settings = {**SETTINGS[name], "elastic": {"in_place": True}}
    alone = begin_undisturbed(settings)
    one = job(trained, str(tmp_path / "checkpoints"), settings)
    one.begin([], joining=2)
    first = {process.pid for process in one.members}
    steps = [one.leave_at(1)]
    one.begin([0, 1], joining=1)
    steps.append(one.leave_at(4))
    one.begin([2, 0])  # the second leaves; the newcomer has rank 0
    ended = one.end()
    assert STEPS > steps[1] > steps[0]
    assert len(first & {pid for pid, _ in ended}) == 1
    _, (expected, losses) = alone.get(timeout=60)
    for pid, (found, seen, *worlds) in ended:
        assert found == expected
        assert seen == (losses if pid in first else losses[steps[0] :])
        assert worlds == [2, 2]


def refused(why: str, directory: str) -> None:
    """A script whose first steps a newcomer could not share with who stays, or another's state."""
    engine = make_engine({**config(3), "elastic": {"in_place": True}})
    if why == "exchanges before its load":
        dist.barrier()
    if why != "loads nothing":
        engine.load_checkpoint(directory)
    if why == "loads twice":
        engine.load_checkpoint(directory)
    if why == "exchanges before its first step":
        engine.weight_hash()  # at one rank nothing travels
    if why == "has a group of its own":
        run_micro_step(engine, step=True)
        dist.new_group([0])
    if why == "exchanges between two steps":
        train(engine, 1)
        engine.weight_hash()
    if why == "saves before its first step":
        engine.save_checkpoint(directory)
    if why == "saves a part":
        engine.save_checkpoint(directory, exclude_frozen_parameters=True)
    loader: Any = engine.training_dataloader
    for batch in DRAWS.get(why, lambda _: [])(loader):
        engine.backward(engine(batch))
        engine.step()
    train(engine, STEPS)


def in_thread(loader: Any) -> Iterator[Any]:
    """Each batch, drawn by a thread, as prefetchers do."""
    with ThreadPoolExecutor(1) as thread:
        iteration = iter(loader)
        yield from iter(lambda: thread.submit(next, iteration, None).result(), None)


DRAWS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "draws ahead": lambda loader: ahead(loader, 1),
    "draws in a thread": in_thread,
}


@pytest.mark.corners(
    why=["exchanges before its first step", "exchanges between two steps", "draws ahead"]
)
@pytest.mark.parametrize(
    "why",
    [
        "exchanges before its load",
        "exchanges before its first step",
        "exchanges between two steps",
        "loads nothing",
        "loads twice",
        "has a group of its own",
        "saves before its first step",
        "saves a part",
        *DRAWS,
    ],
)
def test_a_script_that_a_newcomer_would_wait_for_in_vain_is_started_anew(
    job: Callable[..., Job], tmp_path: Path, why: str
) -> None:
    one = job(refused, why, str(tmp_path / "checkpoints"))
    one.begin([], joining=1)
    one.leave_at(2, stay=False)
    (process,) = one.members
    process.join(60)
    assert process.exitcode == ExitCode.LEFT
    # Its agent knows before that, but for a group that is made within a step.
    before = () if why != "has a group of its own" else (contract.Ability.REJOIN,)
    assert one.can == {0: (contract.Ability.BOUNDARY, *before)}


def that_waits(
    job: Callable[..., Job], tmp_path: Path, script: Callable[..., Any] = trained
) -> Job:
    """A job of one worker, which waits in its process for the next round."""
    settings = {**config(2), "elastic": {"in_place": True}}
    one = job(script, str(tmp_path / "checkpoints"), settings)
    one.begin([], joining=1)
    one.leave_at(1)
    return one


def test_a_worker_whose_agent_has_no_round_for_it_exits_as_one_that_has_left(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    one = that_waits(job, tmp_path)
    one.let_go()
    (process,) = one.members
    process.join(60)
    assert process.exitcode == ExitCode.LEFT


def impatient(directory: str, settings: dict[str, Any]) -> None:
    staying.MEETS_WITHIN_S = 1.0
    trained(directory, settings)


def test_a_worker_waits_for_a_newcomer_that_never_comes_no_longer_than_it_may(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    one = that_waits(job, tmp_path, impatient)
    one.begin([0], absent=1)
    (process,) = one.members
    process.join(60)
    assert process.exitcode == ExitCode.PEER_LOST


@pytest.mark.full
def test_a_worker_whose_next_group_never_meets_is_ended_by_its_agent(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    one = that_waits(job, tmp_path)
    one.begin([0], absent=1)
    one.wait_for_meeting()
    (process,) = one.members
    process.terminate()
    process.join(60)
    assert process.exitcode == -signal.SIGTERM


CHANGES = 200
SETTLED = 20
"""Of those: what there is of anything once has been made."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a process holds."""

    own: tuple[int, int, int]
    """Descriptors, threads and mappings of shared memory."""
    shared_files: int
    """Of all processes of the job, of which another one may be about to write its next ones."""
    shared_bytes: int
    """Of all processes of the job."""
    resident_bytes: int

    @classmethod
    def now(cls, shared: Path) -> Held:
        """What this process holds, where shared memory is files below `shared`."""
        files = []
        for directory, _, names in os.walk(shared):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # another process may remove its own
                    files.append((Path(directory) / name).stat().st_size)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        maps = Path("/proc/self/maps").read_text().splitlines()
        return cls(
            own=(
                len(os.listdir("/proc/self/fd")),
                len(os.listdir("/proc/self/task")),
                sum(str(shared) in line or "/dev/shm" in line for line in maps),
            ),
            shared_files=len(files),
            shared_bytes=sum(files),
            resident_bytes=pages * resource.getpagesize(),
        )


def holds(directory: str, shared: Path, settings: dict[str, Any]) -> Any:
    """What this process holds after the last step of each round, but for that in which it ends."""
    engine = make_engine(settings)
    engine.load_checkpoint(directory)
    seen: dict[int, Held] = {}
    while len(seen) <= CHANGES + 1:
        for batch in engine.training_dataloader:
            engine.backward(engine(batch))
            engine.step()
            wait_until_kept(engine)
            seen[int(os.environ[contract.ENV_ROUND])] = Held.now(shared)
            if len(seen) > CHANGES + 1:
                break
    return seen


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("in_memory", [False, True])
def test_two_hundred_changes_in_one_process_leave_nothing_behind(
    job: Callable[..., Job], tmp_path: Path, in_memory: bool
) -> None:
    """No descriptor, thread, memory or shared memory, with and without checkpoints in memory."""
    checkpoint = {"keep_last": 2, **({"ram": {}} if in_memory else {})}
    settings = {**config(3), "elastic": {"in_place": True}, "checkpoint": checkpoint}
    shared = tmp_path / "memory"
    shared.mkdir()
    one = job(holds, str(tmp_path / "checkpoints"), shared, settings)
    one.memory = shared if in_memory else None
    one.begin([], joining=2)
    step = 0
    for _ in range(CHANGES + 1):
        step = one.leave_at(step + 2)  # the step of which it leaves is kept on disk alone
        one.begin([0, 1])
    for _, seen in one.end():
        settled, last = seen[SETTLED], seen[CHANGES + 1]
        assert bool(settled.shared_bytes) is in_memory
        assert last.own == settled.own
        assert last.shared_files <= 2 * settled.shared_files
        assert last.shared_bytes <= 2 * settled.shared_bytes
        assert last.resident_bytes - settled.resident_bytes < 16 << 20
