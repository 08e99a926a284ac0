"""The keys of the section "elastic" that every training has, whoever shards it."""

from __future__ import annotations

from dataclasses import dataclass

from zero_comm.determinism import check
from zero_comm.sums.order import NATIVE, check_mode


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """The settings that the bits of a run depend on, and where the record of its samples is."""

    sample_ledger: str | None = None
    """Directory for the record of consumed sample ids. Without it no record is kept."""
    reduction_block: int | None = None
    """Micro-batches that are summed in a tree, a power of two; the bits of every sum depend on it.
    null: 8 in a new run, and what it was in one that is resumed."""
    reduction: str | None = None
    """How gradients are summed: "ordered", with the same bits at every world size, or "native", by
    the backend's own reduce-scatter and all-reduce, with bits that depend on the number of ranks.
    null: "ordered"; a checkpoint of a "native" run is then refused."""
    deterministic: str | None = None
    """Whether kernels must repeat themselves and hardware must stay the same. "error": what breaks
    that is an error: an operator without such a kernel, unequal ranks, a resume on other hardware.
    "warn": it is logged. "off": torch chooses kernels as the script lets it. null: "warn"; where
    gradients are not summed in a fixed order "off"."""

    @property
    def is_native(self) -> bool:
        """Whether the backend sums gradients."""
        return self.reduction == NATIVE

    def __post_init__(self) -> None:
        check_mode(self.reduction, self.reduction_block)
        check(self.deterministic)
