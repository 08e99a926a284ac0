"""Whether the sums that are kept between the micro-steps of a step fit into memory.

Owns the comparison, on the device and on the host, in the first backward and again with another
batch or block, as a checkpoint may bring them. Must always hold: all ranks come to the same answer.
What AdamW allocates in its first step is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch

from zero_checkpoint.saving.staging_memory import available_bytes
from zero_comm.sums.plan import Where
from zero_contract.errors import ConfigError
from zero_engine.accumulation import Accumulation
from zero_engine.parts import Core, Run


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one rank, before anything is kept between micro-steps."""

    here_bytes: int
    """The most that it is going to keep on the device."""
    away_bytes: int
    """The most that it is going to keep in host memory."""
    by_owner_bytes: int
    """The most that it would keep in all if owners added what comes in every micro-step."""
    free_bytes: int
    """On the device."""
    host_free_bytes: int
    """Its share of what is free in the memory of its host."""


def check_memory(core: Core, run: Run) -> None:
    """Check on all ranks that what they keep of the sums between micro-steps fits. Collective.

    Raises:
        ConfigError: It does not fit on some rank.
    """
    assert core.zero is not None
    where = run.accumulation.where if run.withholds else Where.OWNER
    chosen = replace(run.accumulation, where=where, block=core.zero.reduction_block)
    micro_batches = run.plan().microbatches
    elements = sum(unit.padded for unit in core.zero.units)
    by_owner = chosen.kept_by_owner_bytes(micro_batches, elements)
    if chosen.where is Where.OWNER and not by_owner:  # on no rank
        return
    kept = chosen.most_kept_bytes(micro_batches, run.rank, elements)
    topology = core.collectives.topology
    # Shared by the ranks of a node.
    host_free = available_bytes() // topology.nodes[topology.place(run.rank)[0]]
    if core.device.type == "cuda":
        here, free = chosen.here_bytes(kept), _free_bytes(core.device)
    else:  # device and host are one
        here, free = kept, host_free
    own = RankMemory(here, kept - here, by_owner, free, host_free)
    numbers = torch.tensor(astuple(own), device="cpu")
    rows = core.collectives.everybodys(numbers, "memory that is left").tolist()
    compare(chosen, [RankMemory(*row) for row in rows])


def _free_bytes(device: torch.device) -> int:
    """What can be allocated on a GPU: what is free there, and what this process has set aside."""
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


def compare(chosen: Accumulation, ranks: Sequence[RankMemory]) -> None:
    """Check that what is kept fits on every rank.

    Raises:
        ConfigError: It does not fit on some rank.
    """
    for rank, its in enumerate(ranks):
        keeps = f'elastic.accumulate: "{chosen.where}" keeps'
        if its.here_bytes > its.free_bytes:
            raise ConfigError(
                f"{keeps} {its.here_bytes >> 20} MiB of sums on rank {rank} between micro-steps, "
                f"and {its.free_bytes >> 20} MiB are left there; {_remedy(chosen, its, 'lower')}"
            )
        if its.away_bytes > its.host_free_bytes:
            raise ConfigError(
                f"{keeps} {its.away_bytes >> 20} MiB of sums of rank {rank} in host memory "
                f"between micro-steps, beyond elastic.accumulate_device_bytes, and "
                f"{its.host_free_bytes >> 20} MiB are left there for each rank of its node; "
                f"{_remedy(chosen, its, 'raise')}"
            )


def _remedy(chosen: Accumulation, its: RankMemory, change: str) -> str:
    owner = f'use "owner", which keeps {its.by_owner_bytes >> 20} MiB and sends more'
    aligned = f"train on a multiple of {chosen.block} ranks, which keep nothing"
    bound = f", or {change} elastic.accumulate_device_bytes, beyond which sums are on the host"
    return (
        f"{aligned if chosen.where is Where.OWNER else owner}"
        f"{bound if chosen.native_bytes is None else ''}, or give the rank more memory"
    )
