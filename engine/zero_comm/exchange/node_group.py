"""ZeRO++'s hpZ: the group of the ranks of one node, for gathers from secondary shards.

Source of the idea: ZeRO++ (arXiv 2306.10209), hierarchical partitioning.
"""

from __future__ import annotations

import logging

import torch.distributed as dist

from zero_comm.exchange.collectives import Collectives
from zero_comm.exchange.issue_order import IssueOrder
from zero_comm.exchange.transports import own_group, timeout_of
from zero_comm.waiting import Interrupt
from zero_comm.worker.distributed import local_device

_log = logging.getLogger(__name__)


def node_exchanges(
    size: int, interrupt: Interrupt | None = None, order: IssueOrder | None = None
) -> Collectives | None:
    """The exchanges within this rank's group of `size` consecutive ranks.

    Collective. `order` is compared by all ranks: all groups do the same, each with its own ranks.

    Returns:
        None if the world does not divide into several such groups: weights are then gathered from
        all ranks every time, with the same bits.

    Raises:
        PeerLost: A peer is lost.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return None
    if world % size or world == size:
        if rank == 0:
            _log.info(
                "zero_hpz_partition_size %d: %d ranks are not several such groups; weights are "
                "gathered from all of them",
                size,
                world,
            )
        return None
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
