"""What differs in any pattern has another sum of its bits, of every dtype and size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zero_step.checks.bit_sum import bit_sum

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.complex64, torch.complex128, torch.int64, torch.int16, torch.uint8),
]


def first_again(values: Tensor) -> Tensor:
    return values.index_copy(0, torch.tensor([0]), values[:1] + 1)


def last_again(values: Tensor) -> Tensor:
    return values.index_copy(0, torch.tensor([len(values) - 1]), values[-1:] + 1)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "all doubled": lambda values: values * 2,
    "all negative": lambda values: -values,
    "two in each other's place": lambda values: values.roll(1),
    "one before": first_again,
    "one behind": last_again,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_change_is_seen(dtype: torch.dtype, change: str) -> None:
    """Of powers of two as well: in a sum of 2^17 equal differences of 2^31 with weights 1,
    3, 5, ... nothing would be left of them."""
    for size in (2, 3, 64, 1 << 17):
        values = torch.arange(size).remainder(100).add(1).to(dtype)
        assert bit_sum(values) == bit_sum(values.clone())
        assert bit_sum(values) != bit_sum(CHANGES[change](values)), size


def test_the_signs_of_zeros_and_what_is_no_number_have_a_sum() -> None:
    zeros = torch.zeros((1 << 20) + 5)
    changed = zeros.clone()
    changed[-1] = -0.0
    assert bit_sum(zeros) != bit_sum(changed)
    nan = torch.tensor([float("nan")])
    assert bit_sum(nan) == bit_sum(nan.clone())
    assert bit_sum(torch.zeros(0)) == 0
