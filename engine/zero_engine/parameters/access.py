"""One parameter of an engine: its weights, gradient and optimizer state, whole or as a share.

A read returns what the optimizer steps, in the highest precision; the next forward and the next
step use what is written, at every stage and for every param group. A *share* is this rank's
interval of the flattened parameter, a 1-D tensor, empty on many ranks.

Everything here is collective unless its docstring says otherwise: every rank calls it, for the same
parameters in the same order, between steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_comm.exchange.collectives import wait
from zero_comm.sums.ordered_sum import OrderedSum
from zero_contract.errors import ZeroError
from zero_engine.offload_states import WEIGHTS
from zero_engine.optim.owner_steps import StepByOwners
from zero_engine.parameters.places import place_of
from zero_engine.parts import Core
from zero_engine.sharding.flat_unit import FlatUnit, Slot, overlap
from zero_engine.sharding.segments import Segment, elementwise_keys
from zero_engine.state.optimizer_state import fetch


def owner_of(param: nn.Parameter) -> OwnedParam | None:
    """The owner of a parameter; None if it belongs to no engine."""
    found = place_of(param)
    if found is None:
        return None
    core, unit, slot = found
    steps = core.zero.steps if core.zero is not None and unit.spec.trained else None
    kind = SteppedWhole if isinstance(steps, StepByOwners) else OwnedParam
    return kind(core, unit, slot)


def owned(param: nn.Parameter) -> OwnedParam:
    """The owner of a parameter.

    Raises:
        ZeroError: The parameter belongs to no engine, or its weights are moved.
    """
    owner = owner_of(param)
    if owner is None:
        raise ZeroError(
            f"a parameter of shape {tuple(param.shape)} belongs to no engine; pass one of the "
            "module that was given to initialize()"
        )
    owner.core.moved.need("reading or changing a parameter")
    return owner


@dataclass(frozen=True, slots=True, eq=False)
class OwnedParam:
    """A parameter and the parts of the engine that hold it."""

    core: Core
    unit: FlatUnit
    slot: Slot

    # ---- weights ----

    def weights(self) -> Tensor:
        """The whole parameter in its shape, in the precision of master weights; a copy."""
        with self.core.guard():
            return self._cut(self.unit.gather_highest())

    def set_weights(self, value: Tensor) -> None:
        """Replace the whole parameter, with the same values on every rank."""
        start, stop = self._share()
        self.set_weights_share(self._flat(value)[start - self.slot.start : stop - self.slot.start])

    def weights_share(self) -> Tensor:
        """This rank's share of the weights; a copy. Not collective."""
        return self._local(self.unit.shard).clone()

    def set_weights_share(self, value: Tensor) -> None:
        """Replace this rank's share of the weights."""
        _write(self._local(self.unit.shard), value, self.slot.fqn)
        with self.core.guard():
            self.unit.restore()

    # ---- gradients: sums over the micro-batches so far, of the loss without its scale ----

    def gradient(self) -> Tensor | None:
        """The whole gradient between backward and step, else None."""
        total = self._total()
        return None if total is None else self._gathered(total, self.unit.interval[0], "gradient")

    def set_gradient(self, value: Tensor) -> None:
        """Replace the gradient that the next step will apply."""
        flat, (start, stop) = self._flat(value), self._share()
        gradients = self._replaced_gradients()
        if gradients.total.numel() == self.unit.padded:  # every rank has all of the sum
            _write(
                gradients.total[self.slot.start : self.slot.stop], self._scaled(flat), self.slot.fqn
            )
        else:
            self.set_gradient_share(flat[start - self.slot.start : stop - self.slot.start])

    def gradient_share(self) -> Tensor | None:
        """This rank's share of the gradient, or None outside a step. Not collective."""
        total = self._total()
        return None if total is None else self._local(total)

    def set_gradient_share(self, value: Tensor) -> None:
        """Replace this rank's share of the gradient. Not collective.

        Raises:
            ZeroError: There is no gradient, or every rank has all of it.
        """
        gradients = self._replaced_gradients()
        if gradients.total.numel() == self.unit.padded and self.core.collectives.world > 1:
            raise ZeroError(
                f'{self.slot.fqn}: at stage 0 with elastic.reduction "native" every rank has the '
                "whole gradient, so a share cannot be replaced on one rank alone; call "
                "safe_set_full_grad on all ranks"
            )
        _write(self._local(gradients.total), self._scaled(value), self.slot.fqn)

    def _scaled(self, value: Tensor) -> Tensor:
        assert self.core.zero is not None
        return value.detach() * self.core.zero.scale

    def _replaced_gradients(self) -> OrderedSum:
        """The sum of this parameter's unit, to be written to: nothing is pending any more."""
        zero = self.core.zero
        if zero is None or self._total() is None:
            raise ZeroError(
                f"{self.slot.fqn} has no gradient to set; call this between engine.backward() "
                "and the step that applies it, for a trained parameter"
            )
        gradients = zero.sums[zero.units.index(self.unit)]
        gradients.settle()  # what is pending is of the value that is replaced
        return gradients

    def _total(self) -> Tensor | None:
        """This rank's interval of the unit's gradient, of the loss without its scale."""
        zero, reducer = self.core.zero, self.core.reducer
        if zero is None or not zero.accumulating or not self.unit.spec.trained:
            return None
        if reducer is not None and reducer.withholds:
            raise ZeroError(
                f"{self.slot.fqn}: with elastic.accumulate "
                f'"{self.core.layout.sums.where}" the gradient is there in the last micro-step of '
                'a step; read or set it there (is_gradient_accumulation_boundary()), or use "owner"'
            )
        value = zero.sums[zero.units.index(self.unit)].value()
        if value.numel() == self.unit.padded:
            value = value[slice(*self.unit.interval)]
        return value / zero.scale

    # ---- optimizer state ----

    def state(self, key: str) -> Any:
        """The optimizer's `key` for this parameter, whole; None if it has none (yet)."""
        value, divided = self._find_state(key)
        if not divided:
            return value
        # A rank without a segment of this unit sends nothing, in the dtype of the others.
        own = [(each.start, self._state_of(each)[key]) for each in self._segments(self.unit)]
        start, data = own[0] if own else (self.unit.interval[0], value[:0])
        return self._gathered(data, start, key)

    def set_state(self, key: str, value: Tensor) -> None:
        """Replace the optimizer's `key`, with the same value on every rank. Not collective."""
        self._need_state(key)
        flat = self._flat(value)
        for segment in self._segments(self.unit):
            start, stop = overlap(self.slot.start, self.slot.stop, segment.start, segment.stop)
            part = self._state_of(segment)[key][start - segment.start : stop - segment.start]
            part.copy_(flat[start - self.slot.start : stop - self.slot.start])

    def state_share(self, key: str) -> Any:
        """This rank's share of the optimizer's `key`; None if it has none (yet). Not collective.

        What has no elements of the parameter, such as a count of steps, is whole on every rank.
        """
        value, divided = self._find_state(key)
        if not divided:
            return value
        parts = [self._state_share(segment, key) for segment in self._segments(self.unit)]
        return parts[0].clone() if parts else value[:0]

    def set_state_share(self, key: str, value: Tensor) -> None:
        """Replace this rank's share; collective where every rank steps everything."""
        self._need_state(key)
        parts = [self._state_share(segment, key) for segment in self._segments(self.unit)]
        for part in parts:
            _write(part, value, f"{key} of {self.slot.fqn}")
        if not self.core.stage.shards_optimizer:
            start, _ = self._share()
            own = parts[0] if parts else value[:0]
            self.set_state(key, self._gathered(own, start, key))

    def _state_share(self, segment: Segment, key: str) -> Tensor:
        start, stop = overlap(*self._share(), segment.start, segment.stop)
        data: Tensor = self._state_of(segment)[key]
        return data[start - segment.start : stop - segment.start]

    def _need_state(self, key: str) -> None:
        segments = self._segments(None)
        known = {key for each in segments for key in elementwise_keys(each, self._state_of(each))}
        if key not in known:
            raise ZeroError(
                f"{self.slot.fqn} has no optimizer state {key!r} to set; it has: "
                f"{', '.join(sorted(known)) or 'none before the first step'}"
            )

    def _find_state(self, key: str) -> tuple[Any, bool]:
        """A value of the key, and whether it has one for each element; else it is a copy."""
        # Of any unit of its param group: every rank has one, and so gives the same answer.
        for segment in self._segments(None):
            state = self._state_of(segment)
            if (value := state.get(key)) is not None:
                divided = key in elementwise_keys(segment, state)
                return value if divided else copy.deepcopy(value), divided
        return None, False

    def _segments(self, unit: FlatUnit | None) -> list[Segment]:
        """This rank's segments of the parameter's group: of one unit, or of all."""
        segments = self.core.zero.segments if self.core.zero is not None else ()
        return [
            segment
            for segment in segments
            if segment.group == self.slot.group and unit in (None, segment.unit)
        ]

    def _state_of(self, segment: Segment) -> dict[str, Any]:
        assert self.core.zero is not None
        state: dict[str, Any] = self.core.zero.optimizer.state.get(segment.param, {})
        return state

    # ---- pieces ----

    def _share(self) -> tuple[int, int]:
        """This rank's elements of the parameter, counted in the unit."""
        return overlap(self.slot.start, self.slot.stop, *self.unit.interval)

    def _local(self, shard: Tensor) -> Tensor:
        """This rank's share of a tensor with the layout of the shard: a view."""
        start, stop = self._share()
        low = self.unit.interval[0]
        return shard[start - low : stop - low]

    def _gathered(self, own: Tensor, start: int, what: str) -> Tensor:
        """The parameter's part of an all-gathered tensor; this rank has `own`, from `start` on."""
        # On the device, where exchanges are: this rank's own may rest in host memory.
        whole = own.new_zeros(self.unit.padded, device=self.unit.full.device)
        whole[start : start + own.numel()] = own
        with self.core.guard():
            wait(self.core.collectives.all_gather(whole, f"{what} of {self.slot.fqn}"))
        return self._cut(whole)

    def _cut(self, whole: Tensor) -> Tensor:
        return whole[self.slot.start : self.slot.stop].view(self.slot.shape).clone()

    def _flat(self, value: Tensor) -> Tensor:
        if value.shape != self.slot.shape:
            raise ZeroError(
                f"{self.slot.fqn} has shape {tuple(self.slot.shape)}, the value has "
                f"{tuple(value.shape)}"
            )
        return value.detach().flatten()


