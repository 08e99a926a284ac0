"""Sums that begin inside of nodes: the same bits in every grouping of the ranks into nodes."""

from __future__ import annotations

import pytest
import torch

from tests.support.world import WorldPool
from zero_comm.collectives import Collectives, wait
from zero_comm.topology import Topology


def gathered(nodes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The rank that each shard comes from, and the rows by rank."""
    collectives = Collectives()
    collectives.lay_out(Topology(nodes=nodes))
    full = torch.zeros(4 * 3, dtype=torch.int64)
    collectives.own(full).fill_(collectives.rank)
    wait(collectives.all_gather(full, "shards"))
    rows = collectives.everybodys(torch.tensor([10 * collectives.rank]), "rows")
    return full[::3].tolist(), rows.flatten().tolist()


@pytest.mark.parametrize(
    ("nodes", "owners"), [((2, 2), [0, 2, 1, 3]), ((3, 1), [0, 1, 3, 2]), ((4,), [0, 1, 2, 3])]
)
@pytest.mark.corners(nodes=[(2, 2)])
def test_shards_lie_in_the_order_of_owners_and_rows_in_that_of_ranks(
    worlds: WorldPool, nodes: tuple[int, ...], owners: list[int]
) -> None:
    assert worlds.run(4, gathered, nodes) == [(owners, [0, 10, 20, 30])] * 4
