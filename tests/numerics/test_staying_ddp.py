"""A protected run of DDP goes on in its process when the ranks of the job change."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zero_torch
from tests.numerics.test_staying import ENDS_OF_EPOCHS, wait_until_kept
from tests.support.inside import await_memory
from tests.support.lane_data import Rows, StatefulRows
from tests.support.loops import ahead
from tests.support.staying import Job
from tests.support.stock import GPT, LENGTH, VOCABULARY, make, wrap
from tests.support.world import forkserver
from zero_contract import worker as contract
from zero_contract.worker import ExitCode
from zero_torch.ordered_gradients import OrderedGradients

SAMPLES, MICROBATCHES, EPOCHS = 30, 5, 3
"""Three steps in each."""


class Normed(nn.Module):
    """A model with buffers that its forwards write."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = GPT(), nn.BatchNorm1d(LENGTH)

    @property
    def blocks(self) -> Any:
        return self.inner.blocks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(tokens) + self.norm(tokens.float()).sigmoid().mean()
        return loss


def protected(options: dict[str, Any], **config: Any) -> tuple[Any, Any, Any]:
    """The model, the optimizer and the run of a script; options are those of DDP, and `OF_RUN`."""
    dist.init_process_group("gloo")
    ddp = {key: value for key, value in options.items() if key not in OF_RUN}
    if "buffers" in options:
        torch.manual_seed(0)
        model = wrap(Normed(), "ddp", **ddp)
    else:
        model = make("ddp", **ddp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    more: dict[str, Any] = {}
    if "schedule" in options:
        more["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    if "scaler" in options:
        more["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    elastic = {"accumulate": options.get("accumulate", "owner")}
    stream = options.get("stream")
    return model, optimizer, protect(model, optimizer, elastic, more, stream, **config)


OF_RUN = ("buffers", "schedule", "scaler", "accumulate", "stream", "rate", "shrinks")


def protect(
    model: Any,
    optimizer: Any,
    elastic: dict[str, Any],
    more: dict[str, Any],
    stream: type[Rows] | None = None,
    **config: Any,
) -> Any:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    data = TensorDataset(tokens) if stream is None else stream([*TensorDataset(tokens)])
    loader: Any = DataLoader(data, batch_size=2, shuffle=True if stream is None else None)
    chosen = {"elastic": {"in_place": True, **elastic}, **config}
    given: dict[str, Any] = {"microbatches": MICROBATCHES, "config": chosen, **more}
    return zero_torch.protect(model, optimizer, loader, **given)


def by_run(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
    run.backward(model(batch))
    run.step(max_norm=1.0)


def by_script(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
    """As a loop of stock PyTorch; a step ends when the next batch is drawn, or a save is due."""
    run.backward(model(batch))
    run.clip_grad_norm_(1.0)
    optimizer.step()


def plainly(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
    model(batch).backward()
    optimizer.step()


def follow(model: Any, optimizer: Any, options: dict[str, Any], steps: int) -> None:
    """What a script does behind a step: to its weights, and to the rate of the next one."""
    if steps > 0 and "shrinks" in options:
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(0.99)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


def trained(directory: str, turn: Any, options: dict[str, Any]) -> Any:
    """What a script does: its weights, its samples, its world."""
    model, optimizer, run = protected(options)
    run.load(directory)
    for _ in range(run.loader.epoch, EPOCHS):
        for (batch,) in run.loader:
            before = run.global_step
            turn(model, optimizer, run, batch)
            follow(model, optimizer, options, run.global_step - before)
            run.save_if_due(directory, every_steps=100)
        for group in optimizer.param_groups:
            group["lr"] *= options.get("rate", 1)
    result = run.weight_hash(), run.samples, of_rounds_before(), dist.get_world_size()
    run.close()
    return result


def of_rounds_before() -> int:
    """What this process keeps of rounds that are over."""
    gc.collect()
    return sum(isinstance(each, OrderedGradients) for each in gc.get_objects()) - 1


def refused(log: Path, directory: str, why: str) -> None:
    """A script that cannot stay, and says why."""
    logging.basicConfig(filename=log, level=logging.INFO)
    options: dict[str, Any] = {"init_sync": False} if "has not met" in why else {}
    if "compile" in why:  # it divides its graph by buckets, and refuses tiny ones
        options = {"bucket_cap_mb": 25}
    if "unfrozen" in why:
        options = {"find_unused_parameters": True}
    dist.init_process_group("gloo")
    wrapper = "fsdp2" if "FSDP2" in why else "ddp"
    model = make(wrapper, **options)
    if "compile" in why:
        model = torch.compile(model, backend="eager")
    if "of its own" in why:
        dist.barrier()
    run = protect(model, torch.optim.SGD(model.parameters(), lr=0.1), {}, {})
    run.load(directory)
    while True:
        for (batch,) in ahead(run.loader, 1) if "ahead" in why else run.loader:
            run.backward(model(batch))
            ended = run.step()
            run.save_if_due(directory, every_steps=100)
            if "unfrozen" in why and ended:
                model.module.embed.weight.requires_grad_(False)


@pytest.mark.corners(why=["the loop draws batches ahead"])
@pytest.mark.parametrize(
    "why",
    [
        "FSDP2 decides the sizes of its shards",
        "the script exchanges something of its own before protect()",
        "DistributedDataParallel has not met when it was made",
        "torch.compile has DistributedDataParallel in its graph",
        "the loop draws batches ahead",
        "layers were frozen or unfrozen",
    ],
)
def test_a_run_that_a_newcomer_could_not_meet_is_started_anew_and_says_why(
    job: Callable[..., Job], tmp_path: Path, why: str
) -> None:
    log = tmp_path / "log"
    one = job(refused, log, str(tmp_path / "checkpoints"), why)
    one.begin([], joining=1)
    one.leave_at(2, stay=False)
    (process,) = one.members
    process.join(60)
    assert process.exitcode == ExitCode.LEFT
    assert "this process is started anew: " in log.read_text()
    assert why in log.read_text()


def put(results: Any, script: Callable[..., Any], *given: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    results.put(script(*given))


def alone(script: Callable[..., Any], *given: Any) -> Any:
    """The result in a process of its own that nothing disturbs."""
    context = forkserver()
    results = context.Queue()
    context.Process(target=put, args=(results, script, *given), daemon=True).start()
    return results.get(timeout=60)


OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "activations computed again": {"reentrant": False},
    "buffers": {"buffers": True},
    "schedule and scaler": {"schedule": True, "scaler": True},
    "shrinks": {"shrinks": True},
    "accumulate": {"accumulate": "local"},
    "a stream": {"stream": Rows},
    "a stream with a state": {"stream": StatefulRows},
}
OF_SCRIPT = [name for name, options in OPTIONS.items() if not {"schedule"} & options.keys()]
"""Those of which a script steps nothing but the optimizer."""


@pytest.mark.corners(name=["shrinks"], turn=[by_run])
@pytest.mark.parametrize(
    ("name", "turn"),
    [*itertools.product(OPTIONS, [by_run]), *itertools.product(OF_SCRIPT, [by_script])],
)
def test_survivors_of_joins_and_drains_go_on_in_their_processes_with_the_same_bits(
    job: Callable[..., Job], tmp_path: Path, name: str, turn: Any
) -> None:
    one = job(trained, str(tmp_path / "checkpoints"), turn, OPTIONS[name])
    one.begin([], joining=2)
    first = {process.pid for process in one.members}
    one.leave_at(1)
    one.begin([0, 1], joining=1)
    one.leave_at(4)
    one.begin([2, 0], joining=1)  # the second leaves; the newcomer of before has rank 0
    ended = one.end()
    assert len(first & {pid for pid, _ in ended}) == 1
    *same, _ = alone(trained, str(tmp_path / "alone"), turn, OPTIONS[name])
    assert [result for _, result in ended] == [(*same, 3)] * 3


@pytest.mark.full
@pytest.mark.parametrize("step", [2, 3])
def test_who_stays_at_the_end_of_an_epoch_begins_the_next_one_once(
    job: Callable[..., Job], tmp_path: Path, step: int
) -> None:
    """It leaves one step later; a newcomer does what the script does behind that epoch, too."""
    halves = {"rate": 0.5}
    one = job(trained, str(tmp_path / "checkpoints"), by_run, halves)
    one.begin([], joining=1)
    one.leave_at(step)
    one.begin([0], joining=1)
    *same, _ = alone(trained, str(tmp_path / "alone"), by_run, halves)
    assert [result for _, result in one.end()] == [(*same, 2)] * 2


def dies_between_epochs(directory: str) -> None:
    model, optimizer, run = protected({"stream": Rows})
    run.load(directory)
    for epoch in range(EPOCHS):
        if epoch and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for (batch,) in run.loader:
            by_run(model, optimizer, run, batch)


def test_who_loses_a_peer_at_the_begin_of_an_iteration_of_a_stream_says_so(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """It is no error of the script."""
    one = job(dies_between_epochs, str(tmp_path / "checkpoints"))
    one.begin([], joining=2)
    one.run_on()
    for process in one.members:
        process.join(60)
    assert [process.exitcode for process in one.members] == [ExitCode.PEER_LOST, -signal.SIGKILL]


def test_a_newcomer_that_has_warmed_up_joins_in_its_process_with_the_same_bits(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """It waits where its script makes the process group, with whatever rank it had before."""
    one = job(trained, str(tmp_path / "checkpoints"), by_run, {})
    one.begin([], joining=1)
    one.leave_at(1)
    one.warm_up(1)
    pids = {process.pid for process in one.members}
    one.begin([1, 0])
    ended = one.end()
    assert {pid for pid, _ in ended} == pids
    *same, _ = alone(trained, str(tmp_path / "alone"), by_run, {})
    assert [result for _, result in ended] == [(*same, 2)] * 2


MOMENTS = ["a forward", "a backward", "the end of a step", "a step that has just ended"]


def killed(directory: str, turn: Any, options: dict[str, Any], moment: str, victim: int) -> Any:
    """A script one of whose ranks dies in step 5, once."""
    model, optimizer, run = protected(options, checkpoint={"ram": {}})
    run.load(directory)
    dies = os.environ.get(contract.ENV_ROUND) == "1" and dist.get_rank() == victim

    def reach(now: str) -> None:
        # Not the first step of an epoch: who loses a peer there is started anew.
        done = 5 if now == "a step that has just ended" else 4
        if now == moment and dies and run.global_step == done:
            os.kill(os.getpid(), signal.SIGKILL)

    middle = model.module.blocks[-1]
    middle.register_forward_pre_hook(lambda *_: reach("a forward"))
    middle.register_full_backward_hook(lambda *_: reach("a backward"))
    acts = optimizer.step

    def act() -> None:
        reach("the end of a step")
        acts()

    optimizer.step = act
    steps = set()
    for _ in range(run.loader.epoch, EPOCHS):
        for (batch,) in run.loader:
            await_memory(run)  # else nothing of this epoch may be in it
            before = run.global_step
            turn(model, optimizer, run, batch)
            follow(model, optimizer, options, run.global_step - before)
            run.save_if_due(directory, every_steps=100)
            steps |= {run.global_step} if run.global_step > before else set()
            reach("a step that has just ended")
    assert dist.get_rank() == int(os.environ["RANK"])
    result = run.weight_hash(), run.samples
    run.close()
    return result, len(steps)


@pytest.mark.corners(name=["ddp"], moment=["a backward"], victim=[1], turn=[by_run])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("name", "turn"),
    [
        *itertools.product(["ddp", "static graph"], [by_run, by_script, plainly]),
        *itertools.product(["unused"], [by_run, by_script]),
        *itertools.product(
            ["buffers", "schedule and scaler", "shrinks", "accumulate", "a stream with a state"],
            [by_run],
        ),
    ],
)
def test_survivors_of_a_kill_go_on_in_their_processes_with_the_same_bits(
    job: Callable[..., Job], tmp_path: Path, name: str, turn: Any, moment: str, victim: int
) -> None:
    given = turn, OPTIONS[name], moment
    one = job(killed, str(tmp_path / "checkpoints"), *given, victim)
    one.memory = tmp_path / "memory"
    one.memory.mkdir()
    one.begin([], joining=3)
    first = {process.pid for process in one.members}
    one.wait_for_loss(victim)
    one.begin([rank for rank in range(3) if rank != victim], joining=1)
    ended = dict(one.end())
    assert len(first & ended.keys()) == 2
    same, _ = alone(killed, str(tmp_path / "alone"), *given, -1)
    assert [result for result, _ in ended.values()] == [same] * 3
    assert all((seen == 3 * EPOCHS) is (pid in first) for pid, (_, seen) in ended.items())


def kept_in_memory_alone(directory: str, every: int, dies_in: int) -> Any:
    """A script that asks for no save, whose rank 1 dies at the end of a step, once."""
    model, _, run = protected({}, checkpoint={"ram": {"every_steps": every}})
    run.load(directory)
    dies = os.environ.get(contract.ENV_ROUND) == "1" and dist.get_rank() == 1
    for _ in range(run.loader.epoch, EPOCHS):
        for (batch,) in run.loader:
            wait_until_kept(run)
            run.backward(model(batch))
            if dies and run.last and run.global_step == dies_in - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            run.step()
    return run.weight_hash(), run.samples


@pytest.mark.full
@pytest.mark.parametrize(("dies_in", "every"), ENDS_OF_EPOCHS)
def test_who_loses_a_peer_at_the_end_of_an_epoch_trains_what_is_left_of_it(
    job: Callable[..., Job], tmp_path: Path, dies_in: int, every: int
) -> None:
    """Also if the checkpoint in memory is of an epoch before."""
    one = job(kept_in_memory_alone, str(tmp_path / "checkpoints"), every, dies_in)
    one.memory = tmp_path / "memory"
    one.memory.mkdir()
    one.begin([], joining=2)
    first = one.members[0].pid
    one.wait_for_loss(1)
    one.begin([0], joining=1)
    ended = dict(one.end())
    assert first in ended
    expected = alone(kept_in_memory_alone, str(tmp_path / "alone"), every, 0)
    assert [*ended.values()] == [expected] * 2
