"""Whatever order a script calls in: a step is what it should be, or the call is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero_engine
import zero_torch
from tests.support.world import WorldPool
from zero_contract.errors import ZeroError

SAMPLES, MICROBATCHES, MICRO_BATCH, STEPS = 240, 3, 2, 40
CALLS = ("backward", "again", "fail", "step", "drop", "save", "load")


class Net(nn.Module):
    """Two layers, so that a backward can fail half way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(rows).tanh()).square().mean()


def rows() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(2)))


class Stock:
    def __init__(self, directory: str, *, own: bool) -> None:
        self.net, self._directory, self._own = Net(), directory, own
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        loader = DataLoader(rows(), batch_size=MICRO_BATCH)
        self._optimizer = optimizer
        self._run = zero_torch.protect(self.net, optimizer, loader, microbatches=MICROBATCHES)
        self.batches = forever(self._run.loader)

    def backward(self, batch: Tensor) -> None:
        loss = self.net(batch)
        loss.backward() if self._own else self._run.backward(loss)

    def step(self) -> None:
        self._optimizer.step() if self._own else self._run.step()

    def drop(self) -> None:
        """Nothing: a batch cannot be dropped."""

    def save(self) -> None:
        self._run.save(self._directory)

    def load(self) -> None:
        assert self._run.load(self._directory)

    def done(self) -> tuple[int, str]:
        self._run.save_if_due(self._directory, every_steps=10**6)  # ends a step that was taken
        return self._run.global_step, self._run.weight_hash()


class Engine:
    def __init__(self, directory: str, *, own: bool) -> None:
        self.net, self._directory, self._own = Net(), directory, own
        config = {
            "train_batch_size": MICROBATCHES * MICRO_BATCH,
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "zero_optimization": {
                "stage": 3 if own else 1,
                "stage3_param_persistence_threshold": 0,
            },
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        self._engine = zero_engine.initialize(self.net, training_data=rows(), config=config)
        loader: Any = self._engine.training_dataloader
        self.batches = forever(loader)

    def backward(self, batch: Tensor) -> None:
        loss = self._engine(batch)
        loss.backward() if self._own else self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()

    def drop(self) -> None:
        self._engine.zero_grad()

    def save(self) -> None:
        self._engine.save_checkpoint(self._directory)

    def load(self) -> None:
        assert self._engine.load_checkpoint(self._directory)[0]

    def done(self) -> tuple[int, str]:
        return self._engine.global_steps, self._engine.weight_hash()


KINDS: dict[str, Callable[..., Any]] = {"stock": Stock, "engine": Engine}


def forever(loader: Any) -> Iterator[Tensor]:
    while True:
        for (batch,) in loader:
            yield batch


def raise_error(_: Tensor) -> None:
    raise ZeroDivisionError


def in_order(kind: str, own: bool) -> list[str]:
    """The hash after each step of a loop as it should be."""
    with tempfile.TemporaryDirectory() as directory:
        training, hashes = KINDS[kind](directory, own=own), list[str]()
        hashes.append(training.done()[1])
        for _ in range(STEPS):
            for _ in range(MICROBATCHES):
                training.backward(next(training.batches))
                training.step()
            number, weights = training.done()
            assert number == len(hashes)
            hashes.append(weights)
        return hashes


class Script:
    """Calls in any order; `counts_once` says whether each batch so far counts once."""

    def __init__(self, kind: str, directory: str, *, own: bool) -> None:
        self.training = KINDS[kind](directory, own=own)
        self.counts_once = True
        self._drops = kind == "engine"
        self._waiting: Tensor | None = None
        self._last: Tensor | None = None

    def make(self, call: str) -> str:
        """Make a call; returns what was told."""
        try:
            getattr(self, call)()
        except ZeroDivisionError:
            return "failed"
        except ZeroError as error:
            return str(error)
        return ""

    def backward(self) -> None:
        if self._waiting is None:
            self._waiting = next(self.training.batches)
        self.training.backward(self._waiting)
        self._last, self._waiting = self._waiting, None

    def fail(self) -> None:
        handle = self.training.net.first.weight.register_hook(raise_error)
        try:
            self.backward()
        finally:
            handle.remove()

    def again(self) -> None:
        if self._last is not None:
            self.training.backward(self._last)
            self.counts_once = False

    def drop(self) -> None:
        self.training.drop()
        self.counts_once = self.counts_once and not self._drops

    def load(self) -> None:
        self._waiting = self._last = None
        self.training.load()
        self.counts_once = True

    def step(self) -> None:
        self.training.step()

    def save(self) -> None:
        if self.counts_once:  # else it would be a checkpoint of another run
            self.training.save()


def in_any_order(kind: str, own: bool, calls: list[str], hashes: list[str]) -> None:
    """Make the calls, then load, and make a step."""
    with tempfile.TemporaryDirectory() as directory:
        script = Script(kind, directory, own=own)
        training = script.training
        training.save()
        told = [script.make(call) for call in calls]
        if script.counts_once:
            number, weights = training.done()
            assert weights == hashes[number], told
        training.load()
        number, weights = training.done()
        assert weights == hashes[number], told
        for _ in range(MICROBATCHES):
            training.backward(next(training.batches))
            training.step()
        assert training.done() == (number + 1, hashes[number + 1]), told


ORDERS = st.lists(st.sampled_from(CALLS), max_size=14)
_EXPECTED: dict[tuple[str, bool], list[str]] = {}


def search(worlds: WorldPool, kind: str, own: bool, calls: list[str]) -> None:
    if (kind, own) not in _EXPECTED:
        (_EXPECTED[kind, own],) = worlds.run(1, in_order, kind, own)
    worlds.run(1, in_any_order, kind, own, calls, _EXPECTED[kind, own])


@settings(max_examples=4)
@given(kind=st.sampled_from(sorted(KINDS)), own=st.booleans(), calls=ORDERS)
@example(kind="stock", own=True, calls=["fail", "backward", "step"])
@example(kind="engine", own=False, calls=["backward", "step", "fail", "step", "backward"])
@example(kind="engine", own=True, calls=["backward", "backward", "step", "backward", "step"])
def test_a_step_is_what_it_should_be_or_the_call_is_refused(
    worlds: WorldPool, kind: str, own: bool, calls: list[str]
) -> None:
    search(worlds, kind, own, calls)


@settings(max_examples=300)
@given(kind=st.sampled_from(sorted(KINDS)), own=st.booleans(), calls=ORDERS)
@pytest.mark.full
def test_the_same_of_many_orders(worlds: WorldPool, kind: str, own: bool, calls: list[str]) -> None:
    search(worlds, kind, own, calls)
