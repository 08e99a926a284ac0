"""Generators of random numbers in what a script gives are found, whatever is beside them."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support import drawing
from zero_data import generators
from zero_data.generators import generators_of, generators_of_module


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held


class NotThereYet:
    """As lazy proxies are: whoever looks at what it stands for gets an error."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError("working outside of a context")


def test_each_generator_is_found_once_wherever_it_is():
    generator = np.random.default_rng(1)
    held = [Holder({"rng": generator}), partial(max, Holder(generator)), lambda: generator]
    assert generators_of(held) == [generator]


@pytest.mark.parametrize("parts", [99, 100, 101, 150, 3000])
def test_each_part_of_a_dataset_may_keep_one(parts: int) -> None:
    rngs = [random.Random(number) for number in range(parts)]
    beside = [(f"{number}.png", number) for number in range(1_000_000)]
    found = generators_of(Holder(beside), Holder([Holder({"rng": rng}) for rng in rngs]))
    assert sorted(map(id, found)) == sorted(map(id, rngs))


def test_more_parts_with_one_than_are_looked_at_are_said_once(caplog) -> None:
    datasets = [Holder(random.Random(number)) for number in range(60_000)]
    for _ in range(2):
        generators_of(Holder(datasets))
    assert caplog.text.count("Holder holds generators of random numbers behind the first") == 1
    assert generators_of(Holder([Holder(number) for number in range(60_000)]), datasets[0])
    assert len(caplog.records) == 1


class Slotted:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = drawing.RNG


class OfClass:
    rng = drawing.RNG


class ByMethod:
    @staticmethod
    def draw() -> float:
        return drawing.RNG.random()


class ByProperty:
    @property
    def scale(self) -> float:
        return drawing.draw()


def by_default(rng: Any = drawing.RNG) -> float:
    return rng.random()


def by_call() -> float:
    return drawing.draw() / 2


HOMES: dict[str, object] = {
    "a slot": Slotted(),
    "a class": OfClass(),
    "a class that is derived from": type("Derived", (OfClass,), {})(),
    "a class that is named": OfClass,
    "a variable of the module": drawing.draw,
    "a variable of another module": lambda: 2 * drawing.RNG.random(),
    "what a function calls": by_call,
    "a nested function": lambda: [drawing.RNG.random() for _ in range(2)],
    "a static method": ByMethod(),
    "a property": ByProperty(),
    "a default": by_default,
    "a bound method": drawing.RNG.random,
}


@pytest.mark.parametrize("home", HOMES)
def test_it_is_found_in_whatever_of_the_script_is_used(home: str) -> None:
    assert generators_of(HOMES[home]) == [drawing.RNG]
    assert generators_of(Holder(HOMES[home])) == [drawing.RNG]


def test_those_of_the_process_and_of_the_system_are_left_alone() -> None:
    own: list[Callable[..., Any]] = [random.random, random.choice, np.random.rand]
    assert generators_of(own, torch.default_generator, random.SystemRandom(), by_library) == []


def test_this_projects_own_code_is_left_alone_also_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(generators, "_NAMES_FILES", random.Random(1), raising=False)
    drawing_names = {**vars(generators), "__name__": generators.__name__}
    exec("def name(): return _NAMES_FILES.random()", drawing_names)
    assert generators_of(drawing_names["name"]) == []


def by_library() -> None:
    """A function whose library draws the names of files."""
    import tempfile

    tempfile.mkstemp()


def test_a_proxy_of_what_is_gone_or_not_there_yet_holds_none_and_hides_none():
    gone = weakref.proxy(Holder(None))
    generator = random.Random(1)
    assert generators_of([gone, NotThereYet(), Holder(generator)]) == [generator]


def test_a_module_that_knows_its_former_engine_has_its_own_generators():
    module = nn.Linear(1, 1)
    engine = Holder(None)
    module.engine = weakref.proxy(engine)
    del engine
    module.noise = torch.Generator()
    assert generators_of_module(nn.Sequential(module)) == [module.noise]


def test_a_stream_keeps_the_generator_of_its_order_whatever_of_a_module_leads_to_it():
    stream, module = Holder(np.random.default_rng(1)), nn.Linear(1, 1)
    module.noise, module.trainer = torch.Generator(), Holder({"dataset": stream})
    assert generators_of_module(module, stream) == [module.noise]
