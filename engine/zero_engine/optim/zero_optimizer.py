"""One optimizer step on the shards: norm, consensus, clip, step, new parameters.

Owns the gradient totals, the *segments* that the torch optimizer steps (for each unit and group,
the part of the run that this rank steps), and the decision to skip. `state.optimizer_state` saves
and loads its state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_comm.exchange.collectives import Collectives, wait
from zero_comm.sums.order import CHAIN
from zero_comm.sums.ordered_sum import OrderedSum
from zero_comm.sums.spill import Spill
from zero_contract.errors import ZeroError
from zero_engine.layout import Layout
from zero_engine.optim.loss_scaler import LossScaling
from zero_engine.optim.muon import stepped
from zero_engine.optim.owner_steps import StepByOwners
from zero_engine.optim.sharded_whole import ShardedWhole
from zero_engine.optim.steps import StepAtOnce, Steps
from zero_engine.optim.sub_groups import StepBySubGroups
from zero_engine.optim.whole import LooksAtWhole
from zero_engine.sharding.flat_unit import FlatUnit, overlap
from zero_engine.sharding.partition import DTYPES
from zero_engine.sharding.segments import Segment, divided_keys
from zero_engine.sharding.small_params import SmallParam, checksum
from zero_step.agree import Agreement, clipped
from zero_step.checks.replicas import Replicas
from zero_step.checks.same_step import SameStep
from zero_step.gradients.division import Division


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What all ranks agree on after a step."""

    applied: bool
    """False if the norm was not finite: weights and moments are unchanged (unless the config asks
    for such steps, by bf16.check_grad_overflow)."""
    norm: float
    """Global gradient norm before clipping, of the loss without its scale."""
    notes: Tensor
    """[world, notes], on the CPU: the notes that each rank handed in."""
    scaling: str = ""
    """A sentence about the change of the loss scale; empty if there is none."""
    culprit: str = ""
    """The first parameter whose gradient is not finite; empty if the step was applied."""


