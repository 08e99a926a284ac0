"""The ZeRO stages as a table: what each one divides among the ranks.

A stage changes where bytes live and when they are sent, never a result. Everything that depends on
the stage reads one of the three flags below; nothing compares stage numbers.

Source of the idea: ZeRO (arXiv 1910.02054), P_os, P_os+g, P_os+g+p.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the table."""

    number: int
    shards_optimizer: bool
    """Each rank steps its own interval of the master weights, not all of them."""
    shards_gradients: bool
    """Gradients are sharded, and `no_sync` is refused, as in DeepSpeed. In fact they are sharded at
    every stage: each micro-batch is reduced at once, so a unit has a full gradient only briefly."""
    shards_parameters: bool
    """The full parameters of a unit exist only while its module computes."""


_TABLE = (
    Stage(0, shards_optimizer=False, shards_gradients=False, shards_parameters=False),
    Stage(1, shards_optimizer=True, shards_gradients=False, shards_parameters=False),
    Stage(2, shards_optimizer=True, shards_gradients=True, shards_parameters=False),
    Stage(3, shards_optimizer=True, shards_gradients=True, shards_parameters=True),
)
STAGES = {stage.number: stage for stage in _TABLE}
