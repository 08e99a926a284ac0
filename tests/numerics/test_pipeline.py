"""The pipeline of reductions alone: a plain loop and a process group, and nothing above."""

from __future__ import annotations

import random
from collections import Counter
from math import inf

import pytest
import torch
from torch import Tensor

from tests.support.world import WorldPool
from zero_comm.exchange.collectives import Collectives
from zero_comm.sums.ordered_sum import OrderedSum
from zero_comm.sums.reduction import Turn
from zero_comm.topology import Topology
from zero_comm.waiting import Interrupt
from zero_step.gradients.pipeline import Pipeline, reduction_over

MICROBATCHES, BLOCK = 13, 4
LENGTHS = (12, 48, 24, 36, 12)
"""Of the gradients of one model, in elements: multiples of every world size."""


def gradient(microbatch: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * microbatch + number)
    scales = 10.0 ** torch.randint(-6, 7, (LENGTHS[number],), generator=generator)
    return torch.randn(LENGTHS[number], generator=generator) * scales


def summed(nodes: tuple[int, ...], depth: float, seed: int) -> list[list[float]]:
    """The sums of one step, which each rank polls in an order of its own."""
    device, interrupt = torch.device("cpu"), Interrupt()
    group = Collectives(interrupt=interrupt)
    group.lay_out(Topology(nodes=nodes))
    group.meet(device)
    two = group.topology.divides
    reduction = reduction_over(group, device, interrupt, alone=False, two=two)
    pipeline = Pipeline(reduction, depth=depth)
    sums = [OrderedSum(torch.empty(length // group.world), BLOCK) for length in LENGTHS]
    chance, done = random.Random(f"{seed} {group.rank}"), list[str]()
    for number, first in enumerate(range(0, MICROBATCHES, group.world)):
        live = min(group.world, MICROBATCHES - first)
        last = first + live == MICROBATCHES
        pipeline.begin(Turn(live=live, first=first == 0, last=last, micro_step=number), weight=0.5)
        for index, each in enumerate(sums):
            own = gradient(first + group.rank, index)

            def then(name: str = f"{number} {index}") -> None:
                done.append(name)

            pipeline.reduce(own, f"gradient {index}", each, then=then)
            come = Counter(under_way.number for under_way in pipeline.under_way)
            assert all(count <= depth for count in come.values())
            if chance.random() < 0.5:
                pipeline.poll()
        pipeline.complete()
        assert not pipeline.under_way
    in_order = [f"{n} {i}" for n in range(number + 1) for i in range(len(sums))]
    assert done == in_order, "one has overtaken another"
    for each in sums:
        each.settle()
    return [
        group.everybodys(each.total, "sums")[list(group.owners)].flatten().tolist() for each in sums
    ]


@pytest.mark.parametrize("depth", [1, 2, inf])
@pytest.mark.parametrize("nodes", [(3,), (2, 2), (3, 1)])
@pytest.mark.corners(depth=[2], nodes=[(2, 2), (3,)])
def test_a_plain_loop_has_the_sums_of_one_rank(
    worlds: WorldPool, nodes: tuple[int, ...], depth: float
) -> None:
    """However far each rank runs ahead, and wherever sums are formed."""
    (alone,) = worlds.run(1, summed, (1,), 1, 0)
    assert worlds.run(sum(nodes), summed, nodes, depth, 7) == [alone] * sum(nodes)
