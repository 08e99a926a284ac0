"""The optimizer's state as pieces of a checkpoint, and back: of segments, and of whole parameters.

Must always hold: every rank contributes exactly its interval, also where it steps all of a unit;
what is loaded is what was saved, bit by bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_checkpoint import Manifest
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.dtypes import DTYPES
from zero_checkpoint.format.pieces import BUFFER, OTHER, PARAM, Piece, TensorId, TensorInfo
from zero_checkpoint.format.table import table_of
from zero_checkpoint.state.torch_state import device_of_number, number_as_json, number_from_json
from zero_comm.exchange.collectives import Collectives, wait
from zero_comm.exchange.objects import gather_objects
from zero_engine.optim.owner_steps import PROBLEM, StepByOwners
from zero_engine.optim.steps import Steps
from zero_engine.optim.tree_spec import Number, blank, described, filled, leaves, stored, tree_spec
from zero_engine.optim.zero_optimizer import ZeroOptimizer
from zero_engine.sharding.flat_unit import FlatUnit
from zero_engine.sharding.segments import Segment, elementwise_keys


class OptimizerState(Protocol):
    """The state of an optimizer for its parameters, as tensors and as records."""

    def mark(self) -> Any:
        """A value that changes whenever `tensors` does, though `live` may be the same here."""

    def live(self) -> Iterator[Tensor]:
        """The tensors that the pieces are views of, in a fixed order."""

    def tensors(self) -> Mapping[TensorId, TensorInfo]:
        """All tensors of all ranks."""

    def tensors_after(self, manifest: Manifest) -> Mapping[TensorId, TensorInfo]:
        """The later `tensors`, after `make`, but for dtypes; nothing is changed."""

    def pieces(self) -> Iterator[Piece]:
        """This rank's pieces of the tensors."""

    def records(self) -> list[dict[str, Any]]:
        """For each param group its record in the manifest, beside the tensors."""

    def make(self, manifest: Manifest) -> None:
        """Allocate the state that a checkpoint has, and drop all other.

        Raises:
            ModelMismatch: The state is of another optimizer.
        """

    def finish(self, records: Sequence[Mapping[str, Any] | None]) -> None:
        """Finish a load when the pieces are filled; None: nothing was saved. Collective."""


