"""The state of a stock PyTorch training as pieces of a universal checkpoint, and back.

Owns the translation between torch's tensors and `zero_checkpoint.format.pieces`. Must always hold:
the pieces of all ranks cover each tensor exactly once; names and kinds are those that `zero_engine`
writes, so DDP, FSDP2, one process and the engine load each other's checkpoints at any world size;
what is loaded is bit-equal to what was saved.

A rank has a box of a DTensor, whatever its placements. Under DDP every rank has all of a tensor: it
saves an interval; of buffers, and of tensors of the script's objects, rank 0 saves all. A load
reads what several ranks have alike once, see `shared_reads`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero_checkpoint import Manifest
from zero_checkpoint.errors import CheckpointError, ModelMismatch
from zero_checkpoint.format.match import resolve
from zero_checkpoint.format.pieces import BUFFER, OTHER, PARAM, Piece, State, TensorId, TensorInfo
from zero_checkpoint.format.table import TensorTable
from zero_checkpoint.state.torch_state import (
    device_of_number,
    extra_state,
    matched,
    number_as_json,
    number_from_json,
    numbers_of,
    persistent_buffers,
    plain,
    restore_extra_state,
    set_option,
)
from zero_step.gradients.division import chunks
from zero_torch.state.shared_reads import Box, SharedReads, clip
from zero_torch.state.stateful import Statefuls
from zero_torch.wrapped import (
    Wrapped,
    elements_of,
    is_first_replica,
    like,
    offsets_of,
    own_name,
    replicas_of,
)

_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Options of an optimizer that choose a kernel: a load leaves them as they are."""


