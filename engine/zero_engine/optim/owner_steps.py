"""Steps whole parameters, each on the rank that owns it, by an optimizer that takes no shards.

For optimizers that look at more of a parameter than one element, such as torch's Adafactor. In a
step, weights and gradients come to their owners, and new weights go back. Who owns what follows
from layout and world size alone. `state.optimizer_state` saves and loads the state, which stays
with the owner, in whatever shape the optimizer gives it.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_checkpoint.errors import CheckpointError
from zero_comm.exchange.collectives import Collectives, wait
from zero_comm.exchange.objects import gather_objects
from zero_engine.optim.owner_exchange import (
    ExchangeGroup,
    OwnerExchange,
    Shared,
    in_exchange_groups,
)
from zero_engine.optim.rows import widened
from zero_engine.optim.tree_spec import mark_of, tensors_in, tree_spec
from zero_engine.sharding.flat_unit import FlatUnit, Slot, overlap

_log = logging.getLogger(__name__)

PROBLEM = "problem"
"""The key of a tree spec that could not be made: why."""


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """A parameter of this rank's optimizer."""

    unit: FlatUnit
    slot: Slot
    param: nn.Parameter


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One parameter for each rank, or fewer in the last turn."""

    weights: ExchangeGroup
    gradients: ExchangeGroup
    owned: Owned | None
    """The parameter of this turn that this rank owns, if any."""


class StepByOwners:
    """Steps all parameters of the trained units."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[FlatUnit],
        gradients: Sequence[Tensor],
        collectives: Collectives,
    ) -> None:
        """Put what this rank owns in the place of the optimizer's parameters."""
        self.optimizer = optimizer
        self._collectives = collectives
        self._exchange = OwnerExchange(collectives)
        masters = [unit.master for unit in units]
        exchange_groups = zip(
            in_exchange_groups(_shared(units, masters), collectives.world),
            in_exchange_groups(_shared(units, gradients), collectives.world),
            strict=True,
        )
        self._turns: list[Turn] = []
        for weights, grads in exchange_groups:
            shared, owned = self._exchange.owned(weights), None
            if shared is not None:
                param = nn.Parameter(_hollow(shared.slot, shared.mine.device))
                owned = Owned(shared.unit, shared.slot, param)
            self._turns.append(Turn(weights, grads, owned))
        self.owned = tuple(turn.owned for turn in self._turns if turn.owned is not None)
        self.tree_specs: dict[str, Any] = {}
        """Name of a parameter -> the tree spec of its state, as all ranks know it."""
        self.marks: list[int] | None = None
        """For each rank the mark of the state that it owns; it changes when a tree spec does."""
        self._names = [slot.fqn for unit in units for slot in unit.layout.slots]
        self._attach(units)
        self._agree()

    def _attach(self, units: Sequence[FlatUnit]) -> None:
        given = {
            slot.fqn: param
            for unit in units
            for slot, param in zip(unit.layout.slots, unit.params, strict=True)
        }
        made = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for index, group in enumerate(self.optimizer.param_groups):
            group["params"] = [each.param for each in self.owned if each.slot.group == index]
        for each in self.owned:
            if state := made.get(given[each.slot.fqn]):
                self.optimizer.state[each.param] = {
                    key: value.to(each.param.device)
                    if isinstance(value, Tensor) and value.dim()
                    else value
                    for key, value in state.items()
                }

    def state_of(self, owned: Owned) -> dict[str, Any]:
        """The optimizer's state of a parameter; empty before its first step."""
        state: dict[str, Any] = self.optimizer.state.get(owned.param, {})
        return state

    def remembered(self, units: Container[FlatUnit]) -> Iterator[Tensor]:
        """The tensors of the state that belong to some units."""
        for each in self.owned:
            if each.unit in units:
                yield from (t for t in tensors_in(self.state_of(each)) if t.dim())

    def step(self) -> None:
        """One step of the optimizer. Collective."""
        # All begin before the first is waited for: every rank owns one of each exchange group.
        coming = [
            (
                self._exchange.collect(turn.weights, f"whole weights, exchange group {number}"),
                self._exchange.collect(turn.gradients, f"whole gradients, exchange group {number}"),
            )
            for number, turn in enumerate(self._turns)
        ]
        for turn, ((weights, arriving), (gradient, following)) in zip(
            self._turns, coming, strict=True
        ):
            wait(arriving)
            wait(following)
            if turn.owned is not None:
                shape = turn.owned.slot.shape
                turn.owned.param.data = widened(weights).view(shape)
                turn.owned.param.grad = gradient.view(shape)
        # Once, on every rank, also on one that owns nothing: what an optimizer counts are steps.
        self.optimizer.step()
        for each in self.owned:
            # Lay state out as a checkpoint brings it back: the layout may decide the rounding.
            for tensor in tensors_in(self.state_of(each)):
                if not tensor.is_contiguous():
                    tensor.data = tensor.contiguous()
        going = []
        for number, turn in enumerate(self._turns):
            whole = torch.empty(0, device="cpu")
            if turn.owned is not None:
                param, dtype = turn.owned.param, turn.weights[0].mine.dtype
                whole = param.data.to(dtype).contiguous().view(-1)
                param.data, param.grad = _hollow(turn.owned.slot, param.device), None
            what = f"new weights, exchange group {number}"
            going.append(self._exchange.give_back(turn.weights, whole, what))
        for pending in going:
            wait(pending)
        self._agree()

    def _agree(self) -> None:
        # A save is no collective and cannot ask other ranks: the tree specs are known before it.
        # Each step compares a number; the specs, which are long, travel when one has changed.
        mark = hash(tuple(mark_of(self.state_of(each)) for each in self.owned))
        own_mark = torch.tensor([mark], device="cpu")  # among the CPUs, where a wait can be ended
        gathered = self._collectives.everybodys(own_mark, "marks of optimizer state")
        marks = gathered.flatten().tolist()
        if marks != self.marks:
            own: dict[str, Any] = {}
            for each in self.owned:
                if state := self.state_of(each):
                    try:
                        own[each.slot.fqn] = tree_spec(state, each.slot.fqn)
                    except CheckpointError as error:  # a save raises it; training need not end
                        own[each.slot.fqn] = {PROBLEM: str(error)}
            self.know(
                gather_objects(own, "tree specs of optimizer state", self._collectives.everybodys)
            )
            self.marks = marks
            # Warn at once, and not only at the first save, of what no checkpoint can hold.
            problems = [known[PROBLEM] for known in self.tree_specs.values() if PROBLEM in known]
            if problems and self._collectives.rank == 0:
                _log.warning("checkpoints will be refused: %s", problems[0])

    def know(self, tree_specs: Iterable[Mapping[str, Any]]) -> None:
        """Take these as the tree specs of all parameters, and compare them in the next step."""
        self.tree_specs = self.chosen(tree_specs)
        self.marks = None

    def chosen(self, tree_specs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """The tree specs of these parameters among the given ones, in their order."""
        known = {fqn: each for some in tree_specs for fqn, each in some.items()}
        return {fqn: known[fqn] for fqn in self._names if fqn in known}


def _shared(units: Sequence[FlatUnit], tensors: Sequence[Tensor]) -> Iterator[Shared]:
    """Each parameter of tensors that are laid out like the master weights of each unit."""
    for unit, tensor in zip(units, tensors, strict=True):
        low = unit.interval[0] if tensor.numel() != unit.padded else 0
        for slot in unit.layout.slots:
            start, stop = overlap(slot.start, slot.stop, low, low + tensor.numel())
            yield Shared(unit, slot, tensor[start - low : stop - low])


def _hollow(slot: Slot, device: torch.device) -> Tensor:
    """A tensor of a parameter's shape that takes no memory."""
    return torch.zeros((), dtype=torch.float32, device=device).expand(slot.shape)