class StateOfSegments:
    """One value per element, divided like the weights, and numbers for whole param groups."""

    def __init__(self, zero: ZeroOptimizer, steps: Steps, collectives: Collectives) -> None:
        self._zero = zero
        self._steps = steps
        self._collectives = collectives

    def mark(self) -> Any:
        """None: all ranks have the same keys, so `live` changes when they do."""

    def live(self) -> Iterator[Tensor]:
        """The keys of each segment."""
        yield from (data for _, _, data in self._each())

    def tensors(self) -> Mapping[TensorId, TensorInfo]:
        """Every key of every parameter, in the parameter's shape."""
        kinds: dict[int | None, dict[str, torch.dtype]] = {}
        for segment, key, data in self._each():
            kinds.setdefault(segment.group, {})[key] = data.dtype
        return self._in_shape(kinds)

    def tensors_after(self, manifest: Manifest) -> Mapping[TensorId, TensorInfo]:
        """Every key that a group has in the checkpoint, for each of its parameters."""
        return self._in_shape(dict(enumerate(self._stored(manifest))))

    def _in_shape(
        self, kinds: Mapping[int | None, Mapping[str, torch.dtype]]
    ) -> dict[TensorId, TensorInfo]:
        """The keys of each group, in the shapes of its parameters."""
        return {
            TensorId(key, slot.fqn): TensorInfo(tuple(slot.shape), dtype)
            for unit in self._zero.units
            for slot in unit.layout.slots
            for key, dtype in kinds.get(slot.group, {}).items()
        }

    def pieces(self) -> Iterator[Piece]:
        """The parts of the segments in this rank's interval."""
        for segment, key, data in self._each():
            yield from cut(segment.unit, key, data, segment.start, segment.group)

    def records(self) -> list[dict[str, Any]]:
        """The numbers, such as step counts; they are equal in all segments of a group."""
        records: list[dict[str, Any]] = []
        for _, segments in self._zero.segments_by_group():
            numbers = {}
            if segments:
                state = self._of(segments[0])
                for key in sorted(state.keys() - set(elementwise_keys(segments[0], state))):
                    numbers[key] = number_as_json(state[key], f"optimizer state {key}")
            records.append({"state": numbers})
        return records

    def make(self, manifest: Manifest) -> None:
        """Allocate every key that a group has in the checkpoint."""
        optimizer = self._zero.optimizer
        before = dict(optimizer.state)
        optimizer.state.clear()
        groups = self._zero.segments_by_group()
        for present, (_, segments) in zip(self._stored(manifest), groups, strict=True):
            for segment in segments if present else ():
                optimizer.state[segment.param] = self._steps.make_state(
                    segment, present, before.get(segment.param, {})
                )

    def _stored(self, manifest: Manifest) -> list[dict[str, torch.dtype]]:
        """For each param group the keys that it has in a checkpoint, as the optimizer sees them."""
        kinds = sorted(table_of(manifest.tensors).kind_names - {PARAM, BUFFER, OTHER})
        # What rested in 16 bits is fp32 to the optimizer; `make_state` chooses what it rests in.
        low_precision = manifest.meta["engine"].get("moments", "fp32") != "fp32"
        groups = []
        for names in self._zero.names_by_group():
            dtypes = {}
            for kind in kinds:
                stored = (manifest.tensors.get(TensorId(kind, name)) for name in names)
                if info := next((info for info in stored if info is not None), None):
                    rounded = low_precision and info.dtype == torch.bfloat16
                    dtypes[kind] = torch.float32 if rounded else info.dtype
            groups.append(dtypes)
        return groups

    def finish(self, records: Sequence[Mapping[str, Any] | None]) -> None:
        """Replicate the state if every rank steps everything; then set the numbers."""
        for segment, key, data in self._each():
            # Each rank has read its own interval alone.
            if segment.unit.master.numel() == segment.unit.padded and self._collectives.world > 1:
                whole = data.new_zeros(segment.unit.padded)
                part = whole[segment.start : segment.stop]
                part.copy_(data)
                what = f"loaded {key} of {segment.unit.spec.name}"
                wait(self._collectives.all_gather(whole, what))
                data.copy_(part)
        for record, (group, segments) in zip(records, self._zero.segments_by_group(), strict=True):
            saved = record["state"] if record is not None else {}
            for segment in segments if saved else ():
                state = self._zero.optimizer.state[segment.param]
                device = device_of_number(group, segment.param.device)
                state |= {key: number_from_json(value, device) for key, value in saved.items()}

    def _each(self) -> Iterator[tuple[Segment, str, Tensor]]:
        """Each key of each segment that has one value per element."""
        for segment in self._zero.segments:
            state = self._of(segment)
            yield from ((segment, key, state[key]) for key in elementwise_keys(segment, state))

    def _of(self, segment: Segment) -> dict[str, Any]:
        state: dict[str, Any] = self._zero.optimizer.state.get(segment.param, {})
        return state


def cut(unit: FlatUnit, kind: str, data: Tensor, origin: int, group: int | None) -> Iterator[Piece]:
    """The pieces of `data`, which begins at element `origin` of the unit, in this rank's interval.

    With a group, only those of the group's parameters.
    """
    end = origin + data.numel()
    low, high = max(origin, unit.interval[0]), min(end, unit.interval[1])
    runs = [
        (slot, max(slot.start, low), min(slot.stop, high))
        for slot in unit.layout.slots
        if slot.start < high and slot.stop > low and group in (None, slot.group)
    ]
    # One call for all views, since a large model has tens of thousands; every other one is what
    # lies between two runs.
    edges = [origin, *(edge for _, *run in runs for edge in run), end]
    parts = data.split([stop - start for start, stop in pairwise(edges)])[1::2]
    for (slot, start, _), part in zip(runs, parts, strict=True):
        yield Piece(TensorId(kind, slot.fqn), start - slot.start, part)


# ---- the state of whole parameters ----
# All ranks write the same tables, because they have the same tree specs; a world of another size
# finds everything again, because tree specs and leaves go by the parameter's name.


WHOLE = "whole"
"""The key of a param group in the manifest: name of a parameter -> its tree spec."""


