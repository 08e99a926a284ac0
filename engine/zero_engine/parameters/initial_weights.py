"""The first values of an engine's weights, unit by unit: no rank holds the whole model.

They come from the parameters themselves; from shares, if the model was made under `zero.Init`; and
for parameters on the meta device from the initialisers of their modules, from safetensors files, or
from a checkpoint that is loaded later. Rank 0 has each value first, and the engine broadcasts it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zero_comm.exchange.collectives import Collectives
from zero_contract.errors import ConfigError
from zero_engine.config.schema import FROM_CHECKPOINT, FROM_MODULES
from zero_engine.parameters.early_shards import take
from zero_engine.parameters.initialisers import Initialisers
from zero_engine.sharding.flat_unit import Slot
from zero_engine.sharding.partition import UnitSpec


class InitialWeights:
    """Where the weights of one model come from."""

    def __init__(
        self,
        model: nn.Module,
        without_values: frozenset[int],
        collectives: Collectives,
        source: str,
    ) -> None:
        """Check that all weights have a source; nothing is set yet.

        Raises:
            ConfigError: A parameter or buffer has no source; names its module.
        """
        self._without_values = without_values
        self._sets = collectives.rank == 0
        self._collectives = collectives
        self._problem: Exception | None = None
        self._initialisers = Initialisers(model, without_values)
        named = dict(model.named_parameters(remove_duplicate=False))
        missing = [name for name, param in named.items() if id(param) in without_values]
        self.awaited = frozenset(missing if source == FROM_CHECKPOINT else ())
        """The names of the parameters that a load is to give their values."""
        self._files: _Files | None = None
        self._names: dict[int, list[str]] = {}
        for name in missing:
            self._names.setdefault(id(named[name]), []).append(name)
        if source == FROM_MODULES:
            self._initialisers.check(missing)
        elif source != FROM_CHECKPOINT and missing:
            self._files = _Files(Path(source), list(self._names.values()))

    def set_buffers(self) -> None:
        """Set the buffers that have no values, on rank 0. Not collective.

        Raises:
            ConfigError: A module with such buffers has no initialiser.
        """
        self._initialisers.check(self._initialisers.buffers)
        self._attempt(self._initialisers.set_buffers)

    def write(self, spec: UnitSpec, slots: Sequence[Slot], whole: Tensor) -> None:
        """Write the weights of a unit to its slots, on all ranks. Collective."""
        places: dict[int, Tensor] = {}
        for slot, member in zip(slots, spec.members, strict=True):
            place = whole[slot.start : slot.stop].view(slot.shape)
            if id(member.param) in self._without_values:
                places[id(member.param)] = place
            else:
                values = take(member.param)
                place.copy_(member.param.detach() if values is None else values)
        if places and not self.awaited:
            self._attempt(partial(self._set, spec, places))
        # Also what all ranks have: a script may have made it with other random numbers on each.
        self._collectives.broadcast(whole, f"initial weights of {spec.name}")

    def finish(self) -> None:
        """Note that all units have been written. Collective.

        Raises:
            ConfigError: Rank 0 could not set some of the weights.
        """
        if not self._without_values:
            return
        # Rank 0 alone has an error; the others have taken part in all broadcasts, and learn it
        # here.
        failed = torch.tensor([float(self._problem is not None)], device="cpu")
        self._collectives.broadcast(failed, "whether the initial weights are set")
        if self._problem is not None:
            raise ConfigError(str(self._problem)) from self._problem
        if failed.item():
            raise ConfigError("rank 0 could not set the initial weights: see its error")

    def _set(self, spec: UnitSpec, places: Mapping[int, Tensor]) -> None:
        if self._files is None:
            self._initialisers.draw(spec, places)
            return
        for key, place in places.items():
            self._files.read(self._names[key], place)

    def _attempt(self, act: Callable[[], None]) -> None:
        """Do this on rank 0; `finish` tells all ranks if it fails, now or before."""
        if self._sets and self._problem is None:
            try:
                act()
            except Exception as error:
                self._problem = error


class _Files:
    """Safetensors files that hold parameters under their names."""

    def __init__(self, path: Path, wanted: Sequence[Sequence[str]]) -> None:
        """Find parameters, each under any of its names.

        Raises:
            ConfigError: There are no files, or a parameter is in none of them.
        """
        # In one order: of a parameter that several files have, the last one counts.
        paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        self._files: dict[str, Any] = {}
        try:
            for each in paths:
                file = safe_open(str(each), framework="pt")
                self._files.update(dict.fromkeys(file.keys(), file))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"elastic.initial_weights: {path} cannot be read: {error}") from error
        missing = [names[0] for names in wanted if not any(name in self._files for name in names)]
        if missing:
            raise ConfigError(
                f"elastic.initial_weights: {len(missing)} parameters are not in the "
                f"{len(paths)} safetensors files of {path}, first {missing[0]}; files with the "
                "names of this model are needed"
            )

    def read(self, names: Sequence[str], place: Tensor) -> None:
        """Copy a parameter to its place. Raises ConfigError if it has another shape."""
        name = next(name for name in names if name in self._files)
        values = self._files[name].get_tensor(name)
        if values.shape != place.shape:
            raise ConfigError(
                f"elastic.initial_weights: {name} has shape {tuple(values.shape)} in the files and "
                f"{tuple(place.shape)} in the model"
            )
        place.copy_(values)
