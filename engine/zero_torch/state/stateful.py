"""Objects of the script in a run's checkpoints: whatever has `state_dict` and `load_state_dict`.

An average of the weights, a data loader, a second optimizer. Must always hold: what is saved is the
state at the end of a step, whatever the script does to it while it is being written; a load gives
every object what was saved under its name, and names the objects that the checkpoint does not have.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from zero_checkpoint import Manifest
from zero_checkpoint.format.pieces import OTHER, TensorId
from zero_checkpoint.plain import mapped
from zero_checkpoint.state.client_state import Stored, check_dense, pack, unpack
from zero_contract.errors import ConfigError

META = "stateful"
"""The key of the objects' states in `meta`, without their tensors."""
_log = logging.getLogger(__name__)


class Statefuls:
    """The objects by name, and the tensors of their states while they are saved or loaded."""

    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        """Keep objects. Raises ConfigError if one of them cannot give or take its state."""
        for name, each in objects.items():
            if not isinstance(each, Stateful):
                raise ConfigError(
                    f"stateful[{name!r}] is a {type(each).__name__}, which has no state_dict() and "
                    "load_state_dict(); give an object that has both"
                )
        self._objects = objects
        self._tensors: dict[TensorId, Tensor] = {}
        self._coming: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._objects)

    def live(self) -> Iterator[tuple[TensorId, Tensor]]:
        """The tensors that are being saved or loaded."""
        yield from self._tensors.items()

    def take(self) -> dict[str, Any]:
        """Copy the states; returns them without their tensors, as JSON.

        Raises:
            CheckpointError: A value cannot be stored; names it.
        """
        self._tensors = {}
        named = _Names()

        def taken_out(value: Any, path: str) -> Any:
            if not isinstance(value, Tensor):
                return value
            if not isinstance(value, DTensor):
                check_dense(value, path)
            name = named.of(path)
            # A copy: the script may change it while it is being written.
            self._tensors[TensorId(OTHER, name)] = value.detach().clone().contiguous()
            return Stored(name)

        return {
            name: pack(mapped(each.state_dict(), name, taken_out), name)
            for name, each in self._objects.items()
        }

    def make(self, manifest: Manifest) -> None:
        """Allocate the tensors that a checkpoint has for the objects."""
        self._tensors, self._coming = {}, {}
        saved = manifest.meta.get(META, {})
        stored = {t.fqn: t for t in manifest.tensors if t.kind == OTHER}
        # What the objects have now: a DTensor among it says how the loaded one is to lie.
        present: dict[str, Tensor] = {}
        named = _Names()

        def note(value: Any, path: str) -> Any:
            if isinstance(value, Tensor):
                present[named.of(path)] = value
            return value

        def allocate(value: Any, _: str) -> Any:
            if type(value) is Stored:
                which = stored[str(value)]
                info, like = manifest.tensors[which], present.get(str(value))
                if isinstance(like, DTensor) and like.shape == info.shape:
                    made: Tensor = torch.empty_like(like, dtype=info.dtype)
                else:
                    made = torch.empty(info.shape, dtype=info.dtype, device="cpu")
                self._tensors[which] = made
            return value

        for name, each in self._objects.items():
            mapped(each.state_dict(), name, note)
            if name in saved:
                self._coming[name] = unpack(saved[name])
                mapped(self._coming[name], name, allocate)

    def restore(self) -> list[str]:
        """Give the objects what was loaded; returns the names of those that were not saved."""
        by_path = {each.fqn: tensor for each, tensor in self._tensors.items()}
        for name, skeleton in self._coming.items():
            state = mapped(skeleton, name, lambda v, _: by_path[str(v)] if type(v) is Stored else v)
            self._objects[name].load_state_dict(state)
        absent = sorted(self._objects.keys() - self._coming.keys())
        self.drop()
        return absent

    def drop(self) -> None:
        """Forget the tensors."""
        self._tensors, self._coming = {}, {}


class _Names:
    """A name of its own for each tensor: `{"a.b": x, "a": {"b": y}}` has two at the path a.b."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def of(self, path: str) -> str:
        name, number = path, 1
        while name in self._taken:
            number += 1
            name = f"{path}#{number}"
        self._taken.add(name)
        return name
