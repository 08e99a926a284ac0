"""Steps on a CPU do not take their memory from the kernel again and again."""

from __future__ import annotations

import resource

import pytest

from tests.numerics.heap_faults import ROWS, WIDE
from tests.numerics.peak_memory import LAYERS, WIDTH
from tests.support.fresh import run_module
from zero_comm.exchange.cpu.malloc import is_set

_MATRIX_BYTES = WIDE * WIDE * 4
_PAGES = {
    "activations": LAYERS * ROWS * WIDTH * 4 // resource.getpagesize(),
    "parameters": _MATRIX_BYTES // resource.getpagesize(),
}
"""Those that hold the outputs of the layers; and one wide matrix, or its gradient."""


def measured(kind: str, **environment: str) -> tuple[int, int]:
    """Faults of one step of a fresh process, and the bytes that its fork gives back."""
    faults, given_back = run_module("tests.numerics.heap_faults", kind, environment)
    return faults, given_back


@pytest.mark.full
@pytest.mark.parametrize("kind", _PAGES)
def test_a_step_uses_the_memory_of_the_step_before_and_no_loading_process_holds_it(
    kind: str,
) -> None:
    faults, given_back = measured(kind)
    assert faults < _PAGES[kind] // 10
    assert given_back > _MATRIX_BYTES // 2


@pytest.mark.full
def test_what_the_environment_says_of_malloc_holds() -> None:
    faults, _ = measured("activations", MALLOC_TRIM_THRESHOLD_="131072")
    assert faults > _PAGES["activations"]


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
