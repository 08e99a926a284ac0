"""`engine.offload_states` and `reload_states`: frees the device for another use meanwhile.

Owns the record of what has been moved to host memory, has gone to another engine with the module,
or is inconsistent after a failed load. A moved tensor keeps everything but its bytes: its storage
is empty until the reload, so every view of it is right again afterwards. What scripts read without
the engine is never empty, a view that they have kept included. Source of the names: DeepSpeed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from zero_contract.errors import ZeroError
from zero_engine.optim.zero_optimizer import ZeroOptimizer
from zero_engine.sharding import small_params
from zero_engine.sharding.flat_unit import FlatUnit
from zero_engine.sharding.parameter_views import FreedStorage

_log = logging.getLogger(__name__)


class OffloadStateTypeEnum(StrEnum):
    """The kinds of state that can be moved."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    """Master weights."""
    lp_params = "lp_params"
    """The weights that the model computes with."""
    lp_grads = "lp_grads"
    """Sums of gradients."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """Buffers of gradients in flight, which are only freed: they hold nothing to keep."""


class OffloadDeviceEnum(StrEnum):
    """The place to move states to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


Kind = OffloadStateTypeEnum
EVERYTHING = frozenset(Kind)
FOR_FORWARD = frozenset({Kind.lp_params})
FOR_FORWARD_OF_SHARDS = frozenset({Kind.lp_params, Kind.hp_params})
"""At stage 3 the modules are gathered from the master weights."""
WEIGHTS = frozenset({Kind.lp_params, Kind.hp_params})


@dataclass(frozen=True, slots=True)
class Inconsistency:
    """Why weights are inconsistent."""

    reason: str
    optimizer: bool
    """Whether the optimizer's state is inconsistent, too."""
    params: Set[str] = frozenset()
    """The names of parameters that only a load which has them mends."""


