"""Whatever order a script calls in: a step is what it should be, or the call is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.numerics.promises.back_ends import OfEngine, OfStockTorch, Recipe, Training, training
from tests.support.world import WorldPool
from zero_contract.errors import ZeroError


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


CALLS = ("backward", "again", "fail", "step", "drop", "save", "load")
KINDS = {
    "stock": Recipe(optimizer=sgd),
    "stock, own calls": Recipe(optimizer=sgd, own_loop=True),
    "stage1": Recipe(optimizer=sgd),
    "stage3": Recipe(optimizer=sgd, own_loop=True),
}
STEPS = 40


def made(kind: str) -> Training:
    return training(KINDS[kind], "plain" if kind.startswith("stock") else kind)


def done(own: Training, directory: str) -> tuple[int, str]:
    """The step, and the weights."""
    if isinstance(own, OfStockTorch):
        own.run.save_if_due(directory, every_steps=10**6)  # ends a step that was taken
    return own.step, own.hash()


def forever(own: Training) -> Iterator[Tensor]:
    while True:
        for (batch,) in own.loader:
            yield batch


def raise_error(_: Tensor) -> None:
    raise ZeroDivisionError


def in_order(kind: str) -> list[str]:
    """The hash at the begin, and after each step of a loop as it should be."""
    own = made(kind)
    return [own.hash(), *own.hashes(STEPS)]


class Script:
    """Calls in any order; `counts_once` says whether each batch so far counts once."""

    def __init__(self, kind: str, directory: str) -> None:
        self.own, self._directory = made(kind), directory
        self.batches = forever(self.own)
        self.counts_once = True
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
            self._waiting = next(self.batches)
        self.own.backward(self._waiting)
        self._last, self._waiting = self._waiting, None

    def fail(self) -> None:
        handle = self.own.module.get_parameter("up.weight").register_hook(raise_error)
        try:
            self.backward()
        finally:
            handle.remove()

    def again(self) -> None:
        if self._last is not None:
            self.own.backward(self._last)
            self.counts_once = False

    def drop(self) -> None:
        """By the engine; `zero_torch` knows of no such call."""
        if isinstance(self.own, OfEngine):
            self.own.engine.zero_grad()
            self.counts_once = False

    def load(self) -> None:
        self._waiting = self._last = None
        self.own.load(self._directory)
        self.counts_once = True

    def step(self) -> None:
        self.own.end()

    def save(self) -> None:
        if self.counts_once:  # else it would be a checkpoint of another run
            self.own.save(self._directory)


def in_any_order(kind: str, calls: list[str], hashes: list[str]) -> None:
    """Make the calls, then load, and make a step."""
    with tempfile.TemporaryDirectory() as directory:
        script = Script(kind, directory)
        own = script.own
        own.save(directory)
        told = [script.make(call) for call in calls]
        if script.counts_once:
            number, weights = done(own, directory)
            assert weights == hashes[number], told
        own.load(directory)
        number, weights = done(own, directory)
        assert weights == hashes[number], told
        own.train(number + 1)
        assert done(own, directory) == (number + 1, hashes[number + 1]), told


ORDERS = st.lists(st.sampled_from(CALLS), max_size=14)
_EXPECTED: dict[str, list[str]] = {}


def search(worlds: WorldPool, kind: str, calls: list[str]) -> None:
    if kind not in _EXPECTED:
        (_EXPECTED[kind],) = worlds.run(1, in_order, kind)
    worlds.run(1, in_any_order, kind, calls, _EXPECTED[kind])


@settings(max_examples=1)
@given(kind=st.sampled_from(sorted(KINDS)), calls=ORDERS)
@example(kind="stock, own calls", calls=["fail", "backward", "step"])
@example(kind="stage1", calls=["backward", "step", "fail", "step", "backward"])
@example(kind="stage3", calls=["backward", "backward", "step", "backward", "step"])
def test_a_step_is_what_it_should_be_or_the_call_is_refused(
    worlds: WorldPool, kind: str, calls: list[str]
) -> None:
    search(worlds, kind, calls)


@settings(max_examples=300)
@given(kind=st.sampled_from(sorted(KINDS)), calls=ORDERS)
@pytest.mark.full
def test_the_same_of_many_orders(worlds: WorldPool, kind: str, calls: list[str]) -> None:
    search(worlds, kind, calls)
