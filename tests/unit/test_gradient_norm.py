"""Which rank norms which elements of the shards of FSDP2."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_comm.reduction import NORM_BLOCK
from zero_torch.gradient_norm import crossings, row_bounds, share_of


@given(rows=st.integers(1, 40), width=st.integers(1, 400), world=st.integers(1, 9))
def test_every_element_is_normed_once_by_the_rank_of_its_block(
    rows: int, width: int, world: int
) -> None:
    bounds = row_bounds((rows, width), world)
    at = 0
    for tensor, holder, target, start, stop in crossings([bounds], world):
        assert (tensor, start) == (0, at)
        assert bounds[holder] <= start < stop <= bounds[holder + 1]
        assert start // share_of(rows * width, world) == target < world
        assert (stop - 1) // share_of(rows * width, world) == target
        at = stop
    assert at == rows * width
    assert share_of(rows * width, world) % NORM_BLOCK == 0


def test_rows_are_divided_as_torch_chunk_divides_them() -> None:
    for rows in range(1, 12):
        for world in range(1, 7):
            chunks = torch.arange(rows * 3).view(rows, 3).chunk(world)
            begins = [int(chunk[0, 0]) for chunk in chunks]
            expected = begins + [rows * 3] * (world + 1 - len(begins))
            assert row_bounds((rows, 3), world) == expected