class SteppedWhole(OwnedParam):
    """A parameter that is stepped whole: its optimizer state is on the rank that owns it.

    The share of that rank is the whole state, flat; the shares of the others are empty.
    """

    __slots__ = ()

    def state(self, key: str) -> Any:
        """The optimizer's `key` for this parameter, in its own shape."""
        with self.core.guard():
            own, core = self._owned_state(), self.core
            return fetch(own, key, self.slot.fqn, core.collectives, core.device)

    def set_state(self, key: str, value: Tensor) -> None:
        """Replace the optimizer's `key`, with the same value on every rank. Collective."""
        current = self.state(key)
        if not isinstance(current, Tensor):
            raise ZeroError(f"{self.slot.fqn} has no optimizer state {key!r} to set")
        if current.shape != value.shape:
            raise ZeroError(
                f"{key} of {self.slot.fqn} has shape {tuple(current.shape)}, the value has "
                f"{tuple(value.shape)}"
            )
        own = self._owned_state()
        if own is not None:
            own[key].copy_(value)

    def state_share(self, key: str) -> Any:
        """The whole state on the rank that owns the parameter, else an empty tensor."""
        own = self._owned_state()
        if own is None:
            return torch.empty(0, device="cpu")
        value = own.get(key)
        return value.flatten().clone() if isinstance(value, Tensor) else value

    def set_state_share(self, key: str, value: Tensor) -> None:
        """Replace the whole state on the rank that owns the parameter. Not collective."""
        own = self._owned_state()
        place = torch.empty(0, device="cpu") if own is None else own.get(key)
        if not isinstance(place, Tensor):
            raise ZeroError(f"{self.slot.fqn} has no optimizer state {key!r} to set")
        _write(place.view(-1), value, f"{key} of {self.slot.fqn}")

    def _owned_state(self) -> dict[str, Any] | None:
        """The state on the rank that owns the parameter, else None."""
        assert self.core.zero is not None
        steps = self.core.zero.steps
        assert isinstance(steps, StepByOwners)
        own = [each for each in steps.owned if each.slot is self.slot]
        return steps.state_of(own[0]) if own else None


def _write(place: Tensor, value: Tensor, what: str) -> None:
    if value.shape != place.shape:
        raise ZeroError(
            f"{what}: this rank's share is 1-D with {place.numel()} elements, the value has shape "
            f"{tuple(value.shape)}"
        )
    with torch.no_grad():
        place.copy_(value)


def units_of(params: Iterable[nn.Parameter]) -> dict[FlatUnit, Core]:
    """The units of some parameters, in order; parameters that belong to no engine are left out."""
    owners = [owner for param in params if (owner := owner_of(param)) is not None]
    for core in {id(owner.core): owner.core for owner in owners}.values():
        core.moved.need("gathering parameters", WEIGHTS)
    return {owner.unit: owner.core for owner in owners}
