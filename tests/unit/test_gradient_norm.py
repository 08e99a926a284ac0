"""Which rank norms which elements of the shards of FSDP2, and how blocks are normed."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from zero_comm.reduction import NORM_BLOCK, block_norms
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


class Normed(TorchFunctionMode):
    """Records how many rows each call of vector_norm gets."""

    rows: ClassVar[list[int]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.linalg.vector_norm:
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("numel", [1, 1024, 5 * 1024, 16 * 1024, 17 * 1024 + 3])
def test_norms_of_blocks_are_never_taken_of_fewer_rows_than_a_gpu_needs_for_equal_bits(
    numel: int,
) -> None:
    values = torch.linspace(-3, 5, numel)
    Normed.rows.clear()
    with Normed():
        found = block_norms(values)
        block_norms(values[:1])
    assert min(Normed.rows) >= 16
    filled = torch.nn.functional.pad(values, (0, -numel % NORM_BLOCK)).view(-1, NORM_BLOCK)
    assert torch.equal(found, torch.linalg.vector_norm(filled, dim=1))
