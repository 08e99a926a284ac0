"""The keys of the section "elastic" that every training has, whoever shards it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zero_comm.determinism import Deterministic
from zero_comm.sums.order import NATIVE
from zero_comm.sums.plan import Where
from zero_contract.errors import ConfigError
from zero_contract.sections import Count


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """The settings that the bits of a run depend on, and where the record of its samples is."""

    sample_ledger: str | None = None
    """Directory for the record of consumed sample ids. Without it no record is kept."""
    reduction_block: Count | None = None
    """Micro-batches that are summed in a tree, a power of two; the bits of every sum depend on it.
    null: 8 in a new run, and what it was in one that is resumed."""
    reduction: Literal["ordered", "native"] | None = None
    """How gradients are summed: "ordered", with the same bits at every world size, or "native", by
    the backend's own reduce-scatter and all-reduce, with bits that depend on the number of ranks.
    null: "ordered"; a checkpoint of a "native" run is then refused."""
    accumulate: Where = Where.OWNER
    """Where the sums of several micro-steps are formed; the bits are the same. "owner": by the
    owners of the sums, to whom gradients are sent in every micro-step. "node": inside each node,
    which sends one sum of each block of `reduction_block` micro-batches. "local" (DDP, and stages
    0 and 1): by each rank, which sends its sums once in a step."""
    deterministic: Deterministic | None = None
    """Whether kernels must repeat themselves and hardware must stay the same. "error": what breaks
    that is an error: an operator without such a kernel, unequal ranks, a resume on other hardware.
    "warn": it is logged. "off": torch chooses kernels as the script lets it. null: "warn"; where
    gradients are not summed in a fixed order "off"."""

    in_place: bool = False
    """Whether workers stay in their processes when a node joins or leaves, or a peer is lost, where
    they can; the log says why where they cannot."""

    @property
    def is_native(self) -> bool:
        """Whether the backend sums gradients."""
        return self.reduction == NATIVE

    def __post_init__(self) -> None:
        block = self.reduction_block
        if block is not None and self.is_native:
            raise ConfigError(
                'elastic.reduction_block: with elastic.reduction "native" the backend chooses the '
                "order; remove one of the two"
            )
        if block is not None and block & (block - 1):
            below = 1 << block.bit_length() - 1
            raise ConfigError(
                f"elastic.reduction_block is {block}, which is not a power of two; "
                f"set it to {below} or {2 * below}"
            )
