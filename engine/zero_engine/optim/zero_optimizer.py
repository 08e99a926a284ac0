"""One optimizer step on the shards: norm, consensus, clip, step, new parameters.

Owns the gradient totals, the segments that the torch optimizer steps, and the decision to skip.
Must always hold:

- The user's optimizer object stays the same; only the `params` of its groups are replaced, by
  *segments*: for each unit and group, the part of the run that this rank steps. Or, for one that
  must see whole parameters, by those that this rank owns (`owner_steps`).
- One all-gather a step carries block norms and each rank's notes, so that every rank decides
  from the same numbers: the global norm, whether it is finite, who asks to leave.
- The norm is summed over blocks in an order that does not depend on the world size.
- A step is skipped if and only if the norm is not finite: an overflow is seen by every rank.

Called by `engine`; `optimizer_state` and `owner_state` read and write what it remembers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_comm.collectives import Collectives, wait
from zero_comm.reduction import NORM_BLOCK, BlockNorm, total_norm
from zero_engine.optim.loss_scaler import LossScaling
from zero_engine.optim.owner_steps import StepByOwners
from zero_engine.optim.sharded_whole import ShardedWhole
from zero_engine.optim.steps import StepAtOnce, Steps
from zero_engine.optim.sub_groups import Pace, StepBySubGroups
from zero_engine.optim.torch_muon import stepped
from zero_engine.optim.whole import LooksAtWhole
from zero_engine.sharding.flat_unit import FlatUnit, overlap
from zero_engine.sharding.segments import Segment
from zero_engine.stages import Stage

_NORM_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ and DeepSpeed


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What all ranks agree on after a step."""

    applied: bool
    """False if the norm was not finite: weights and moments are unchanged."""
    norm: float
    """Global gradient norm before clipping, of the loss without its scale."""
    notes: Tensor
    """[world, notes], on the CPU: what each rank handed in."""
    scaling: str = ""
    """What the step did to the loss scale, as a sentence; empty if nothing."""
    culprit: str = ""
    """The first parameter whose gradient is not finite, if one was skipped for it."""


