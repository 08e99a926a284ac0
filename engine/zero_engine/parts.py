"""What an engine is made of: records that `initialize` fills, `engine` and `persistence` read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from zero_comm.collectives import Collectives
from zero_data.elastic_loader import Feed
from zero_data.global_batch import BatchShape, Cursor, MicroBatch, StepPlan, plan_rest, plan_step
from zero_data.ledger import Ledger
from zero_engine.offload_states import MovedStates
from zero_engine.optim.zero_optimizer import ZeroOptimizer
from zero_engine.sharding.flat_unit import FlatUnit
from zero_engine.sharding.grad_reducer import GradReducer
from zero_engine.sharding.param_coordinator import ParamCoordinator
from zero_engine.stages import Stage


@dataclass(frozen=True, kw_only=True)
class Core:
    """The parts that know parameters."""

    module: nn.Module
    device: torch.device
    dtype: torch.dtype
    """What the model computes in."""
    stage: Stage
    collectives: Collectives
    units: Sequence[FlatUnit]
    aliases: Mapping[str, str]
    zero: ZeroOptimizer | None
    """None, as is the reducer, if nothing is trained."""
    reducer: GradReducer | None
    coordinator: ParamCoordinator
    guard: Callable[[], AbstractContextManager[None]]
    """Around what is collective and called by the script: what to do when a peer is gone."""
    moved: MovedStates
    """What the script has moved off the device for a while."""


@dataclass(kw_only=True)
class Run:
    """The parts that know samples, and where the run is."""

    batch: BatchShape
    batch_from_world: bool
    """The config leaves the batch to the world size of the first round; a checkpoint knows it."""
    cursor: Cursor
    rank: int
    world: int
    loader: Feed | None = None
    """Where the batches come from; None: from a loader of the script's own."""
    ledger: Ledger | None = None
    managed: bool = True
    """The batch decides where a step ends; False: the script does, by calling `step()`."""
    summed_over: int | None = None
    """Gradients are sums over so many ranks, those of the first round; None: they are means."""
    declared: bool = False
    """The script does, by saying so beforehand. It is a library's loop then, which has state of
    its own, and writes that after it has called for a checkpoint."""

    loaded_samples: int | None = None
    """In a step of the run that the loaded checkpoint is from; None if none was loaded."""

    def plan(self) -> StepPlan:
        """The step under way, or about to begin; as far as it can go, if the script ends it."""
        epoch_size = self.loader.epoch_size if self.loader is not None else None
        plan = plan_step if self.managed else plan_rest
        return plan(self.cursor.samples, self.batch, epoch_size)

    def ending(self) -> StepPlan:
        """The step that ends now, in its last micro-step."""
        plan = self.plan()
        return plan if self.managed else plan.first(self.cursor.micro, self.world)

    def microbatch(self) -> MicroBatch:
        """What this rank runs at the micro-step under way, or about to begin."""
        return self.plan().microbatch(self.cursor.micro, self.rank, self.world)

    def adopt_batch(self, batch: BatchShape) -> None:
        """Go on with the batch of a checkpoint."""
        self.batch = batch
        if self.loader is not None:
            self.loader.adopt_batch(batch)
