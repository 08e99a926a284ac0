"""Numbers as int8: close, the same wherever they are cut, and honest about overflows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zero_comm.sums.quantization import QUANT_BLOCK, pack, packed_size, unpack


def there_and_back(values: Tensor, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    table = values.view(rows, -1)
    packed = torch.empty(rows, packed_size(table.shape[1]), dtype=torch.uint8)
    pack(table, packed)
    return unpack(packed, torch.empty_like(table, dtype=dtype)).flatten()


def test_a_value_is_off_by_half_a_step_of_its_block_at_most() -> None:
    values = torch.randn(8 * QUANT_BLOCK) * torch.logspace(-6, 6, 8).repeat_interleave(QUANT_BLOCK)
    error = (there_and_back(values, 1) - values).abs().view(8, -1)
    step = values.abs().view(8, -1).amax(dim=1, keepdim=True) / 127
    assert (error <= step * 0.501).all()
    assert error.any(dim=1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_value_becomes_does_not_depend_on_the_cut(dtype: torch.dtype) -> None:
    values = torch.randn(12 * QUANT_BLOCK).to(dtype)
    whole = there_and_back(values, 1, dtype)
    for rows in (2, 3, 4, 12):
        assert torch.equal(there_and_back(values, rows, dtype), whole)
    assert torch.equal(there_and_back(whole.float(), 1), there_and_back(whole.float(), 3))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_that_is_not_finite_is_nan_and_the_others_are_not(bad: float) -> None:
    values = torch.randn(3 * QUANT_BLOCK)
    values[QUANT_BLOCK + 7] = bad
    back = there_and_back(values, 1).view(3, -1)
    assert back[1].isnan().all()
    assert back[[0, 2]].isfinite().all()


def test_zeros_stay_zeros_and_the_smallest_numbers_do_no_harm() -> None:
    values = torch.zeros(2 * QUANT_BLOCK)
    values[QUANT_BLOCK] = 1e-45
    back = there_and_back(values, 1)
    assert not back[:QUANT_BLOCK].any()
    assert back.abs().max() <= 1e-40


@pytest.mark.parametrize("largest", [2.0**-149 * n for n in (1, 63, 64, 100, 190, 191, 1000)])
def test_subnormal_numbers_keep_their_signs_and_are_off_by_their_largest_at_most(
    largest: float,
) -> None:
    """The scale of such a block is rounded to a few steps of the smallest number, or to zero."""
    values = torch.linspace(-largest, largest, QUANT_BLOCK)
    back = there_and_back(values, 1)
    assert ((back == 0) | (back.sign() == values.sign())).all()
    assert (back - values).abs().max() <= largest


def test_a_row_takes_a_quarter_of_fp32() -> None:
    assert packed_size(1024) == 1024 + 4 * 4