class StateOfOwners:
    """State in any shapes; that of each parameter is on the rank that owns it."""

    def __init__(self, zero: ZeroOptimizer, steps: StepByOwners) -> None:
        self._zero = zero
        self._steps = steps

    def mark(self) -> Any:
        """The marks of the tree specs, and the numbers, whose tensors are made for each save."""
        numbers = [leaf for _, leaf in self._own() if not isinstance(leaf, Tensor)]
        return self._steps.marks, numbers

    def live(self) -> Iterator[Tensor]:
        """The tensors in the state that this rank owns."""
        yield from (leaf for _, leaf in self._own() if isinstance(leaf, Tensor))

    def _own(self) -> Iterator[tuple[TensorId, Tensor | Number]]:
        for each in self._steps.owned:
            for kind, leaf in leaves(self._steps.state_of(each)):
                yield TensorId(kind, each.slot.fqn), leaf

    def tensors(self) -> dict[TensorId, TensorInfo]:
        """The tensors that the tree specs describe."""
        return _described(self._steps.tree_specs)

    def tensors_after(self, manifest: Manifest) -> dict[TensorId, TensorInfo]:
        """The tensors that the tree specs of the checkpoint describe."""
        return _described(self._steps.chosen(_saved_tree_specs(manifest)))

    def pieces(self) -> Iterator[Piece]:
        """One piece for each tensor or number of this rank, whole."""
        for name, leaf in self._own():
            data = stored(leaf).view(-1)
            if data.numel():
                yield Piece(name, 0, data)

    def records(self) -> list[dict[str, Any]]:
        """The tree specs.

        Raises:
            CheckpointError: The state of a parameter has no tree spec; on every rank.
        """
        tree_specs = self._steps.tree_specs
        for known in tree_specs.values():
            if PROBLEM in known:
                raise CheckpointError(known[PROBLEM])
        return [
            {
                "state": {},
                WHOLE: {n: copy.deepcopy(tree_specs[n]) for n in names if n in tree_specs},
            }
            for names in self._zero.names_by_group()
        ]

    def make(self, manifest: Manifest) -> None:
        """Allocate state after the tree specs, for the parameters that this rank owns."""
        self._steps.know(_saved_tree_specs(manifest))
        optimizer = self._zero.optimizer
        optimizer.state.clear()
        for owned in self._steps.owned:
            known = self._steps.tree_specs.get(owned.slot.fqn)
            if known is not None:
                assert owned.slot.group is not None
                group, device = optimizer.param_groups[owned.slot.group], owned.param.device
                optimizer.state[owned.param] = blank(known, device, device_of_number(group, device))

    def finish(self, records: Sequence[Mapping[str, Any] | None]) -> None:
        """Turn tensors into Python numbers where the tree spec has numbers."""
        del records
        for owned in self._steps.owned:
            if state := self._steps.state_of(owned):
                known = self._steps.tree_specs[owned.slot.fqn]
                self._zero.optimizer.state[owned.param] = filled(state, known)


def _saved_tree_specs(manifest: Manifest) -> list[Mapping[str, Any]]:
    return [group.get(WHOLE, {}) for group in manifest.meta["engine"]["groups"]]


def _described(tree_specs: Mapping[str, Any]) -> dict[TensorId, TensorInfo]:
    return {
        TensorId(kind, fqn): TensorInfo(tuple(shape), DTYPES[dtype])
        for fqn, known in tree_specs.items()
        for kind, dtype, shape in described(known)
    }


def fetch(
    owned: Mapping[str, Any] | None,
    key: str,
    name: str,
    collectives: Collectives,
    device: torch.device,
) -> Any:
    """A copy of the state that the owner of a parameter has under a key. Collective.

    Other ranks give None as `owned`. None on every rank: there is no such state (yet), or it has no
    tree spec.
    """
    own: list[Any] | None = None
    if owned is not None:
        try:
            own = [tree_spec(owned.get(key), name)]
        except CheckpointError:
            own = [None]
    gathered = gather_objects(own, f"tree spec of {key}", collectives.everybodys)
    source = next(rank for rank, known in enumerate(gathered) if known is not None)
    known = gathered[source][0]
    nest = blank(known, device, device)
    mine = {} if owned is None else dict(leaves(owned.get(key)))
    for kind, place in leaves(nest):
        assert isinstance(place, Tensor)
        # On the owner a copy, elsewhere a blank of the same kind, to be filled.
        sent = stored(mine.get(kind, place)).to(device, copy=True)
        collectives.broadcast(sent, f"{key} of {name}", source)
        place.copy_(sent)
    return filled(nest, known)
