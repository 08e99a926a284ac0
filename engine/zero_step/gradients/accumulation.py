"""Where sums are formed in one round of a run: inside of nodes or not, and `elastic.accumulate`.

Owns what follows from it: who runs which micro-batch, the plan of each step, and what is kept.
Must always hold: no bit depends on it. The choice is the engine's (`zero_engine.layout`), or that
of `zero_torch.wrapped`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from zero_comm.sums.plan import (
    SUM_BYTES,
    Plan,
    Where,
    most_pending,
    plan_reduction,
)
from zero_comm.sums.quantization import PACKED_BYTES
from zero_comm.topology import Topology
from zero_contract.errors import ConfigError
from zero_data.global_batch import Assignment, contiguous, node_turns, strided

SHARDED = (
    'elastic.accumulate: "local" keeps sums as large as the whole gradient on every rank, which '
    '{} shards; use {}, or "node", whose sums are as large as a node\'s share'
)
BY_BACKEND = (
    'elastic.accumulate: "node" adds gradients before they are sent, which elastic.reduction '
    '"native" leaves to others; remove one of the two'
)
"""Refusals."""


def why_owners(where: Where, topology: Topology) -> str:
    """Why owners add in this round, where the config says otherwise; empty: they need not."""
    if where is not Where.OWNER and topology.world == 1:
        return "there is one rank"
    if where is Where.NODE and len(topology.nodes) == 1:
        return "all ranks are on one node"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulation:
    """Where the pieces of several micro-steps are added, and by which ranks."""

    where: Where
    topology: Topology
    block: int
    """B, by which nodes take turns."""
    native_bytes: int | None = None
    """Of each element, what "local" keeps beside the sums if the backend makes them; None: they are
    made in order, of pieces."""
    rounds: bool = False
    """Whether the sum of each block is rounded, and travels as int8 if one node has all of it."""

    @property
    def has_two_exchanges(self) -> bool:
        """Whether a sum takes two exchanges: inside of nodes, then from nodes to owners."""
        if self.native_bytes is not None:
            return False
        divides = self.topology.divides or (self.rounds and len(self.topology.nodes) > 1)
        return divides or self.where is not Where.OWNER

    @property
    def by_backend(self) -> bool:
        """Whether ranks add up what they have, and the backend makes one sum of it in a step."""
        return self.native_bytes is not None and self.where is not Where.OWNER

    @property
    def spread(self) -> str:
        """Why sums travel in fp32 although blocks are rounded, and what to set; empty: they do not.

        With "local" it depends on the length of a step.
        """
        nodes = self.topology.nodes
        in_one_node = all(size % self.block == 0 for size in nodes)
        if not self.rounds or len(nodes) < 2 or self.where is not Where.OWNER or in_one_node:
            return ""
        sizes, common = ", ".join(map(str, sorted(set(nodes)))), gcd(*nodes)
        return (
            f"zero_quantized_gradients: blocks of {self.block} micro-batches are spread over nodes "
            f"of {sizes} ranks, so sums travel between them in fp32; for int8 set "
            f"elastic.reduction_block to {common & -common} in a new run, or elastic.accumulate to "
            '"node"'
        )

    @property
    def assignment(self) -> Assignment:
        """Who runs which micro-batch."""
        world = self.topology.world
        if self.where is Where.OWNER or self.native_bytes is not None:
            return strided(world)
        if self.where is Where.NODE:
            return node_turns(self.topology.nodes, self.block)
        return contiguous(world)

    def plan(self, micro_batches: int) -> Plan | None:
        """The plan of a step; None if owners add what comes in every micro-step, or the backend."""
        if self.where is Where.OWNER or self.native_bytes is not None:
            return None
        return _plan(self, micro_batches)

    def most_under_way(self, micro_batches: int, gradient_bytes: float) -> float | None:
        """As `Plan.most_under_way`; None if gradients are sent to their owners directly."""
        if not self.has_two_exchanges:
            return None
        plan = self.plan(micro_batches)
        if plan is None:
            count = min(micro_batches, 2 * self.block * self.topology.world)  # it repeats then
            rows = self.assignment.rows(count)
            plan = plan_reduction(rows, block=self.block, nodes=self.topology.nodes)
        return plan.most_under_way(gradient_bytes, PACKED_BYTES if self.rounds else None)

    def most_kept_bytes(self, micro_batches: int, rank: int, elements: int) -> int:
        """The most that a rank keeps between the micro-steps of a step, beside the sums it owns."""
        if self.native_bytes is not None and self.where is Where.LOCAL:
            return self.native_bytes * elements if micro_batches > self.topology.world else 0
        plan = self.plan(micro_batches)
        if plan is None:
            return self.kept_by_owner_bytes(micro_batches, elements)
        steps = range(len(plan.micro_steps))
        return max(plan.kept_bytes(step, rank, elements) for step in steps)

    def kept_by_owner_bytes(self, micro_batches: int, elements: int) -> int:
        """The most that each rank keeps, if owners add what comes in every micro-step."""
        if self.native_bytes is not None:
            return 0
        world = self.topology.world
        pending = most_pending(self.block, world, micro_batches)
        return pending * -(-elements // world) * SUM_BYTES


@lru_cache(maxsize=8)  # a full step and the last one of an epoch, of a few engines
def _plan(accumulation: Accumulation, micro_batches: int) -> Plan:
    return plan_reduction(
        accumulation.assignment.rows(micro_batches),
        block=accumulation.block,
        nodes=accumulation.topology.nodes,
        where=accumulation.where,
    )


def check_block(accumulation: Accumulation, block: int) -> None:
    """Check the block of a checkpoint that a run resumes from.

    Raises:
        ConfigError: Micro-batches are divided among the ranks by another one.
    """
    divides = accumulation.where is not Where.OWNER and accumulation.native_bytes is None
    if divides and accumulation.block != block:
        raise ConfigError(
            f'elastic.accumulate: "{accumulation.where}" divides micro-batches by blocks of '
            f"{accumulation.block}, and the run of this checkpoint sums gradients in blocks of "
            f"{block}; set elastic.reduction_block to {block} as well"
        )
