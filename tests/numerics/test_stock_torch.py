"""Stock PyTorch under zero_torch: the same bits at every world size, under DDP and FSDP2."""

from __future__ import annotations

import copy
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import zero_torch
from tests.support.saving import heard
from tests.support.stock import LENGTH, VOCABULARY, make
from tests.support.world import WorldPool
from zero_checkpoint import weight_hash
from zero_contract.errors import ZeroError
from zero_torch.wrapped import local, recognize

SAMPLES, MICROBATCHES, STEPS, STEPS_OF_EPOCH = 29, 5, 4, 3
"""Steps of 10, 10 and 9 samples, in micro-batches of 2, the last one of 1."""


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator))


def protected(
    wrapper: str,
    *,
    config: Any = None,
    schedule: bool = False,
    average: type[Average] | None = None,
    **options: Any,
) -> tuple[Any, Any, zero_torch.Run]:
    model = make(wrapper, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    loader = DataLoader(dataset(), batch_size=2, shuffle=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if schedule else None
    run = zero_torch.protect(
        model,
        optimizer,
        loader,
        microbatches=MICROBATCHES,
        scheduler=scheduler,
        stateful={"average": average(model)} if average is not None else None,
        config=config,
    )
    return model, optimizer, run


def batches(run: zero_torch.Run, steps: int = STEPS) -> Any:
    while run.global_step < steps:
        for (tokens,) in run.loader:
            yield tokens
            if run.global_step == steps:
                return


def trained(wrapper: str, max_norm: float | None = None, **options: Any) -> Any:
    model, _, run = protected(wrapper, **options)
    for tokens in batches(run):
        run.backward(model(tokens))
        run.step(max_norm)
    return run.weight_hash(), run.grad_norm, run.samples


def trained_with(wrapper: str, options: dict[str, Any]) -> str:
    weights: str = trained(wrapper, **options)[0]
    return weights


@pytest.mark.parametrize(
    ("wrapper", "options"),
    [
        ("ddp", {"static_graph": True}),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("ddp", {"gradient_as_bucket_view": True}),
                ("ddp", {"gradient_as_bucket_view": True, "bucket_cap_mb": 25}),
                ("ddp", {"find_unused_parameters": True}),
                ("ddp", {"reentrant": True}),
                ("ddp", {"reentrant": False}),
                ("fsdp2", {"reshard_after_forward": False}),
                ("fsdp2", {"reentrant": True}),
                ("fsdp2", {"reentrant": False}),
            ]
        ),
    ],
)
def test_the_options_of_a_wrapper_change_no_bit(
    worlds: WorldPool, wrapper: str, options: dict[str, Any]
) -> None:
    (expected, *_) = worlds.run(1, trained, "plain")
    found = worlds.run(5, trained_with, wrapper, options)  # a step is one micro-step
    found += worlds.run(2, trained_with, wrapper, options)
    assert found == [expected[0]] * 7


def train_by_hand(keeps_graph: bool) -> str:
    model, optimizer, run = protected("plain")
    for tokens in batches(run):
        model(tokens).backward(create_graph=keeps_graph)
        optimizer.step()
    return run.weight_hash()


def trained_in_one_element() -> str:
    model, _, run = protected("plain")
    for tokens in batches(run):
        run.backward(model(tokens).view(1))
        run.step()
    assert 0 < run.loss < 10
    return run.weight_hash()


def test_a_loss_may_have_one_element_in_any_shape(worlds: WorldPool) -> None:
    (expected, *_) = worlds.run(1, trained, "plain")
    assert worlds.run(1, trained_in_one_element) == [expected[0]]


def test_a_backward_that_keeps_its_graph_changes_no_bit(worlds: WorldPool) -> None:
    assert worlds.run(1, train_by_hand, True) == worlds.run(1, train_by_hand, False)


def copied(wrapper: str, as_file: bool) -> tuple[str, ...]:
    """The weights of a run whose model is copied, and the sums of two copies: one trains."""
    model, _, run = protected(wrapper)
    copies: list[Any] = []
    for tokens in batches(run):
        run.backward(model(tokens))
        if run.step() and not copies:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
            other = torch.optim.SGD(copies[as_file].parameters(), lr=0.1)
        if copies:
            copies[as_file](tokens).backward()
            other.step()
            other.zero_grad()
    sums = [sum(p.double().abs().sum().item() for p in each.parameters()) for each in copies]
    return run.weight_hash(), *map(str, sums)


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("wrapper", ["plain", "ddp"])
def test_a_copy_of_a_model_trains_by_itself_and_changes_nothing(
    worlds: WorldPool, wrapper: str, as_file: bool
) -> None:
    (expected, *_) = worlds.run(1, trained, "plain")
    for world in (1, 2) if wrapper == "ddp" else (1,):
        found = worlds.run(world, copied, wrapper, as_file)
        assert {weights for weights, *_ in found} == {expected[0]}
        assert all(len(set(each)) == 3 for each in found)  # the trained one is another


