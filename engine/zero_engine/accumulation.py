"""Where the sums of several micro-steps are formed: `elastic.accumulate`, in one round of a run.

Owns the choice, and what follows from it: who runs which micro-batch, and the plan of each step.
Must always hold: the choice changes no bit; all ranks choose the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from zero_comm.reduction_plan import (
    DEFAULT_BLOCK,
    SUM_BYTES,
    Plan,
    Where,
    most_pending,
    plan_reduction,
)
from zero_comm.topology import Topology
from zero_contract.errors import ConfigError
from zero_data.global_batch import Assignment, contiguous, node_turns, strided
from zero_engine.config import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulation:
    """Where the pieces of several micro-steps are added, and by which ranks."""

    where: Where
    topology: Topology
    block: int
    """B, by which nodes take turns."""
    reason: str = ""
    """Why it is not what the config asks for."""

    @property
    def assignment(self) -> Assignment:
        """Who runs which micro-batch."""
        if self.where is Where.NODE:
            return node_turns(self.topology.nodes, self.block)
        world = self.topology.world
        return contiguous(world) if self.where is Where.LOCAL else strided(world)

    def plan(self, micro_batches: int) -> Plan | None:
        """That of a step; None if owners add what comes in every micro-step."""
        return None if self.where is Where.OWNER else _plan(self, micro_batches)

    def most_under_way(self, micro_batches: int, gradient_bytes: int) -> float | None:
        """As `Plan.most_under_way`; None if gradients are sent to their owners directly."""
        if self.where is Where.OWNER and not self.topology.divides:
            return None
        plan = self.plan(micro_batches)
        if plan is None:
            count = min(micro_batches, 2 * self.block * self.topology.world)  # it repeats then
            rows = self.assignment.rows(count)
            plan = plan_reduction(rows, block=self.block, nodes=self.topology.nodes)
        return plan.most_under_way(gradient_bytes)

    def most_kept_bytes(self, micro_batches: int, rank: int, elements: int) -> int:
        """The most that a rank keeps between the micro-steps of a step, beside the sums it owns."""
        plan = self.plan(micro_batches)
        if plan is None:
            return self.kept_by_owner_bytes(micro_batches, elements)
        steps = range(len(plan.micro_steps))
        return max(plan.kept_bytes(step, rank, elements) for step in steps)

    def kept_by_owner_bytes(self, micro_batches: int, elements: int) -> int:
        """The same of each rank, if owners add what comes in every micro-step."""
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


def choose(config: Config, topology: Topology) -> Accumulation:
    """Where this round adds; "owner" where the other modes have nothing to save, or cannot know.

    Args:
        config: The run's.
        topology: The nodes of this round.
    """
    where, reason = Where(config.elastic.accumulate), ""
    if where is Where.OWNER:
        pass
    elif topology.world == 1:
        reason = "there is one rank"
    elif where is Where.NODE and len(topology.nodes) == 1:
        reason = "all ranks are on one node"
    elif not config.managed_gradient_accumulation:
        reason = "the script decides where a step ends (managed_gradient_accumulation: false)"
    return Accumulation(
        where=Where.OWNER if reason else where,
        topology=topology,
        block=config.elastic.reduction_block or DEFAULT_BLOCK,
        reason=reason,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The memory of one rank, before anything is kept between micro-steps."""

    kept_bytes: int
    """The most that it is going to keep."""
    by_owner_bytes: int
    """The most that it would keep if owners added what comes in every micro-step."""
    free_bytes: int


def check_room(where: Where, ranks: Sequence[Room]) -> None:
    """Check that what is kept between micro-steps fits on every rank.

    Raises:
        ConfigError: It does not fit on some rank.
    """
    for rank, room in enumerate(ranks):
        if room.kept_bytes > room.free_bytes:
            raise ConfigError(
                f'elastic.accumulate: "{where}" keeps {room.kept_bytes >> 20} MiB of sums on rank '
                f"{rank} between micro-steps, and {room.free_bytes >> 20} MiB are left there; use "
                f'"owner", which keeps {room.by_owner_bytes >> 20} MiB and sends more, or give the '
                "rank more memory"
            )


def check_block(accumulation: Accumulation, block: int) -> None:
    """Check the block of a checkpoint that a run resumes from.

    Raises:
        ConfigError: Micro-batches are divided among the ranks by another one.
    """
    if accumulation.where is not Where.OWNER and accumulation.block != block:
        raise ConfigError(
            f'elastic.accumulate: "{accumulation.where}" divides micro-batches by blocks of '
            f"{accumulation.block}, and the run of this checkpoint sums gradients in blocks of "
            f"{block}; set elastic.reduction_block to {block} as well"
        )
