"""Whether the sums that are kept between the micro-steps of a step fit into memory, and where.

What a GPU has no room for waits in host memory, which changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from zero_comm.sums.plan import SUM_BYTES, Where
from zero_contract.errors import ConfigError
from zero_contract.kernel import available_bytes
from zero_engine.parts import Core, Run
from zero_step.gradients.accumulation import Accumulation

_MOMENTS = 2
"""Values of each element that the first step allocates, if it allocates any: those of Adam."""
_REDUCED = 3
"""Gradients of units at a time: being filled, being sent, being received."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host memory of one rank, before anything is kept between micro-steps."""

    kept_bytes: int
    """The most that the rank is going to keep there."""
    by_owner_bytes: int
    """The most that it would keep in all if owners added what comes in every micro-step."""
    free_bytes: int
    """Its share of what is free."""


def check_memory(core: Core, run: Run) -> None:
    """Choose on all ranks where sums wait between micro-steps. Collective.

    Raises:
        ConfigError: They fit nowhere on some rank.
    """
    zero, collectives = core.zero, core.collectives
    assert zero is not None
    chosen = run.acting(zero.reduction_block)
    micro_batches = run.plan().microbatches
    elements = sum(unit.padded for unit in zero.units)
    by_owner = chosen.kept_by_owner_bytes(micro_batches, elements)
    if chosen.where is Where.OWNER and not by_owner:  # on no rank
        return
    kept = chosen.most_kept_bytes(micro_batches, run.rank, elements)
    if core.device.type == "cuda":
        idle = torch.cuda.memory_reserved(core.device) - torch.cuda.memory_allocated(core.device)
        free = torch.cuda.mem_get_info(core.device)[0] + idle
        # What the first backward and the first step are going to allocate there.
        here = [unit for unit in zero.units if not unit.tiers.offloaded]
        begun = any(True for _ in zero.remembered(here))
        state = 0 if begun else _MOMENTS * SUM_BYTES * sum(unit.master.numel() for unit in here)
        largest = max(unit.padded * unit.full.element_size() for unit in zero.units)
        zero.spill.budget_bytes = device_budget(kept, free, state + _REDUCED * largest)
        kept -= min(kept, zero.spill.budget_bytes) if zero.spill.budget_bytes is not None else kept
    # Shared by the ranks of a node.
    ranks = collectives.topology.nodes[collectives.topology.place(run.rank)[0]]
    own = HostMemory(kept, by_owner, available_bytes() // ranks)
    numbers = torch.tensor(astuple(own), device="cpu")
    # All ranks compare all numbers, and so come to the same answer.
    rows = collectives.everybodys(numbers, "memory that is left").tolist()
    compare(chosen, [HostMemory(*row) for row in rows])


def device_budget(kept: int, free: int, coming: int) -> int | None:
    """The bytes that may wait on a device; None: all, because they fit beside what is coming."""
    return None if kept + coming <= free else max(free - coming, 0)


def compare(chosen: Accumulation, ranks: Sequence[HostMemory]) -> None:
    """Check that what is kept in host memory fits on every rank.

    Raises:
        ConfigError: It does not fit on some rank.
    """
    for rank, its in enumerate(ranks):
        if its.kept_bytes > its.free_bytes:
            owner = f'use "owner", which keeps {its.by_owner_bytes >> 20} MiB and sends more'
            aligned = f"train on a multiple of {chosen.block} ranks, which keep nothing"
            raise ConfigError(
                f'elastic.accumulate: "{chosen.where}" keeps {its.kept_bytes >> 20} MiB of sums of '
                f"rank {rank} in host memory between micro-steps, and {its.free_bytes >> 20} MiB "
                "are left there for each rank of its node; "
                f"{aligned if chosen.where is Where.OWNER else owner}, or give the rank more memory"
            )
