"""The state of an optimizer that steps whole parameters, as pieces of a checkpoint, and back.

Must always hold: a tensor is stored in its own shape, by the rank that owns the parameter; all
ranks say the same of all of them, because they tell each other before a save; a world of another
size finds everything again, because sketches and tensors go by the parameter's name.

Called by `engine_state` and `param_access`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_engine.checkpoint import Manifest
from zero_engine.checkpoint.dtypes import DTYPES
from zero_engine.checkpoint.pieces import Piece, TensorId, TensorInfo
from zero_engine.collectives import Collectives
from zero_engine.errors import CheckpointError
from zero_engine.optimizer_state import device_of_number
from zero_engine.owner_steps import Owned, StepByOwners
from zero_engine.sketches import blank, listed, sketch
from zero_engine.zero_optimizer import ZeroOptimizer

WHOLE = "whole"
"""Of a param group in the manifest: name of a parameter -> its sketch."""


class StateOfOwners:
    """State in shapes of its own, each parameter's on one rank."""

    def __init__(self, zero: ZeroOptimizer, steps: StepByOwners, collectives: Collectives) -> None:
        self._zero = zero
        self._steps = steps
        self._collectives = collectives

    def agree(self) -> bool:
        """Learn what the state of each parameter is like; whether there are other tensors now.

        Raises:
            CheckpointError: Of one it cannot be told; on every rank.
        """
        before = self.tensors()
        told = tell(self._sketches, self._collectives, self._zero.units[0].full.device)
        self._know(told)
        return self.tensors() != before

    def _know(self, sketches: Iterable[Mapping[str, Any]]) -> None:
        """In one order, wherever they come from."""
        known = {fqn: each for some in sketches for fqn, each in some.items()}
        names = [fqn for group in self._zero.names_by_group() for fqn in group]
        self._steps.sketches = {fqn: known[fqn] for fqn in names if fqn in known}

    def _sketches(self) -> dict[str, Any]:
        owned = [each for each in self._steps.owned if self._steps.state_of(each)]
        return {each.slot.fqn: self._sketch(each)[0] for each in owned}

    def live(self) -> Iterator[Tensor]:
        """All tensors of what this rank owns."""
        for _, _, tensor in self._own():
            yield tensor

    def _own(self) -> Iterator[tuple[str, str, Tensor]]:
        for each in self._steps.owned:
            for kind, tensor in self._sketch(each)[1].items():
                yield each.slot.fqn, kind, tensor

    def _sketch(self, owned: Owned) -> tuple[Any, dict[str, Tensor]]:
        return sketch(self._steps.state_of(owned), owned.slot.fqn)

    def tensors(self) -> dict[TensorId, TensorInfo]:
        """As the sketches name them."""
        return {
            TensorId(kind, fqn): TensorInfo(tuple(shape), DTYPES[dtype])
            for fqn, known in self._steps.sketches.items()
            for kind, dtype, shape in listed(known)
        }

    def pieces(self) -> Iterator[Piece]:
        """Whole tensors."""
        for fqn, kind, tensor in self._own():
            if tensor.numel():
                yield Piece(TensorId(kind, fqn), 0, tensor.view(-1))

    def records(self) -> list[dict[str, Any]]:
        """The sketches."""
        sketches = self._steps.sketches
        return [
            {"state": {}, WHOLE: {fqn: sketches[fqn] for fqn in names if fqn in sketches}}
            for names in self._zero.names_by_group()
        ]

    def make(self, manifest: Manifest) -> None:
        """Zeros for every tensor of what this rank owns, and all the rest as it was."""
        groups = manifest.meta["engine"]["groups"]
        self._know(group.get(WHOLE, {}) for group in groups)
        optimizer = self._zero.optimizer
        optimizer.state.clear()
        for owned in self._steps.owned:
            known = self._steps.sketches.get(owned.slot.fqn)
            if known is not None:
                assert owned.slot.group is not None
                group = optimizer.param_groups[owned.slot.group]
                optimizer.state[owned.param] = blank(
                    known, owned.param.device, device_of_number(group, owned.param.device)
                )

    def finish(self, records: Sequence[Mapping[str, Any] | None]) -> None:
        """Nothing is left to do."""


def fetch(
    owned: Mapping[str, Any] | None,
    key: str,
    name: str,
    collectives: Collectives,
    device: torch.device,
) -> Any:
    """What the owner of a parameter has under a key of its state, in a copy. Collective.

    Args:
        owned: The parameter's state; None on ranks that do not own it.
        key: Of the state.
        name: The parameter's.
        collectives: All ranks.
        device: Where to have it.

    Returns:
        The same on every rank; None if there is nothing (yet).
    """
    told = tell(
        lambda: None if owned is None else [sketch(owned.get(key), name)[0]], collectives, device
    )
    source = next(rank for rank, said in enumerate(told) if said is not None)
    value = blank(told[source][0], device, device)
    tensors = {} if owned is None else sketch(owned.get(key), name)[1]
    for kind, place in sketch(value, name)[1].items():
        if owned is not None:
            place.copy_(tensors[kind])
        collectives.broadcast(place, f"{key} of {name}", source)
    return value


def tell(own: Callable[[], Any], collectives: Collectives, device: torch.device) -> list[Any]:
    """What every rank tells, as JSON, by rank. Collective.

    Raises:
        CheckpointError: One cannot tell it; on every rank.
    """
    try:
        said = {"said": own()}
    except CheckpointError as error:
        said = {"error": str(error)}
    text = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    sizes = torch.tensor([text.numel()], device=device)
    lengths = collectives.everybodys(sizes, "how much is told of state").flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    rows = collectives.everybodys(padded, "what is told of state").cpu()
    told = [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]
    if errors := [each["error"] for each in told if "error" in each]:
        raise CheckpointError(errors[0])
    return [each["said"] for each in told]
