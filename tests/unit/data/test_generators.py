"""Generators of random numbers in what a script gives are found, whatever is beside them."""

from __future__ import annotations

import random
import weakref
from functools import partial

import numpy as np
import torch
from torch import nn

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
