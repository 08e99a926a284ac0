"""Generators of random numbers that the script's objects keep for themselves.

A dataset with a `self.rng`, a `collate_fn` that holds one, a module that draws noise with its own:
what such a generator gives next depends on how often it was asked in this process, so on the rank,
on its loading process, and on restarts. They are found, and seeded wherever those of the process
are. Nobody can find one that the loop itself holds in a variable.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

_MOST = 10_000
"""Objects that are looked at: a dataset may hold millions."""
_OF_EACH = 100
"""Elements of a container."""

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def generators_of(*roots: object) -> list[Generator]:
    """Those that can be reached from objects of the script, each once."""
    found: list[Generator] = []
    seen: set[int] = set()
    left = deque(roots)
    while left and len(seen) < _MOST:
        each = left.popleft()
        # By `type`: `isinstance` asks a proxy for its `__class__`, which may load something.
        if id(each) in seen or each is None or issubclass(type(each), _LEAVES):
            continue
        seen.add(id(each))
        if issubclass(type(each), _KINDS):
            found.append(cast(Generator, each))
        else:
            with suppress(Exception):  # a proxy of what is gone, or not there yet
                left.extend(islice(_inside(each), _OF_EACH))
    return found


def generators_of_module(module: nn.Module, stream: object = None) -> list[Generator]:
    """Those in the attributes of a module and its parts, without those of a stream."""
    attributes = (pair for each in module.modules() for pair in vars(each).items())
    found = generators_of(*(value for key, value in attributes if key not in _OF_TORCH))
    # Attributes may lead to the stream: FSDP2's to the run, Lightning's to the Trainer. It has an
    # order of its own, perhaps of its own generator, and is read again in that order.
    others = {id(each) for each in generators_of(stream)}
    return [each for each in found if id(each) not in others]


_OF_TORCH = vars(nn.Module()).keys()
_LEAVES = (str, bytes, int, float, complex, Tensor, np.ndarray, type, ModuleType)


def _inside(each: Any) -> Iterator[object]:
    match each:
        case dict():
            yield from each.values()
        case list() | tuple() | set() | frozenset() | deque():
            yield from each
        case partial():
            yield from (each.func, each.args, each.keywords)
        case MethodType():
            yield each.__self__
        case FunctionType():
            yield from (cell.cell_contents for cell in each.__closure__ or () if _is_set(cell))
        case _:
            yield from getattr(each, "__dict__", {}).values()


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def seed_generators(generators: Iterable[Generator], seed: int) -> None:
    """Seed them, in place."""
    for each in generators:
        match each:
            case torch.Generator():
                each.manual_seed(seed >> 1)
            case np.random.Generator():  # has no method to seed it in place
                kind: Any = type(each.bit_generator)
                each.bit_generator.state = kind(seed).state
            case np.random.RandomState():
                each.seed(seed % (1 << 32))
            case _:
                each.seed(seed)


@contextmanager
def kept_generators(generators: Iterable[Generator]) -> Iterator[None]:
    """They are afterwards in the states of before."""
    before = [(each, _state(each)) for each in generators]
    try:
        yield
    finally:
        for each, state in before:
            match each:
                case np.random.Generator():
                    each.bit_generator.state = state
                case random.Random():
                    each.setstate(state)
                case _:
                    each.set_state(state)


def _state(generator: Generator) -> Any:
    match generator:
        case np.random.Generator():
            return generator.bit_generator.state
        case random.Random():
            return generator.getstate()
        case _:
            return generator.get_state()
