"""The state of an optimizer that steps whole parameters, as pieces of a checkpoint, and back.

Must always hold: a tensor or a number is stored in its own shape, by the rank that owns the
parameter; all ranks write the same tables, because they have the same tree specs; a world of
another size finds everything again, because tree specs and leaves go by the parameter's name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_checkpoint import Manifest
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.dtypes import DTYPES
from zero_checkpoint.format.pieces import Piece, TensorId, TensorInfo
from zero_checkpoint.state.torch_state import device_of_number
from zero_comm.exchange.collectives import Collectives
from zero_comm.exchange.objects import gather_objects
from zero_engine.optim.owner_steps import PROBLEM, StepByOwners
from zero_engine.optim.tree_spec import Number, blank, described, filled, leaves, stored, tree_spec
from zero_engine.optim.zero_optimizer import ZeroOptimizer

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
        sent = stored(mine.get(kind, place)).to(device, copy=True)
        collectives.broadcast(sent, f"{key} of {name}", source)
        place.copy_(sent)
    return filled(nest, known)
