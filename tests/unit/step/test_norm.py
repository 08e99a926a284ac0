"""The norm of gradients has the same bits however the elements are divided and added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero_comm.sums.order import record_of
from zero_step.gradients.norm import ROW, merged, sum_of_squares

SEEDS = st.integers(0, 2**32 - 1)


def norm_of(parts: Sequence[Tensor]) -> float:
    return merged([sum_of_squares(part).tolist() for part in parts])


def some_norms(seed: int, spread: float, dtype: torch.dtype) -> Tensor:
    """Norms whose logarithms are spread widely, some of them 0, and none as large as infinity."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 3000, (), generator=generator))
    exponents = torch.randn(count, generator=generator, dtype=torch.double) * spread
    values = torch.rand(count, generator=generator) * torch.exp2(exponents.clamp(-140, 120))
    return torch.where(torch.rand(count, generator=generator) < 0.1, 0, values).to(dtype)


def root_of(square: Fraction) -> float:
    """The square root, rounded once."""
    scale = 256  # of a numerator with many more bits than those of an fp64
    root = math.isqrt((square.numerator << 2 * scale + 400) // square.denominator)
    return math.ldexp(root | 1, -scale - 200)


@given(SEEDS, st.sampled_from([0.5, 3, 40]), st.sampled_from([torch.float32, torch.float64]))
def test_any_division_and_any_order_have_the_same_bits(
    seed: int, spread: float, dtype: torch.dtype
) -> None:
    norms = some_norms(seed, spread, dtype)
    generator = torch.Generator().manual_seed(seed)
    expected = norm_of([norms])
    for ranks in (2, 9):
        mixed = norms[torch.randperm(norms.numel(), generator=generator)]
        # Bounds in any order of ranks: some have nothing.
        bounds = torch.randint(0, norms.numel() + 1, (ranks - 1,), generator=generator)
        parts = list(mixed.tensor_split(bounds.sort().values))
        assert norm_of(parts) == expected


@given(SEEDS, st.sampled_from([0.5, 3, 40]), st.sampled_from([torch.float32, torch.float64]))
def test_it_is_the_root_of_the_sum_of_squares(seed: int, spread: float, dtype: torch.dtype) -> None:
    norms = some_norms(seed, spread, dtype)
    squares = norms.double().square().tolist()
    true = root_of(sum(map(Fraction, squares), Fraction(0)))
    # Half a unit in the last place, and what is dropped: 2**-60 of the sum for each block at most.
    assert abs(norm_of([norms]) - true) <= true * (2**-53 + len(squares) * 2**-61)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([], 0.0),
        ([0.0, 0.0], 0.0),
        ([3.0, 4.0], 5.0),
        ([2.0**-149], 2.0**-149),
        ([2.0**-149] * 4, 2.0**-148),
        ([2.0**127] * 4, 2.0**128),
        ([math.inf, 1.0], math.inf),
        ([math.nan, 1.0], math.nan),
        ([math.nan, math.inf], math.nan),
    ],
)
def test_of_special_numbers(blocks: list[float], expected: float) -> None:
    norms = torch.tensor(blocks)
    parts = [norms[:1], norms[1:], norms[:0]]
    for found in (norm_of([norms]), norm_of(parts)):
        assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_what_fp64_does_not_hold_twice_is_infinite() -> None:
    for largest in (1e140, 1e147):
        assert norm_of([torch.tensor([largest], dtype=torch.double)]) == largest
    assert norm_of([torch.tensor([1e160], dtype=torch.double)]) == math.inf
    assert norm_of([torch.tensor([1e-160, 1.0], dtype=torch.double)]) == 1


def test_sums_of_more_blocks_than_an_fp64_counts_are_exact() -> None:
    ranks = 1 << 12
    most = [0, (1 << 62) + 1, 0, 0, 0]
    assert merged([most] * ranks) == root_of(Fraction(ranks * most[1]))


def test_a_root_between_two_numbers_is_rounded_to_the_even_one_and_no_dropped_level_moves_it() -> (
    None
):
    root = (1 << 53) + 1  # half way between two fp64 numbers
    low, high = root**2 % (1 << 60), root**2 >> 60
    row = [0, high, 0, 0, low]  # a multiple of the step of each level, 2**20 apart
    unit = math.ldexp(1.0, -30)  # the root of the lowest step
    assert merged([row]) == (1 << 53) * unit
    assert merged([row, [0, 0, 0, 0, 1]]) == ((1 << 53) + 2) * unit
    assert merged([row, [-1, 0, 0, 0, 1 << 19]]) == (1 << 53) * unit


def test_its_bits_are_those_of_its_version() -> None:
    """Whoever changes them raises the version in `zero_comm.sums.order`."""
    norms = torch.arange(1, 100_001) / 3
    norms *= torch.exp2(-torch.arange(100_000) % 31)
    found = norm_of([norms])
    assert (record_of(8)["norm"], found.hex()) == (1, "0x1.341b1b78e160fp+50")


def test_a_rank_sends_a_few_integers() -> None:
    for blocks in (0, 1, 100_000):
        row = sum_of_squares(torch.rand(blocks))
        assert (row.shape, row.dtype) == ((ROW,), torch.int64)