def losses_where_one_is_not_seen(wrapper: str) -> list[str]:
    """`run.loss` before a step, and after two: in the first one backward is the script's own."""
    model, _, run = protected(wrapper)
    losses = [str(run.loss)]
    for number, tokens in enumerate(batches(run, 2)):
        loss = model(tokens)
        loss.backward() if number == 0 else run.backward(loss)
        if run.step():
            losses.append(str(run.loss))
    return losses


def test_the_loss_of_a_step_is_nan_unless_every_backward_has_told_it(worlds: WorldPool) -> None:
    (before, first, second), *others = worlds.run(2, losses_where_one_is_not_seen, "ddp")
    assert others == [[before, first, second]]
    assert (before, first) == ("nan", "nan")
    assert 0 < float(second) < 10


def told_at_the_end(takes_last: bool) -> list[str]:
    model, _, run = protected("ddp")
    with heard(logging.WARNING) as lines:
        for (tokens,) in run.loader:
            run.backward(model(tokens))
            if takes_last or run.global_step < STEPS_OF_EPOCH - 1:
                run.step()
        run.close()
    assert run.global_step == STEPS_OF_EPOCH - (not takes_last)
    return [line for line in lines if "whose step was not taken" in line]


def test_a_last_step_that_the_script_does_not_take_is_told_of_at_its_end(
    worlds: WorldPool,
) -> None:
    """As by `if (number + 1) % accumulation == 0: optimizer.step()`; later it is an error."""
    first, second = worlds.run(2, told_at_the_end, False)
    assert ["call run.step(), or optimizer.step(), for every batch" in each for each in first] == [
        True
    ]
    assert second == []
    assert worlds.run(2, told_at_the_end, True) == [[], []]


@pytest.mark.full
def test_hsdp_without_shards_is_refused(worlds: WorldPool) -> None:
    with pytest.raises(
        AssertionError, match=r"mesh of shape \(2, 1\), in which nothing is sharded"
    ):
        worlds.run(2, trained, "hsdp")


def poisoned(wrapper: str) -> Any:
    """The last elements that a rank has of two gradients are no numbers."""
    _, _, run = protected(wrapper)
    told = Told()
    logging.getLogger("zero_torch").addHandler(told)
    model = run._wrapped.module
    for tokens in batches(run, 1):
        run.backward(model(tokens))
        for name in ("blocks.1.up.weight", "head.weight"):
            gradient = model.get_parameter(name).grad
            local(gradient).view(-1)[-1:] = torch.nan
        run.step(0.5)
    logging.getLogger("zero_torch").removeHandler(told)
    return run.grad_norm, told.lines


def test_the_first_parameter_whose_gradient_is_not_finite_is_named(worlds: WorldPool) -> None:
    for wrapper, world in (("plain", 1), ("fsdp2", 3)):
        (norm, told), *others = worlds.run(world, poisoned, wrapper)
        assert str(norm) == "nan"
        assert told == ["step 1: gradient norm nan, first in blocks.1.up.weight"]
        assert all(lines == [] for _, lines in others)


def one_by_one(run: zero_torch.Run) -> Any:
    """Each batch from an iteration of its own."""
    while run.global_step < STEPS:
        yield next(iter(run.loader))[0]


def by_the_scripts_own_calls(wrapper: str, order: Any = batches) -> str:
    """A loop that knows nothing of global batches."""
    model, optimizer, run = protected(wrapper, schedule=True)
    for tokens in order(run):
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()
        run.scheduler.step()
    return run.weight_hash()


def test_an_iteration_that_is_left_in_a_step_goes_on_behind_its_last_batch(
    worlds: WorldPool,
) -> None:
    (expected,) = worlds.run(1, by_the_scripts_own_calls, "plain")
    assert worlds.run(1, by_the_scripts_own_calls, "plain", one_by_one) == [expected]
    assert worlds.run(2, by_the_scripts_own_calls, "ddp", one_by_one) == [expected] * 2


