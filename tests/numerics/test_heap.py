"""Steps on a CPU do not take their memory from the kernel again and again."""

from __future__ import annotations

import resource

import pytest

from tests.numerics.heap_faults import ROWS
from tests.numerics.peak_memory import LAYERS, WIDTH
from tests.support.fresh import run_module
from zero_comm.exchange.cpu.malloc import is_set

_ACTIVATIONS = LAYERS * ROWS * WIDTH * 4 // resource.getpagesize()
"""Pages that hold the outputs of the layers."""


def faults(**environment: str) -> int:
    """Those of one step of a fresh process."""
    found: int = run_module("tests.numerics.heap_faults", environment=environment)
    return found


@pytest.mark.full
def test_a_step_uses_the_memory_of_the_step_before() -> None:
    assert faults() < _ACTIVATIONS // 10


@pytest.mark.full
def test_what_the_environment_says_of_malloc_holds() -> None:
    assert faults(MALLOC_TRIM_THRESHOLD_="131072") > _ACTIVATIONS


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072", True),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.mmap_max=0", True),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2", False),
        ("MALLOC_ARENA_MAX", "2", False),
    ],
)
def test_only_settings_of_the_same_matter_count(name: str, value: str, expected: bool) -> None:
    assert is_set({name: value}) is expected
