"""The parts that an engine is made of, as two records: those of parameters, those of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import nn

from zero_comm.determinism import Hardware
from zero_comm.exchange.collectives import Collectives
from zero_comm.sums.plan import Plan, Where
from zero_data.global_batch import (
    Assignment,
    BatchShape,
    Cursor,
    MicroBatch,
    StepPlan,
    plan_rest,
    plan_step,
    strided,
)
from zero_data.ledger import Ledger
from zero_data.position_loader import Feed, PositionLoader
from zero_engine.layout import Layout
from zero_engine.offload_states import MovedStates
from zero_engine.optim.as_given import AsGiven
from zero_engine.optim.zero_optimizer import ZeroOptimizer
from zero_engine.sharding.flat_unit import FlatUnit
from zero_engine.sharding.grad_reducer import GradReducer
from zero_engine.sharding.overlapped_gather import OverlappedGather
from zero_engine.sharding.param_coordinator import ParamCoordinator
from zero_engine.stages import Stage
from zero_step.forward_writes import ForwardWrites
from zero_step.gradients.accumulation import Accumulation


@dataclass(frozen=True, kw_only=True)
class Core:
    """The parts for parameters."""

    layout: Layout
    module: nn.Module
    device: torch.device
    collectives: Collectives
    units: Sequence[FlatUnit]
    aliases: Mapping[str, str]
    zero: ZeroOptimizer | None
    """None, like the reducer, if no parameter is trained."""
    reducer: GradReducer | None
    coordinator: ParamCoordinator
    overlap: OverlappedGather
    guard: Callable[[], AbstractContextManager[None]]
    """A context around collectives that the script calls, for a peer that is lost."""
    hardware: Hardware
    """What computes in this round."""
    moved: MovedStates
    """The states that the script has moved off the device."""
    as_given: AsGiven
    writes: ForwardWrites

    @property
    def stage(self) -> Stage:
        """The ZeRO stage."""
        return self.layout.stage


@dataclass(kw_only=True)
class Run:
    """The parts for samples, and the position of the run."""

    batch: BatchShape
    batch_from_world: bool
    """Whether the batch follows from the world size of the first round, or from a checkpoint."""
    cursor: Cursor
    rank: int
    world: int
    accumulation: Accumulation
    loader: Feed | None = None
    """The source of the batches; None: a DataLoader of the script."""
    ledger: Ledger | None = None
    managed: bool = True
    """Whether the batch decides where a step ends; otherwise the script, by calling `step()`."""
    summed_over: int | None = None
    """Gradients are sums over this number of ranks, that of the first round; None: means."""
    declared: bool = False
    """Whether the end of a step is declared before its last micro-step. Then a library's loop runs,
    which writes its state only after it has called for a checkpoint."""

    loaded_samples: int | None = None
    """The samples per step in the run of the loaded checkpoint; None if none was loaded."""
    hardware_changed: bool = False
    """Whether the loaded checkpoint was made on other hardware."""
    _since: tuple[int, int, int] = 0, 0, 0
    """The batch of another loop that is run now, by its seed, and step and micro-step then."""

    def plan(self) -> StepPlan:
        """The current or next step; the largest that it can be, if the script ends it."""
        order = self.loader.order if self.loader is not None else None
        epoch_size = order.epoch_size if order is not None else None
        if not self.managed:
            return plan_rest(self.cursor.samples, self.batch, epoch_size)
        sizes = order.sizes() if order is not None else None
        return plan_step(self.cursor.samples, self.batch, epoch_size, sizes)

    def ending(self) -> StepPlan:
        """The step that ends now, in its last micro-step."""
        plan = self.plan()
        return plan if self.managed else plan.first(self.cursor.micro, self.world)

    def microbatch(self) -> MicroBatch:
        """The micro-batch that this rank runs in the current or next micro-step."""
        return self.plan().assigned(self.assignment, self.cursor.micro, self.rank)

    @property
    def assignment(self) -> Assignment:
        """The rank of each micro-batch; data that a script divides go from rank to rank."""
        return self.accumulation.assignment if self._is_planned else strided(self.world)

    def reduction_plan(self) -> Plan | None:
        """The plan of the current step's sums; None if owners add what comes."""
        return self.accumulation.plan(self.plan().microbatches) if self._is_planned else None

    @property
    def withholds(self) -> bool:
        """Whether ranks send sums of several micro-steps, whose end must be known then."""
        by_backend = self.managed and self.accumulation.by_backend
        return by_backend or self.reduction_plan() is not None

    def acting(self, block: int) -> Accumulation:
        """The way in which sums of this block are formed, as this run loads its batches."""
        where = self.accumulation.where if self.withholds else Where.OWNER
        return replace(self.accumulation, where=where, block=block)

    @property
    def _is_planned(self) -> bool:
        # Only batches that the engine hands out are run by whom it chooses.
        return self.managed and self.loader is not None

    @property
    def drawn(self) -> int:
        """Without a loader, the seed of the batch that the loop of another training runs; or 0."""
        return 0 if self.loader is not None else PositionLoader.drawn

    def place(self) -> tuple[int, ...]:
        """What the random numbers of a forward follow from, beside the seed of the run."""
        cursor = self.cursor
        if not self.drawn:
            return cursor.step, self.microbatch().index
        # A generator may be trained in some steps of that loop only: there its own micro-batch
        # stands, and is another one on each rank.
        if self.drawn != self._since[0]:
            self._since = self.drawn, cursor.step, cursor.micro
        _, step, micro = self._since
        return cursor.step, self.drawn, max(0, cursor.micro - micro * (cursor.step == step))

    def adopt_batch(self, batch: BatchShape) -> None:
        """Continue with the batch of a checkpoint."""
        self.batch = batch
        if self.loader is not None:
            self.loader.order.batch = batch