def misused(wrapper: str) -> list[str]:
    """The messages of a loop that goes wrong in every way, after one step that goes well."""
    model, optimizer, run = protected(wrapper)
    told = []

    def refused(call: Any) -> None:
        with pytest.raises(ZeroError) as raised:
            call()
        told.append(str(raised.value).partition(":")[0])

    refused(lambda: run.backward(torch.zeros(())))
    rest = batches(run, 2)
    for tokens in rest:
        run.backward(model(tokens))
        if run.step():
            break
    tokens = next(rest)
    run.backward(model(tokens))
    refused(lambda: run.backward(model(tokens)))
    refused(lambda: optimizer.step(lambda: 0.0))
    refused(lambda: run.save("nowhere"))
    optimizer.param_groups[0]["lr"] = 1.0
    refused(lambda: next(rest))
    return told


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp2"])
@pytest.mark.corners(wrapper=["ddp"])
def test_a_loop_that_cannot_be_held_is_an_error_that_says_why(
    worlds: WorldPool, wrapper: str
) -> None:
    (told,) = worlds.run(1, misused, wrapper)
    assert told == [
        "there is no micro-batch",
        told[1],
        "optimizer.step(closure) computes the loss again, which cannot be held until the last "
        "micro-batch of a step; call backward() first, and optimizer.step() without a closure",
        "save() in the middle of a step",
        "lr of param group 0 has changed from 0.01 to 1.0 in the middle of a step, as by a "
        "schedule that is stepped for every batch",
    ]
    assert "got a second gradient" in told[1]


def run_seed(directory: str) -> int:
    """Other weights for each run that resumes: all must come from the checkpoint."""
    return len(list(Path(directory).glob("step-*"))) if Path(directory).exists() else 0


def overflowing(wrapper: str) -> Any:
    """The second step overflows, in one element, which one rank has."""
    model = make(wrapper)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run = zero_torch.protect(
        model,
        optimizer,
        DataLoader(dataset(), batch_size=2),
        microbatches=MICROBATCHES,
        scheduler=scheduler,
        scaler=torch.amp.GradScaler("cpu", init_scale=256.0),
    )
    first = next(iter(model.parameters()))
    for tokens in batches(run):
        run.backward(model(tokens))
        assert first.grad is not None
        if run.global_step == 1:
            local(first.grad)[:1, :1] = torch.inf if torch.distributed.get_rank() == 0 else 0
        run.step()
    return run.weight_hash(), optimizer.param_groups[0]["lr"], run.scaler.get_scale()


@pytest.mark.full
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(worlds: WorldPool) -> None:
    (alone,) = worlds.run(1, overflowing, "plain")
    assert alone[1:] == (1e-2 * 0.5**3, 128.0)
    assert set(worlds.run(2, overflowing, "fsdp2")) == {alone}


def alone_with_checkpoints(wrapper: str, directory: str, steps: int) -> Any:
    """A loop of torch alone, that is given no loader: it resumes, trains some steps, and saves."""
    told = Told()
    logging.getLogger("zero_torch").addHandler(told)
    model = make(wrapper, seed=run_seed(directory))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run = zero_torch.protect(model, optimizer, scheduler=scheduler)
    run.load(directory)
    begun = run.global_step, run.weight_hash(), optimizer.param_groups[0]["lr"], run.client_state
    for _ in range(steps):
        model(dataset()[:2][0]).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.save_if_due(directory, {"at": run.global_step}, every_steps=2)
    ended = run.global_step, run.weight_hash(), optimizer.param_groups[0]["lr"], {"at": steps}
    run.close()
    logging.getLogger("zero_torch").removeHandler(told)
    return begun, ended, told.lines


@pytest.mark.full
def test_without_a_loader_a_checkpoint_of_tensor_parallelism_loads_anywhere(
    worlds: WorldPool, tmp_path: Path
) -> None:
    (first, *_) = worlds.run(4, alone_with_checkpoints, "tensor", str(tmp_path), 2)
    found = worlds.run(1, alone_with_checkpoints, "plain", str(tmp_path), 2)
    found += worlds.run(4, alone_with_checkpoints, "tensor", str(tmp_path), 0)
    assert found[0][0] == first[1]
    assert [rank[0][:3] for rank in found[1:]] == [found[0][1][:3]] * 4