class ZeroOptimizer:
    """Steps a torch optimizer on this rank's share of the trained units."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[FlatUnit],
        stage: Stage,
        collectives: Collectives,
        clip: float,
        scaling: LossScaling | None = None,
        pace: Pace | None = None,
        moments: torch.dtype = torch.float32,
        *,
        whole: bool = False,
    ) -> None:
        """Take over an optimizer.

        Args:
            optimizer: Made on the parameters of the units.
            units: All that are trained.
            stage: What is divided.
            collectives: The ranks that share the units.
            clip: The largest norm of all gradients; 0: any.
            scaling: Of the loss.
            pace: Of a step on what rests elsewhere, or in 16 bits.
            moments: What the optimizer's state rests in.
            whole: The optimizer is to see whole parameters.
        """
        self.optimizer = optimizer
        self.units = tuple(units)
        self._stage = stage
        self._collectives = collectives
        self._clip = clip
        self.accumulating = False
        """There are gradients that no step has applied yet."""
        self.changing = False
        """Weights and state are no longer those of before a step, and the step has not ended."""
        self._scaling = scaling or LossScaling()
        self.scale_state = self._scaling.begin()
        device = units[0].full.device
        sizes = [unit.padded // collectives.world for unit in units]
        self._gradients = tuple(torch.zeros(u.master.numel(), device=device) for u in units)
        self.totals = self._gradients
        if not stage.shards_optimizer:
            self.totals = tuple(collectives.own(gradient) for gradient in self._gradients)
        lengths = [unit.layout.numel for unit in units]
        self._norm = BlockNorm(lengths, sizes, collectives.world, device)
        self.segments: tuple[Segment, ...] = () if whole else self._attach()
        self.steps: Steps | StepByOwners
        if whole:
            self.steps = StepByOwners(optimizer, units, self._gradients, collectives)
        else:
            self.steps = self._step_segments(pace, moments)
        self._tell_scale(overflow=False)

    @property
    def scale(self) -> float:
        """What the loss is multiplied with before backward; 1 outside fp16 training."""
        return self.scale_state.scale

    def scale_to_json(self) -> dict[str, Any]:
        """The state of the loss scale, for a checkpoint."""
        return self._scaling.to_json(self.scale_state)

    def restore_scale(self, saved: Mapping[str, Any]) -> None:
        """Go on with the loss scale of a checkpoint; a fixed one is the config's."""
        self.scale_state = self._scaling.resume(saved)
        self._tell_scale(overflow=False)

    def _tell_scale(self, *, overflow: bool) -> None:
        # DeepSpeed's optimizer has these, and scripts log them.
        told = {"cur_scale": self.scale, "loss_scale": self.scale, "overflow": overflow}
        for name, value in told.items():
            setattr(self.optimizer, name, value)

    @property
    def wholes(self) -> tuple[Tensor, ...]:
        """What each total is an interval of, where every rank steps everything; else empty."""
        return () if self._stage.shards_optimizer else self._gradients

    def gradient_sums(self) -> Iterator[Tensor]:
        """The tensors that hold gradients between micro-steps."""
        yield from self._gradients

    def _attach(self) -> tuple[Segment, ...]:
        """Put segments in the place of the groups' parameters."""
        groups = self.optimizer.param_groups
        segments = [segment for i in range(len(groups)) for segment in self._segments_of(i)]
        old_state = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for index, group in enumerate(groups):
            group["params"] = [s.param for s in segments if s.group == index]
        for segment in segments:
            if state := _adopted(segment, old_state):
                self.optimizer.state[segment.param] = state
        return tuple(segments)

    def _segments_of(self, group: int) -> list[Segment]:
        found = []
        for unit, gradients in zip(self.units, self._gradients, strict=True):
            if group in unit.layout.runs():
                found.append(self._cut(unit, gradients, group))
        filled = [segment for segment in found if segment.stop > segment.start]
        # A group keeps at least one segment on every rank, if need be an empty one: its scalar
        # state (the step count) is then known everywhere.
        return filled or found[:1]

    def _cut(self, unit: FlatUnit, gradients: Tensor, group: int) -> Segment:
        low = unit.interval[0] if self._stage.shards_optimizer else 0
        run = unit.layout.runs()[group]
        start, stop = overlap(*run, low, low + unit.master.numel())
        part = slice(start - low, stop - low) if stop > start else slice(0, 0)
        weights = unit.master[part]
        # An empty one is stepped as it is: in the dtype of its gradient.
        param = nn.Parameter(weights if weights.numel() else weights.float())
        return Segment(unit, group, start, stop, param, gradients[part])

    def _step_segments(self, pace: Pace | None, moments: torch.dtype) -> Steps:
        on_shards = stepped(self.optimizer)
        steps = self._make_steps(on_shards, pace, moments)
        if isinstance(on_shards, LooksAtWhole):
            on_shards.whole = ShardedWhole(self.units, self.segments, self._collectives, steps)
        return steps

    def _make_steps(
        self, optimizer: torch.optim.Optimizer, pace: Pace | None, moments: torch.dtype
    ) -> Steps:
        low_precision = self.units[0].shard.dtype != torch.float32
        tiers = {u: u.tiers.state for u in self.units if low_precision or u.tiers.offloaded}
        if not tiers:
            return StepAtOnce(optimizer, self.segments)
        assert pace is not None
        totals = dict(zip(self.units, self.totals, strict=True))
        return StepBySubGroups(optimizer, self.segments, totals, tiers, pace, moments)

    def segments_by_group(self) -> Iterator[tuple[dict[str, Any], list[Segment]]]:
        """Each param group with its segments on this rank."""
        for index, group in enumerate(self.optimizer.param_groups):
            yield group, [segment for segment in self.segments if segment.group == index]

    def remembered(self, units: Container[FlatUnit]) -> Iterator[Tensor]:
        """The tensors of the optimizer's state that belong to some units."""
        if isinstance(self.steps, StepByOwners):
            yield from self.steps.remembered(units)
        for segment in self.segments:
            if segment.unit in units:
                state: dict[str, Any] = self.optimizer.state.get(segment.param, {})
                yield from (v for v in state.values() if isinstance(v, Tensor) and v.dim())

    def names_by_group(self) -> list[list[str]]:
        """The names of what each param group trains, in unit order."""
        names: list[list[str]] = [[] for _ in self.optimizer.param_groups]
        for unit in self.units:
            for slot in unit.layout.slots:
                if slot.group is not None:
                    names[slot.group].append(slot.fqn)
        return names

    def step(
        self, notes: Tensor, correction: Callable[[Tensor], float] = lambda _: 1.0
    ) -> StepOutcome:
        """Apply the gradient totals. Collective. The caller ends it, by `changing`.

        Args:
            notes: [n] fp32, the same n on all ranks; every rank gets everybody's.
            correction: From everybody's notes [world, n], on the CPU, what the totals are to be
                multiplied with.
        """
        blocks = self._norm.of_own(self.totals)
        everybodys = self._exchange(torch.cat([blocks, notes]))
        ordered = self._norm.in_order(everybodys[:, : blocks.numel()])
        everybodys_notes = everybodys[:, blocks.numel() :].cpu()
        factor = correction(everybodys_notes) / self.scale
        norm = total_norm(ordered) * factor
        applied = math.isfinite(norm)
        culprit = "" if applied else self._culprit(ordered)
        if applied:
            self.changing = True
            self._apply(norm, factor)
        self.accumulating = False
        self.scale_state, scaling = self._scaling.after(self.scale_state, not applied)
        self._tell_scale(overflow=not applied)
        return StepOutcome(applied, norm, everybodys_notes, scaling, culprit)

    def _exchange(self, own: Tensor) -> Tensor:
        return self._collectives.everybodys(own, "gradient norms")

    def _culprit(self, norms: Tensor) -> str:
        """The first parameter, in unit order, whose gradient is not finite. Collective.

        Args:
            norms: The norm of every block, in unit order; at least one is not finite.
        """
        number, start = self._norm.first_not_finite(norms)
        total = self.totals[number]
        owner, local = divmod(start, total.numel())
        mine = owner == self._collectives.rank
        own = total[local : local + NORM_BLOCK] if mine else total.new_zeros(NORM_BLOCK)
        values = self._exchange(own)[owner]
        # A norm can overflow though its elements are finite: then the block's first parameter.
        where = start + int(torch.argmin(torch.isfinite(values).int()))
        return next(slot.fqn for slot in self.units[number].layout.slots if where < slot.stop)

    def _apply(self, norm: float, factor: float) -> None:
        """Step on the totals times `factor`, of which `norm` is the norm, clipped."""
        clip = self._clip / (norm + _NORM_EPSILON)
        if self._clip > 0 and clip < 1:
            factor *= clip
        if factor != 1:
            for total in self.totals:
                total.mul_(factor)
        if not self._stage.shards_optimizer:
            self._gather_gradients()
        self.steps.step()
        for pending in [unit.refresh() for unit in self.units]:
            wait(pending)

    def _gather_gradients(self) -> None:
        started = []
        for unit, full in zip(self.units, self._gradients, strict=True):
            started.append(self._collectives.all_gather(full, f"gradient sums of {unit.name}"))
        for pending in started:
            wait(pending)


def _adopted(segment: Segment, old_state: dict[Any, Any]) -> dict[str, Any]:
    """State that the optimizer made at construction (Adagrad), moved to a segment."""
    slots = zip(segment.unit.layout.slots, segment.unit.params, strict=True)
    members = [(slot, param) for slot, param in slots if slot.group == segment.group]
    first = old_state.get(members[0][1], {})
    return {key: _adopt(segment, members, old_state, key) for key in first}


def _adopt(segment: Segment, members: list[Any], old_state: dict[Any, Any], key: str) -> Any:
    param = members[0][1]
    example = old_state[param][key]
    if not isinstance(example, Tensor):
        return example
    if key == "step" or example.shape != param.shape:
        return example.clone()
    whole = example.new_zeros(segment.unit.padded, device=segment.param.device)
    for slot, param in members:
        whole[slot.start : slot.stop] = old_state[param][key].flatten()
    return whole[segment.start : segment.stop].clone()
