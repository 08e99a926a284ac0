from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zero_engine.optim.zero_optimizer import _block_order
from zero_engine.sharding.flat_unit import BLOCK, plan_layout


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_block_norms_are_summed_in_one_order_at_every_world_size(world: int) -> None:
    """Every rank hands in its blocks of each unit; the sum must see unit after unit, block after
    block, and nothing of the padding, whose size depends on the world."""
    layouts = [plan_layout([("a", torch.Size([n]), 0)]) for n in (1, 7 * BLOCK + 1, 4 * BLOCK)]
    sizes = [layout.padded(world) // world for layout in layouts]
    ranks = [
        [(unit, rank * size // BLOCK + i) for unit, size in enumerate(sizes)
         for i in range(size // BLOCK)]
        for rank in range(world)
    ]  # fmt: skip
    gathered = [block for rank in ranks for block in rank]
    units = [SimpleNamespace(layout=layout) for layout in layouts]
    order = _block_order(units, sizes, world)  # type: ignore[arg-type]
    expected = [(0, 0), *((1, i) for i in range(8)), *((2, i) for i in range(4))]
    assert [gathered[i] for i in order.tolist()] == expected
