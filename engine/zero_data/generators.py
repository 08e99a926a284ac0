"""Generators of random numbers that the script's objects keep for themselves.

A dataset with a `self.rng`, a `collate_fn` that holds one, a module that draws noise with its own:
what such a generator gives next depends on how often it was asked in this process, so on the rank,
on its loading process, and on restarts. They are found, and seeded wherever those of the process
are: in attributes, in slots, in classes, in what functions close over, have as defaults, or name of
their module. Nobody can find one that the loop itself holds in a variable.

Code of Python, of installed packages and of this project is left alone: it draws names of files and
the like.
"""

from __future__ import annotations

import copy
import dis
import logging
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)

_MOST = 50_000
"""Objects that are looked at: a dataset may hold millions."""
_AT_ONCE = 100
"""Elements of a container, before others have their turn."""

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def is_generator(each: object) -> bool:
    """Whether an object is a generator that can be seeded, and not one of the process itself."""
    # By `type`: `isinstance` asks a proxy for its `__class__`, which may load something.
    kind = type(each)
    return issubclass(kind, _KINDS) and not (
        issubclass(kind, random.SystemRandom) or any(each is one for one in _OF_PROCESS)
    )


_bound: Any = (random.random, np.random.random_sample)
_OF_PROCESS = (torch.default_generator, *(each.__self__ for each in _bound))


def generators_of(*roots: object) -> list[Generator]:
    """The generators that can be reached from objects of the script, each once."""
    found: list[Generator] = []
    seen: set[int] = set()
    looked = newest = 0
    left: deque[Iterator[object]] = deque([iter(roots)])
    while left and looked < _MOST:
        inside, before = left.popleft(), looked
        with suppress(Exception):  # a proxy of what is gone, or not there yet
            for each in islice(inside, _AT_ONCE):
                looked += 1
                if id(each) in seen or each is None or issubclass(type(each), _LEAVES):
                    continue
                seen.add(id(each))
                if not issubclass(type(each), _KINDS):
                    left.append(_inside(each))
                elif is_generator(each):
                    found.append(cast(Generator, each))
                    newest = looked
            if looked - before == _AT_ONCE:
                left.append(inside)
    # One that is found as late as this is hardly the last one.
    if left and newest > _MOST * 0.9:
        _warn_of_others(type(roots[0]).__name__)
    return found


@cache
def _warn_of_others(name: str) -> None:
    _log.warning(
        "%s holds generators of random numbers behind the first %d of its objects: those there "
        "are not seeded, and what they draw differs after a restart and on another number of "
        "ranks; let its parts share one",
        name,
        _MOST,
    )


def generators_of_module(module: nn.Module, stream: object = None) -> list[Generator]:
    """The generators in the attributes of a module and its parts, without those of a stream."""
    attributes = (pair for each in module.modules() for pair in vars(each).items())
    own = [value for key, value in attributes if key not in _OF_TORCH]
    found = generators_of(*own, *{type(each): None for each in module.modules()})
    # Attributes may lead to the stream: FSDP2's to the run, Lightning's to the Trainer. It has an
    # order of its own, perhaps of its own generator, and is read again in that order.
    others = {id(each) for each in generators_of(stream)}
    return [each for each in found if id(each) not in others]


def generators_in_common(thing: object) -> list[Generator]:
    """The generators that copies of an object share: of its class, its module or a closure."""
    own = generators_of(thing)
    copied: set[int] = set()
    with suppress(Exception):  # whoever needs a copy says why there is none
        copied = {id(each) for each in generators_of(copy.deepcopy(thing))} if own else copied
    return [each for each in own if id(each) in copied]


_OF_TORCH = vars(nn.Module()).keys()
_LEAVES = (str, bytes, int, float, complex, Tensor, np.ndarray, ModuleType)
_INSTALLED = [
    *(Path(sysconfig.get_path(of)) for of in ("stdlib", "platstdlib", "purelib", "platlib")),
    *Path(__file__).parents[1].glob("zero_*"),  # also where they are not installed
]


def _inside(each: Any) -> Iterator[object]:
    match each:
        case dict():
            yield from each.values()
        case list() | tuple() | set() | frozenset() | deque():
            yield from each
        case partial():
            yield from (each.func, each.args, each.keywords)
        case MethodType() | BuiltinMethodType() | staticmethod() | classmethod():
            yield from (getattr(each, name, None) for name in ("__self__", "__func__"))
        case property():
            yield each.fget
        case FunctionType():
            yield from (cell.cell_contents for cell in each.__closure__ or () if _is_set(cell))
            yield from (each.__defaults__, each.__kwdefaults__)
            if _is_of_script(each.__module__):
                yield from _named_by(each.__code__, each.__globals__)
        case type():
            own = (vars(kind) for kind in each.__mro__ if _is_of_script(kind.__module__))
            yield from (member for members in own for member in members.values())
        case _:
            # Slots are no part of `__dict__`; a class has a descriptor of each.
            members = (pair for kind in type(each).__mro__ for pair in vars(kind).items())
            slots = (name for name, member in members if type(member) is MemberDescriptorType)
            yield from (getattr(each, name, None) for name in slots)
            yield type(each)
            yield from getattr(each, "__dict__", {}).values()


def _named_by(code: CodeType, variables: dict[str, object]) -> Iterator[object]:
    """The variables of a module that code names, and those that it names of modules there."""
    names, attributes = _names_in(code)
    for name in names:
        value = variables.get(name)
        if type(value) is ModuleType and _is_of_script(value.__name__):
            yield from (vars(value).get(key) for key in attributes)
        yield value
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _named_by(inner, variables)


# A script is searched anew for each of its roots, and reading its code takes most of the time.
@cache
def _names_in(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of variables and of attributes in code, each once."""
    named = {(each.opname, each.argval): None for each in dis.get_instructions(code)}
    return tuple(name for op, name in named if op in _VARIABLES), tuple(
        name for op, name in named if op in _ATTRIBUTES
    )


_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


@cache
def _is_of_script(name: str) -> bool:
    """Whether a module is the script or written for it, and neither Python's nor installed."""
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None:
        return name == "__main__"
    return not any(Path(path).is_relative_to(each) for each in _INSTALLED)


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def seed_generators(generators: Iterable[Generator], seed: int) -> None:
    """Seed generators, in place."""
    for each in generators:
        match each:
            case torch.Generator():
                each.manual_seed(seed >> 1)
            # It has no method to seed it in place: it takes the state of one that begins.
            case np.random.Generator():
                kind: Any = type(each.bit_generator)
                each.bit_generator.state = kind(seed).state
            case np.random.RandomState():
                each.seed(seed % (1 << 32))
            case _:
                each.seed(seed)


@contextmanager
def kept_generators(generators: Iterable[Generator]) -> Iterator[None]:
    """Generators are afterwards in the states of before."""
    restores: list[Callable[[], object]] = []
    for each in generators:
        match each:
            case np.random.Generator():
                bits = each.bit_generator
                restores.append(partial(setattr, bits, "state", bits.state))
            case random.Random():
                restores.append(partial(each.setstate, each.getstate()))
            case _:
                other: Any = each  # of torch, or of numpy's older kind: each has its own state
                restores.append(partial(other.set_state, other.get_state()))
    try:
        yield
    finally:
        for restore in restores:
            restore()