class ZeroOptimizer:
    """Steps a torch optimizer on this rank's share of the trained units."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[FlatUnit],
        layout: Layout,
        collectives: Collectives,
    ) -> None:
        """Take over an optimizer that was made on the parameters of the trained units."""
        self.optimizer = optimizer
        self.units = tuple(units)
        self._layout = layout
        self._collectives = collectives
        self._clip = layout.config.gradient_clipping or None
        bf16 = layout.config.bf16
        # bf16 may ask for steps with overflow, as in DeepSpeed; fp16 and fp32 always skip them.
        self._skips = bf16.check_grad_overflow or not bf16.enabled
        self.accumulating = False
        """Whether there are gradients that no step has applied yet."""
        self.changing = False
        """Whether weights and state are in between two steps: a step has begun to change them."""
        self.before_change: list[Callable[[], object]] = []
        """What is called before weights and state change: copies of them may be under way."""
        self.scaling = LossScaling.of(layout.config.loss_scaling)
        self.scale_state = self.scaling.begin()
        device = units[0].full.device
        self._gradients = tuple(
            torch.zeros(u.master.numel(), dtype=torch.float32, device=device) for u in units
        )
        self.totals = self._gradients
        if not layout.stage.shards_optimizer:
            self.totals = tuple(collectives.own(gradient) for gradient in self._gradients)
        # A backend gives all sums to every rank, and not only to their owner.
        summed = self._gradients if layout.native else self.totals
        self.spill = Spill(device)
        """What is kept between micro-steps beside the sums, here and by senders."""
        block = CHAIN if layout.native else layout.sums.block
        self.sums = tuple(OrderedSum(total, block, self.spill) for total in summed)
        for each in self.sums:
            each.rounds = layout.sums.rounds
        # Parameters are aligned: the blocks of a unit are those of its parameters.
        divisions = [
            Division(n, n, tuple(range(0, n + 1, n // collectives.world)))
            for n in (unit.padded for unit in units)
        ]
        self._agreement = Agreement(collectives, divisions, device)
        named = {
            slot.fqn: param
            for unit in units
            for slot, param in zip(unit.layout.slots, unit.params, strict=True)
        }
        whole = not (layout.stage.shards_parameters or layout.late_weights)
        replicas = Replicas(named, collectives, whole=whole)
        self._same = SameStep(optimizer, replicas, collectives)
        self.segments: tuple[Segment, ...] = () if layout.whole else self._attach()
        self.steps: Steps | StepByOwners
        if layout.whole:
            self.steps = StepByOwners(optimizer, units, self._gradients, collectives)
        else:
            self.steps = self._make_steps()
        self._show_scale(overflow=False)
        self._left = self._what_groups_show()

    @property
    def scale(self) -> float:
        """The factor of the loss before backward; 1 outside fp16 training."""
        return self.scale_state.scale

    def scale_to_json(self) -> dict[str, Any]:
        """The state of the loss scale, for a checkpoint."""
        return self.scaling.to_json(self.scale_state)

    def restore_scale(self, saved: Mapping[str, Any]) -> None:
        """Continue with the loss scale of a checkpoint; a fixed one stays that of the config."""
        self.scale_state = self.scaling.resume(saved)
        self._show_scale(overflow=False)

    def _show_scale(self, *, overflow: bool) -> None:
        # DeepSpeed's optimizer has these, and scripts log them.
        shown = {"cur_scale": self.scale, "loss_scale": self.scale, "overflow": overflow}
        for name, value in shown.items():
            setattr(self.optimizer, name, value)

    @property
    def wholes(self) -> tuple[Tensor, ...]:
        """The tensor that each total is an interval of, if every rank steps all; else empty."""
        return () if self._layout.stage.shards_optimizer else self._gradients

    @property
    def reduction_block(self) -> int:
        """Micro-batches that are summed in a tree; blocks are summed one after the other."""
        return self.sums[0].block

    @reduction_block.setter
    def reduction_block(self, block: int) -> None:
        for each in self.sums:
            each.block = block

    def gradient_sums(self) -> Iterator[Tensor]:
        """The tensors on the device that hold gradients between micro-steps."""
        yield from self._gradients
        yield from self.spill.here()

    def _attach(self) -> tuple[Segment, ...]:
        """Put segments in the place of the groups' parameters."""
        old_state = dict(self.optimizer.state)
        self.optimizer.state.clear()
        segments: list[Segment] = []
        divided = []
        for index, group in enumerate(self.optimizer.param_groups):
            divided.append(divided_keys(group["params"], old_state))
            found = []
            for unit, gradients in zip(self.units, self._gradients, strict=True):
                if (run := unit.layout.runs().get(index)) is not None:
                    low = unit.interval[0] if self._layout.stage.shards_optimizer else 0
                    start, stop = overlap(*run, low, low + unit.master.numel())
                    part = slice(start - low, stop - low)
                    weights = unit.master[part]
                    # An empty one is stepped as it is: in the dtype of its gradient. `data` has a
                    # version of its own, so that a write by a script is told from the engine's.
                    shown = weights if weights.numel() else weights.float()
                    param = nn.Parameter(shown.data)
                    found.append(Segment(unit, index, start, stop, param, gradients[part]))
            # A group keeps at least one segment on every rank, if need be an empty one: its scalar
            # state (the step count) is then known everywhere.
            chosen = [segment for segment in found if segment.stop > segment.start] or found[:1]
            group["params"] = [segment.param for segment in chosen]
            segments += chosen
        for segment in segments:
            if state := _adopted(segment, old_state, divided[segment.group]):
                self.optimizer.state[segment.param] = state
        return tuple(segments)

    def _make_steps(self) -> Steps:
        """The way to step the segments: at once, or by sub-groups if state rests elsewhere."""
        optimizer = stepped(self.optimizer)
        low_precision = self.units[0].shard.dtype != torch.float32
        tiers = {u: u.tiers.state for u in self.units if low_precision or u.tiers.offloaded}
        steps: Steps
        if tiers:
            totals = dict(zip(self.units, self.totals, strict=True))
            moments = DTYPES[self._layout.config.moments]
            steps = StepBySubGroups(optimizer, self.segments, totals, tiers, moments)
        else:
            steps = StepAtOnce(optimizer, self.segments)
        if isinstance(optimizer, LooksAtWhole):
            optimizer.whole = ShardedWhole(self.units, self.segments, self._collectives, steps)
        return steps

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
        """Apply the gradient sums. Collective. The caller sets `changing` to False afterwards.

        Every rank gives as many notes [n] fp32, and gets those of all [world, n], on the CPU, from
        which `correction` makes the factor of the totals.
        """
        self._refuse_written_groups()
        for each in self.sums:
            each.settle()
        # What is left of the loss scale in the sums: a power of two can be taken out at any time;
        # any other is taken out before the norm, as torch.amp.GradScaler does.
        scale = self.scale
        rest = scale if math.frexp(scale)[0] == 0.5 else 1.0
        self._multiply_sums(rest / scale)
        try:
            # One number says whether all ranks have the same options and parameters, and have
            # written the same to small ones; it travels with the norm. What differs is asked only
            # if it does.
            written = checksum(self._small(), notes.device)
            agreed = self._same.agree(self._agreement, self.totals, notes, written)
            if not agreed.alike:
                self._refuse_written()
            share = correction(agreed.notes) / rest
        except BaseException:  # the script may mend it, and call step() again
            self._multiply_sums(scale / rest)
            raise
        norm, factor = clipped(agreed.norm, share, self._clip)
        # All ranks have this norm, so all of them see an overflow, and skip.
        applied = math.isfinite(norm) or not self._skips
        culprit = ""
        if applied:
            self._apply(factor)
        else:
            number, element = self._agreement.first_not_finite()
            slots = self.units[number].layout.slots
            culprit = next(slot.fqn for slot in slots if element < slot.stop)
        self.accumulating = False
        self.scale_state, scaling = self.scaling.after(self.scale_state, not applied)
        self._show_scale(overflow=not applied)
        self._same.stepped()
        return StepOutcome(applied, norm, agreed.notes, scaling, culprit)

    def _multiply_sums(self, factor: float) -> None:
        if factor != 1:
            for each in self.sums:
                each.total.mul_(factor)

    def _apply(self, factor: float) -> None:
        """Step the weights with the gradient sums, times a factor. Collective."""
        for hold in self.before_change:
            hold()
        self.changing = True
        self._multiply_sums(factor)
        # At stage 0 every rank steps all weights; a backend has given every rank all sums already.
        if not self._layout.stage.shards_optimizer and not self._layout.native:
            gathers = [
                self._collectives.all_gather(full, f"gradient sums of {unit.spec.name}")
                for unit, full in zip(self.units, self._gradients, strict=True)
            ]
            for pending in gathers:
                wait(pending)
        try:
            self.steps.step()
        finally:  # a load may follow a step that has failed, or lost a peer
            self._left = self._what_groups_show()
        # The root first: its weights are needed from the beginning of forward.
        units = sorted(self.units, key=lambda unit: not unit.spec.is_root)
        # A list: all exchanges begin before the first is waited for.
        for unit, pending in [(unit, unit.refresh()) for unit in units]:
            if self._layout.late_weights:
                unit.leave_arriving(pending)
            else:
                wait(pending)

    def _what_groups_show(self) -> list[list[tuple[int, int]]]:
        """The version and the memory of each tensor in the optimizer's param groups."""
        return [
            [(param._version, param.untyped_storage()._cdata) for param in group["params"]]
            for group in self.optimizer.param_groups
        ]

    def _refuse_written_groups(self) -> None:
        """Raise ZeroError if a script has written to what the optimizer's param groups show."""
        # Modules would show the new weights at once, after the step or never, by stage, rank and
        # dtype. A write through `data` has no version, and is not noticed.
        for group, (left, now) in enumerate(zip(self._left, self._what_groups_show(), strict=True)):
            if left != now:
                raise ZeroError(
                    f"a script has written to the tensors of param group {group} of the optimizer, "
                    "or put others in the place of their data: they are this rank's part of the "
                    "weights; write to all of a parameter instead, in "
                    "zero.GatheredParameters(parameters, modifier_rank=0) or with "
                    "safe_set_full_fp32_param()"
                )

    def _small(self) -> list[SmallParam]:
        return [each for unit in self.units for each in unit.small.members]

    def _refuse_written(self) -> None:
        """Name the small parameter that ranks have written different values to. Collective."""
        small = self._small()
        if not small:
            return
        own = torch.stack([checksum([each], self.units[0].full.device) for each in small])
        everybodys = self._collectives.everybodys(own, "what ranks have written")
        differs = (everybodys != everybodys[0]).any(dim=0).int()
        if not differs.any():
            return
        at = int(differs.argmax())
        raise ZeroError(
            f"{small[at].name} has different values on the ranks: a script has written to it on "
            "some of them, or not the same; write the same on all ranks, or on one within "
            "zero.GatheredParameters(parameter, modifier_rank=RANK)"
        )


def _adopted(
    segment: Segment, old_state: Mapping[Any, Mapping[str, Any]], divided: Container[str]
) -> dict[str, Any]:
    # Some make state at construction, as Adagrad does: it moves to the segments. It is alike for
    # all of a group, see `check_stepped_alike`.
    slots = zip(segment.unit.layout.slots, segment.unit.params, strict=True)
    members = [(slot, param) for slot, param in slots if slot.group == segment.group]
    first, adopted = members[0][1], dict[str, Any]()
    for key, example in old_state.get(first, {}).items():
        if key not in divided:
            adopted[key] = example.clone() if isinstance(example, Tensor) else example
        else:
            whole = example.new_zeros(segment.unit.padded, device=segment.param.device)
            for slot, param in members:
                whole[slot.start : slot.stop] = old_state[param][key].flatten()
            adopted[key] = whole[segment.start : segment.stop].clone()
    return adopted
