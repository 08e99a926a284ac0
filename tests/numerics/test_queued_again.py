"""Tests of the engine over gloo, collected once more over a process group with NCCL's semantics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.numerics import (
    test_accumulate,
    test_branches,
    test_declared_boundaries,
    test_forwards_between,
    test_frozen_modules,
    test_muon,
    test_quantized,
    test_reduction_order,
    test_tokens,
    test_unmanaged_steps,
    test_user_optimizers,
)
from tests.support.queued import BACKEND
from tests.support.world import WorldPool

pytestmark = pytest.mark.full
MODULES = (
    test_accumulate,
    test_branches,
    test_declared_boundaries,
    test_forwards_between,
    test_frozen_modules,
    test_muon,
    test_quantized,
    test_reduction_order,
    test_tokens,
    test_unmanaged_steps,
    test_user_optimizers,
)
LEFT_OUT = (
    "test_ranks_that_call_different_things_are_told_who_waits_for_what",
    "test_ranks_that_run_modules_in_different_orders_are_told_the_modules",
)
"""Tests of gloo's exchanges, whose names must match or ranks wait for ever. NCCL's are matched by
their order; what ranks are told there is tested in `test_queued`."""


class Queued:
    """Worlds whose groups have NCCL's semantics, unless a test names another backend."""

    def __init__(self, worlds: WorldPool) -> None:
        self._worlds = worlds

    def run(self, world: int, job: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """As `WorldPool.run`."""
        return self._worlds.run(world, job, *args, **{"backend": BACKEND, **options})


@pytest.fixture(name="worlds")
def queued_worlds(worlds: WorldPool) -> Queued:
    """In the place of the worlds over gloo, for every test of this module."""
    return Queued(worlds)


def over_worlds(module: ModuleType) -> Iterator[tuple[str, Callable[..., None]]]:
    """The tests of a module that need a process group."""
    for name, test in inspect.getmembers(module, inspect.isfunction):
        own = name.startswith("test_") and test.__module__ == module.__name__
        if own and name not in LEFT_OUT and "worlds" in inspect.signature(test).parameters:
            yield f"{module.__name__.rpartition('.')[2]}_{name.removeprefix('test_')}", test


globals().update(pair for module in MODULES for pair in over_worlds(module))