class TrainingState:
    """Weights, buffers and optimizer state of one training."""

    def __init__(
        self,
        wrapped: Wrapped,
        optimizer: torch.optim.Optimizer,
        rank: int,
        world: int,
        statefuls: Statefuls,
    ) -> None:
        """Describe the state of `rank` among `world` ranks."""
        self.statefuls = statefuls
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._rank = rank
        self._world = world
        self._places: dict[Any, tuple[Sequence[int], tuple[int, ...]]] = {}
        """Where this rank's box of a DTensor begins, and who has the same, by how it lies."""

    # ---- saving ----

    def tensors(self) -> TensorTable:
        """All tensors of all ranks."""
        return TensorTable(
            (each, TensorInfo(tuple(tensor.shape), tensor.dtype)) for each, tensor in self._live()
        )

    def owned(self) -> tuple[Piece, ...]:
        """This rank's part of each tensor: of replicas on all ranks, an interval."""
        found: list[Piece] = []
        for each, tensor in self._live():
            box = self._box(each, tensor)
            if isinstance(tensor, DTensor):
                if is_first_replica(tensor):
                    found += box.pieces()
                continue
            # Buffers and others are rank 0's: ranks may differ, and a mixture is nobody's.
            if each.kind in (BUFFER, OTHER):
                bounds = (0, *[tensor.numel()] * self._world)
            else:
                bounds = chunks((tensor.numel(),), 0, self._world).bounds
            found += clip(box.pieces(), bounds[self._rank], bounds[self._rank + 1])
        return tuple(found)

    def groups(self) -> list[dict[str, Any]]:
        """The record of each param group: its parameters, options and numbers, as JSON.

        Raises:
            CheckpointError: An option or a part of the state is no number.
        """
        groups, parameters = [], self._wrapped.parameters()
        for trained, frozen, group in self._groups():
            options = {
                key: plain(value, f"param group option {key}")
                for key, value in group.items()
                if key != "params"
            }
            names = {name: parameters[name] for name in (*trained, *frozen)}
            numbers = {name: self._numbers(name, each) for name, each in names.items()}
            common = next((numbers[name] for name in trained if numbers[name]), {})
            # As a rule trained parameters have the same numbers, and frozen ones have none.
            usual = {**{name: {} for name in frozen}, **dict.fromkeys(trained, common)}
            record = {
                "params": trained,
                "frozen": frozen,
                "hyperparameters": options,
                "state": common,
                "own": {name: own for name, own in numbers.items() if own != usual[name]},
            }
            groups.append(record)
        if others := self._others():
            groups[0]["of_optimizer"] = others
        return groups

    def extra_state(self) -> dict[str, Any]:
        """See `zero_checkpoint.state.torch_state`."""
        return extra_state(self._wrapped.module, own_name)

    def aliases(self) -> dict[str, str]:
        """Tied parameters: other name -> the name under which the tensor is stored."""
        names = {parameter: name for name, parameter in self._wrapped.parameters().items()}
        every = self._wrapped.module.named_parameters(remove_duplicate=False)
        return {own_name(n): names[p] for n, p in every if own_name(n) != names[p]}

    # ---- loading ----

    def wanted(self, manifest: Manifest) -> tuple[State, SharedReads]:
        """The pieces that this rank fills from a checkpoint, in fresh optimizer state.

        Returns:
            What it reads; and the reads of all ranks, whose `exchange` fills the rest.

        Raises:
            ModelMismatch: The checkpoint is of another model, or has its parameters in other param
                groups. Nothing has changed.
        """
        # The checks first, while the optimizer still has its state: what is refused has changed
        # nothing.
        self._check_groups(manifest)
        parameters = self._wrapped.parameters()
        of_optimizer = {
            each: info
            for each, info in manifest.tensors.items()
            if each.kind not in (PARAM, BUFFER, OTHER) and each.fqn in parameters
        }
        coming = {t: info for t, info in self.tensors().items() if t.kind in (PARAM, BUFFER)}
        coming |= {
            each: TensorInfo(tuple(parameters[each.fqn].shape), info.dtype)
            for each, info in of_optimizer.items()
        }
        resolve(State(coming, (), self.aliases()), manifest)
        # Every key that the checkpoint has for a parameter is allocated, and no other is left: what
        # the optimizer has made since would be of another step.
        for parameter in [key for key in self._optimizer.state if isinstance(key, Tensor)]:
            del self._optimizer.state[parameter]
        for each, info in of_optimizer.items():
            parameter = parameters[each.fqn]
            # On local elements: the dispatch of DTensor takes longer than a small load.
            elements = torch.empty_like(elements_of(parameter), dtype=info.dtype)
            self._optimizer.state[parameter][each.kind] = like(parameter, elements)
        self.statefuls.make(manifest)
        boxes = (self._box(each, tensor) for each, tensor in self._live())
        reads = SharedReads(boxes, self._rank, self._world)
        return State(self.tensors(), reads.pieces, self.aliases()), reads

    def adopt(self, groups: list[Mapping[str, Any]]) -> None:
        """Take over the saved `groups`, after the tensors have been filled."""
        parameters = self._wrapped.parameters()
        for record, (_, _, group) in zip(self._matched(groups), self._groups(), strict=True):
            if record is None:
                continue
            for key, value in record["hyperparameters"].items():
                if key in _HOW:
                    continue
                set_option(group, key, value)
            for name, numbers in numbers_of(record).items():
                if (parameter := parameters.get(name)) is None:
                    continue
                device = device_of_number(group, parameter.device)
                # A parameter without a gradient has no state, and torch makes all of it at once.
                # Only a record with `own` says of which parameters the numbers are.
                state = self._optimizer.state.get(parameter)
                if state or (numbers and "own" in record):
                    self._optimizer.state[parameter].update(
                        {key: number_from_json(value, device) for key, value in numbers.items()}
                    )

        for record in groups:
            device = device_of_number(record["hyperparameters"], self._wrapped.device)
            for key, value in record.get("of_optimizer", {}).items():
                self._optimizer.state[key] = number_from_json(value, device)

    def restore_extra_state(self, saved: Mapping[str, Any] | None) -> list[str]:
        """The inverse of `extra_state`; returns the names of modules that were not saved."""
        return restore_extra_state(self._wrapped.module, saved, own_name)

    def _matched(self, groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | None]:
        return matched(groups, [(trained, frozen) for trained, frozen, _ in self._groups()])

    def _check_groups(self, manifest: Manifest) -> None:
        saved = manifest.meta["engine"]["groups"]
        stored = {t.fqn for t in manifest.tensors if t.kind == PARAM}
        if not saved or stored != self._wrapped.parameters().keys():
            return
        found = self._matched(saved)
        # A group that trains nothing may be missing on either side.
        names = {
            name
            for record, (trained, _, _) in zip(found, self._groups(), strict=True)
            for name in (trained if record is None else ())
        }
        known = {id(record) for record in found}
        names |= {name for each in saved if id(each) not in known for name in each["params"]}
        if names:
            raise ModelMismatch(
                f"checkpoint {manifest.tag}: the parameters are in other param groups (for example "
                f"{min(names)}); give the optimizer the groups that it had"
            )

    # ---- what there is ----

    def _live(self) -> Iterator[tuple[TensorId, Tensor]]:
        """Every tensor, in the same order on all ranks."""
        parameters = self._wrapped.parameters()
        for name, parameter in parameters.items():
            yield TensorId(PARAM, name), parameter
        for name, parameter in parameters.items():
            state = self._optimizer.state.get(parameter, {})
            for key in sorted(elementwise(parameter, state)):
                yield TensorId(key, name), state[key]
        for name, buffer in persistent_buffers(self._wrapped.module):
            yield TensorId(BUFFER, own_name(name)), buffer
        yield from self.statefuls.live()

    def _box(self, each: TensorId, tensor: Tensor) -> Box:
        """The part of a tensor that this rank has."""
        data = elements_of(tensor)
        if not data.is_contiguous():
            raise CheckpointError(
                f"{each.kind} {each.fqn} is not contiguous in memory, as after "
                "to(memory_format=torch.channels_last); checkpoints need .contiguous() tensors"
            )
        if isinstance(tensor, DTensor):
            where = tensor.shape, tensor.device_mesh, tensor.placements
            if where not in self._places:
                self._places[where] = offsets_of(tensor), replicas_of(tensor, self._rank)
            offsets, ranks = self._places[where]
        else:
            offsets, ranks = [0] * data.dim(), tuple(range(self._world))
        shape = tuple(tensor.shape)
        return Box(id=each, shape=shape, offsets=offsets, data=data, ranks=ranks)

    def _groups(self) -> Iterator[tuple[list[str], list[str], dict[str, Any]]]:
        """Of each group the names of its trained and of its frozen parameters, and the group."""
        names = {parameter: name for name, parameter in self._wrapped.parameters().items()}
        for group in self._optimizer.param_groups:
            params = [p for p in group["params"] if p in names]
            trained = [names[p] for p in params if p.requires_grad]
            yield trained, [names[p] for p in params if not p.requires_grad], group

    def _numbers(self, name: str, parameter: Tensor) -> dict[str, Any]:
        """The numbers that an optimizer keeps for a parameter, such as a count of steps."""
        state = self._optimizer.state.get(parameter, {})
        return {
            key: number_as_json(state[key], f"optimizer state {key} of {name}")
            for key in sorted(state.keys() - elementwise(parameter, state))
        }

    def _others(self) -> dict[str, Any]:
        """The numbers that an optimizer keeps for no parameter."""
        state: Mapping[Any, Any] = self._optimizer.state
        others = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
        for key in others:
            if not isinstance(key, str):
                raise CheckpointError(
                    f"optimizer state has the key {key!r}, which is neither a parameter nor text; "
                    "keep what it has under a text"
                )
        return {key: number_as_json(others[key], f"optimizer state {key}") for key in others}


def elementwise(parameter: Tensor, state: Mapping[str, Any]) -> set[str]:
    """The keys of an optimizer's state that have one value for each element of a parameter."""
    return {
        key
        for key, value in state.items()
        if key != "step" and isinstance(value, Tensor) and value.shape == parameter.shape
    }
