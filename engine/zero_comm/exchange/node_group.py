"""ZeRO++'s hpZ: the group of the ranks of one node, for gathers from secondary shards.

Source of the idea: ZeRO++ (arXiv 2306.10209), hierarchical partitioning.
"""

from __future__ import annotations

import torch.distributed as dist

from zero_comm.exchange.collectives import Collectives
from zero_comm.exchange.issue_order import IssueOrder
from zero_comm.exchange.transports import own_group, timeout_of
from zero_comm.waiting import Interrupt
from zero_comm.worker.distributed import local_device


def node_exchanges(
    size: int, interrupt: Interrupt | None = None, order: IssueOrder | None = None
) -> Collectives:
    """The exchanges within this rank's group of `size` consecutive ranks, a divisor of the world.

    Collective. `order` is compared by all ranks: all groups do the same, each with its own ranks.

    Raises:
        PeerLost: A peer is lost.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    division = [range(first, first + size) for first in range(0, world, size)]
    node = Collectives(
        own_group(division, timeout_of(None)),
        interrupt,
        name=f"deadlock/{rank // size}",
        order=order,
        division=division,
    )
    node.meet(local_device())
    return node