class MovedStates:
    """The states that are in host memory instead of on the device, or not usable."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        zero: ZeroOptimizer | None,
        await_weights: Callable[[], None],
    ) -> None:
        """Nothing is moved; `await_weights` returns when those of the last step have arrived."""
        self._await_weights = await_weights
        self._units = units
        self._zero = zero
        # By `_cdata`, which all tensors on a storage share: its address is 0 while it is empty.
        self._copies: dict[int, tuple[torch.UntypedStorage, FreedStorage, Tensor]] = {}
        self._homes: dict[int, tuple[Tensor, Tensor]] = {}
        """By `id`: a tensor of the optimizer that shows a copy, and its data on the device."""
        self.given_away = False
        """Whether another engine has taken the module."""
        self.inconsistent: Inconsistency | None = None
        self._read_until: Callable[[], object] | None = None
        self.before_change: list[Callable[[], object]] = []
        """What is called before a state changes: copies of it may be under way."""
        if zero is not None:
            self.before_change = zero.before_change

    def offload(
        self,
        include: Container[Kind | str] | None,
        device: OffloadDeviceEnum | str,
        *,
        pin_memory: bool,
        non_blocking: bool,
    ) -> None:
        """`engine.offload_states`; states that are moved already stay moved.

        Raises:
            ZeroError: The config offloads parameters, or the device is not the CPU.
        """
        if not self._can_go_to(device):
            return
        self._await_weights()
        self._wait_for_reader()
        self.hold_copies()
        kinds = [kind for kind in Kind if include is None or kind in include]
        try:
            for tensor in (each for kind in kinds for each in self.tensors_of(kind)):
                storage = self._storage(tensor)
                moved = storage._cdata in self._copies
                # On a CPU, memory that numpy() refers to cannot be resized, as in a save.
                if moved or not storage.nbytes() or not storage.resizable():
                    continue
                # Without a GPU torch pins no memory.
                pin, size = pin_memory and tensor.is_cuda, storage.nbytes()
                copy = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
                copy.copy_(_bytes(storage), non_blocking=non_blocking and pin)
                # On a GPU the next user of this memory runs after the copy, on one stream.
                freed = FreedStorage()
                freed.free(storage)
                self._copies[storage._cdata] = (storage, freed, copy)
        finally:
            if non_blocking and torch.cuda.is_available():
                # The copies ran one behind the other. What is shown below has to be complete.
                torch.cuda.current_stream().synchronize()
            # Also without memory for all copies: no script finds a storage that is empty, neither
            # in the optimizer's parameters and state nor in the module.
            assert self._zero is not None
            optimizer = self._zero.optimizer
            shown = [param for group in optimizer.param_groups for param in group["params"]]
            for state in optimizer.state.values():
                shown += [value for value in state.values() if isinstance(value, Tensor)]
            for tensor in shown:
                if found := self._copies.get(tensor.untyped_storage()._cdata):
                    *_, kept = found
                    self._homes[id(tensor)] = (tensor, tensor.detach())
                    layout = tensor.size(), tensor.stride(), tensor.storage_offset()
                    tensor.data = kept.view(tensor.dtype).as_strided(*layout)
            self._show_what_is_there()

    def _can_go_to(self, device: OffloadDeviceEnum | str) -> bool:
        """Whether states can be moved to a device. Raises as `offload`."""
        if self._zero is None:
            raise ZeroError("offload_states(): the engine has no optimizer, so nothing to offload")
        if any(unit.tiers.weights.far for unit in self._units):
            raise ZeroError(
                "offload_states(): offload_param has moved the parameters already; use one of the "
                "two"
            )
        if device == OffloadDeviceEnum.none:
            _log.warning('offload_states(device="none") moves nothing')
        elif device != OffloadDeviceEnum.cpu:
            raise ZeroError(f'offload_states(device={str(device)!r}): states can be moved to "cpu"')
        return device == OffloadDeviceEnum.cpu

    def restore(self, *, non_blocking: bool) -> None:
        """`engine.reload_states`: move everything back."""
        while self._copies:
            key, (storage, freed, copy) = next(iter(self._copies.items()))
            freed.fill(storage, copy.numel())
            _bytes(storage).copy_(copy, non_blocking=non_blocking and copy.is_pinned())
            del self._copies[key]  # only now: without memory for it the reload can be repeated
        # Then the optimizer's tensors, which until now show the copies and not empty storages.
        while self._homes:
            _, (tensor, home) = self._homes.popitem()
            tensor.data = home
        self._show_what_is_there()

    @property
    def are_away(self) -> bool:
        """Whether some states are in host memory by `offload`."""
        return bool(self._copies)

    def lend(self, until: Callable[[], object]) -> None:
        """Let a thread read the states in place; their next use waits for `until` to return."""
        self._read_until = until

    def _wait_for_reader(self) -> None:
        if self._read_until is not None:
            self._read_until()
            self._read_until = None

    def hold_copies(self) -> None:
        """Let what is done to the states from now on come after the copies that are under way."""
        for hold in self.before_change:
            hold()

    def need(self, what: str, kinds: Iterable[Kind] = EVERYTHING, *, refills: bool = False) -> None:
        """Prepare for a call between steps, which may change states of these kinds.

        One that refills weights and optimizer state mends what is inconsistent.

        Raises:
            ZeroError: A state is moved or inconsistent, or another engine has the module.
        """
        # In this order: what has not arrived cannot be moved, and a save may read what is to
        # change.
        self._await_weights()
        self._wait_for_reader()
        self.hold_copies()
        self._check(what, kinds, refills=refills)
        self.take_writes()

    def compute(
        self, what: str, kinds: Iterable[Kind] = EVERYTHING, *, arrived: bool = True
    ) -> None:
        """Prepare for a part of a step; forward waits by itself for weights that have not arrived.

        Raises:
            ZeroError: As `need`.
        """
        if arrived:
            self._await_weights()
        self._wait_for_reader()
        self._check(what, kinds)

    def _check(self, what: str, kinds: Iterable[Kind], *, refills: bool = False) -> None:
        if self.inconsistent is not None and not refills:
            raise ZeroError(
                f"{what}: the state is neither the old one nor that of a checkpoint, because "
                f"{self.inconsistent.reason}; load a checkpoint, or start again"
            )
        if self.given_away:
            raise ZeroError(
                f"{what}: the module has been given to initialize() once more; use the engine that "
                "came from there"
            )
        if away := self._away(kinds):
            raise ZeroError(
                f"{what} while {' and '.join(sorted(away))} are offloaded; call "
                "engine.reload_states() first"
            )

    def _away(self, kinds: Iterable[Kind]) -> list[str]:
        return [
            kind.value
            for kind in (kinds if self._copies else ())
            if any(self._storage(t)._cdata in self._copies for t in self.tensors_of(kind))
        ]

    def take_writes(self) -> None:
        """Let what the script has written to small parameters count."""
        # Also while other states are away: what reads weights has to find it.
        if not self._away(WEIGHTS):
            self.hold_copies()
            small_params.take([each for unit in self._units for each in unit.take_writes()])

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage:
        """The storage of a tensor on the device, even if it shows a copy."""
        _, home = self._homes.get(id(tensor), (tensor, tensor))
        return home.untyped_storage()

    def tensors_of(self, kind: Kind) -> Iterator[Tensor]:
        """The tensors of a kind that are in the device's memory; some share their storage."""
        here = [unit for unit in self._units if not unit.tiers.offloaded]
        match kind:
            case Kind.optim_states if self._zero is not None:
                yield from self._zero.remembered(here)
            case Kind.hp_params:
                yield from (
                    t for unit in here if unit.spec.trained for t in (unit.shard, unit.master)
                )
            case Kind.lp_params:
                yield from (unit.full for unit in self._units)
                yield from (unit.shard for unit in here if not unit.spec.trained)
                yield from (unit.wire.secondary for unit in here if unit.wire.secondary is not None)
            case Kind.lp_grads if self._zero is not None:
                yield from self._zero.gradient_sums()

    def _show_what_is_there(self) -> None:
        for unit in self._units:
            unit.show_what_is_there()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
