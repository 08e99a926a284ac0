"""ZeRO++'s hpZ: the group of the ranks of one node, for gathers from secondary shards.

Source of the idea: ZeRO++ (arXiv 2306.10209), hierarchical partitioning.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import torch.distributed as dist

from zero_comm.collectives import Collectives
from zero_comm.distributed import local_device
from zero_comm.transports import timeout_of
from zero_comm.waiting import Interrupt

_log = logging.getLogger(__name__)


def node_exchanges(size: int, interrupt: Interrupt | None = None) -> Collectives | None:
    """The exchanges within this rank's group of `size` consecutive ranks. Collective.

    None if the world does not divide into several such groups: weights are then gathered from all
    ranks every time, with the same bits.
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
    timeout = timedelta(seconds=timeout_of(None))
    groups = [
        dist.new_group(range(first, first + size), timeout=timeout)
        for first in range(0, world, size)
    ]
    node = Collectives(groups[rank // size], interrupt, name=f"deadlock/{rank // size}")
    node.meet(local_device())
    return node