class Told(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_without_a_loader_a_run_has_checkpoints_and_says_what_is_not_promised(
    worlds: WorldPool, tmp_path: Path
) -> None:
    (first, _) = worlds.run(2, alone_with_checkpoints, "ddp", str(tmp_path), 2)
    (_, saved, told) = first
    assert [line.partition(", so")[0] for line in told] == ["zero_torch.protect() got no loader"]
    found = worlds.run(3, alone_with_checkpoints, "fsdp2", str(tmp_path), 0)
    assert [rank[0] for rank in found] == [saved] * 3
    assert saved[0] == 2


class Average:
    """An average of the weights that the script keeps beside its run."""

    made: Average

    def __init__(self, model: Any) -> None:
        Average.made = self
        self._weights = recognize(model).parameters()
        self.values = {name: p.detach().clone() for name, p in self._weights.items()}
        self.seen: tuple[int, ...] = ()

    def update(self, step: int) -> None:
        for name, value in self.values.items():
            value.lerp_(self._weights[name].detach(), 0.25)
        self.seen = (*self.seen, step)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "seen": self.seen, 7: b"\x00"}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        for name, value in state["values"].items():
            self.values[name].copy_(value)
        assert state[7] == b"\x00"
        self.seen = state["seen"]


def averaged(wrapper: str, directory: str, until: int) -> Any:
    model, _, run = protected(wrapper, average=Average, seed=run_seed(directory))
    average = Average.made
    run.load(directory)
    for tokens in batches(run, until):
        run.backward(model(tokens))
        if run.step():
            average.update(run.global_step)
            run.save(directory)
            assert not run._training.captured  # a save keeps no copy of the average
    run.close()
    whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in average.values.items()}
    return weight_hash(whole.items()), average.seen


def test_objects_of_the_script_are_saved_and_restored_at_another_world_size(
    worlds: WorldPool, tmp_path: Path
) -> None:
    (expected,) = worlds.run(1, averaged, "plain", str(tmp_path / "whole"), 3)
    worlds.run(3, averaged, "fsdp2", str(tmp_path / "parts"), 1)
    worlds.run(1, averaged, "plain", str(tmp_path / "parts"), 2)
    found = worlds.run(2, averaged, "fsdp2", str(tmp_path / "parts"), 3)
    assert found == [expected] * 2
    assert expected[1] == (1, 2, 3)


def trained_scale(wrapped: bool) -> str:
    """A model of one element, of which no rank of several has a part."""
    torch.manual_seed(1)
    model: Any = nn.Linear(1, 1, bias=False)
    if wrapped:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.linspace(-1, 1, 24).view(-1, 1)), batch_size=2)
    run = zero_torch.protect(model, optimizer, loader, microbatches=3)
    for (row,) in run.loader:
        run.backward((model(row) - 2 * row).square().mean())
        run.step()
    return run.weight_hash()


def test_a_bucket_of_fewer_elements_than_ranks_is_summed_as_any_other(worlds: WorldPool) -> None:
    (alone,) = worlds.run(1, trained_scale, False)
    assert worlds.run(3, trained_scale, True) == [alone] * 3


def interrupted(at: str, directory: str) -> str:
    """What the script is told that saves where a step was interrupted after its optimizer."""
    model, _, run = protected("plain", config={"elastic": {"sample_ledger": directory}})
    owner: Any = {"stepped": run._same, "seed_step": run.loader, "end_step": run._ledger}[at]
    call = getattr(owner, at)

    def interrupt(*given: Any) -> None:
        if at == "seed_step" and given:  # at another moment of the step
            call(*given)
        else:
            raise KeyboardInterrupt

    setattr(owner, at, interrupt)
    try:
        for tokens in batches(run, 1):
            run.backward(model(tokens))
            run.step()
    except KeyboardInterrupt:
        with pytest.raises(ZeroError) as raised:
            run.save(directory)
        return str(raised.value)
    return ""


@pytest.mark.parametrize("at", ["stepped", "seed_step", "end_step"])
@pytest.mark.corners(at=["seed_step"])
def test_a_step_that_is_interrupted_behind_its_optimizer_is_in_no_checkpoint(
    worlds: WorldPool, tmp_path: Path, at: str
) -> None:
    """Its weights are those of the next position."""
    (told,) = worlds.run(1, interrupted, at, str(tmp_path))
    assert told.startswith("save() in the middle of a step")
