"""`engine.offload_states` and `reload_states`: the device lent to somebody else for a while.

Owns what has been moved to host memory, has gone to another engine with the module, or has been
left half changed by a load. A moved tensor keeps everything but its bytes: its storage is empty
until the reload, so every view of it is right again afterwards. Must always hold: after a reload
all bytes are what they were; whoever needs a moved tensor gets an error that names what is missing,
and does not read an empty storage; nothing is made of half a load. What scripts read without asking
is never empty: a module's parameters show NaN meanwhile, and the optimizer's tensors are in host
memory, as in DeepSpeed.

Called by `engine` and `persistence`; `parts.Core` holds one. Source of the names: DeepSpeed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from zero_contract.errors import ZeroError
from zero_engine.optim.zero_optimizer import ZeroOptimizer
from zero_engine.sharding.flat_unit import FlatUnit

_log = logging.getLogger(__name__)


class OffloadStateTypeEnum(StrEnum):
    """What can be moved."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    """Master weights."""
    lp_params = "lp_params"
    """The weights that the model computes with."""
    lp_grads = "lp_grads"
    """Sums of gradients."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """Buffers of gradients on their way, which are only given up: they hold nothing to keep."""


class OffloadDeviceEnum(StrEnum):
    """Where to."""

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
    """Weights that hold anything."""

    reason: str
    optimizer: bool
    """So does the optimizer's state."""


class MovedStates:
    """What is in host memory instead of on the device, by the storage that it is from."""

    def __init__(self, units: Sequence[FlatUnit], zero: ZeroOptimizer | None) -> None:
        self._units = units
        self._zero = zero
        self._copies: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._homes: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors of the optimizer that show a copy now, and what they are otherwise; by `id`."""
        self.given_away = False
        """Another engine has taken the module."""
        self.inconsistent: Inconsistency | None = None
        self._read_until: Callable[[], object] | None = None

    def offload(
        self,
        include: Container[Kind | str] | None,
        device: OffloadDeviceEnum | str,
        *,
        pin_memory: bool,
        non_blocking: bool,
    ) -> None:
        """`engine.offload_states`; what is moved already stays moved.

        Raises:
            ZeroError: Parameters are offloaded by the config, or the device is not the CPU.
        """
        if not self._can_go_to(device):
            return
        self._wait_for_reader()
        for kind in Kind:
            if include is None or kind in include:
                for tensor in self.tensors_of(kind):
                    self._move(tensor, pin_memory=pin_memory, non_blocking=non_blocking)
        for tensor in self._of_optimizer():
            self._show_copy(tensor)
        self._show_what_is_there()

    def _can_go_to(self, device: OffloadDeviceEnum | str) -> bool:
        """Whether there is something to do; raises as `offload`."""
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

    def _move(self, tensor: Tensor, *, pin_memory: bool, non_blocking: bool) -> None:
        storage = self._storage(tensor)
        if storage._cdata in self._copies or not storage.nbytes() or not storage.resizable():
            return  # the last: on a CPU, numpy() looks at this memory, as a save does
        pin = pin_memory and tensor.is_cuda
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
        copy.copy_(_bytes(storage), non_blocking=non_blocking and pin)
        # On a GPU, whoever gets this memory next runs after the copy: they are on one stream.
        storage.resize_(0)
        self._copies[storage._cdata] = (storage, copy)

    def _show_copy(self, tensor: Tensor) -> None:
        _, copy = self._copies.get(tensor.untyped_storage()._cdata, (None, None))
        if copy is not None:
            self._homes[id(tensor)] = (tensor, tensor.detach())
            whole = copy.view(tensor.dtype)
            tensor.data = whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def restore(self, *, non_blocking: bool) -> None:
        """Bring everything back."""
        while self._homes:
            _, (tensor, home) = self._homes.popitem()
            tensor.data = home
        while self._copies:
            _, (storage, copy) = self._copies.popitem()
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy, non_blocking=non_blocking and copy.is_pinned())
        self._show_what_is_there()

    def give_away(self) -> None:
        """All of it belongs to another engine from now on."""
        self.given_away = True

    def lend(self, until: Callable[[], object]) -> None:
        """Another thread reads the states where they are; whoever needs them next waits for it.

        Args:
            until: Returns when it reads no more.
        """
        self._read_until = until

    def _wait_for_reader(self) -> None:
        if self._read_until is not None:
            self._read_until()
            self._read_until = None

    def need(self, what: str, kinds: Iterable[Kind] = EVERYTHING, *, refills: bool = False) -> None:
        """Let `what` go on only if nothing of these kinds is away or torn.

        Args:
            what: Named in the error.
            kinds: What it needs.
            refills: It does not mind what weights and optimizer state hold.

        Raises:
            ZeroError: Something is, or another engine has the module.
        """
        self._wait_for_reader()
        if self.inconsistent is not None and not refills:
            raise ZeroError(
                f"{what}: the state is neither the old one nor that of a checkpoint, because "
                f"{self.inconsistent.reason}; load a whole checkpoint, or start again"
            )
        if self.given_away:
            raise ZeroError(
                f"{what}: the module has been given to initialize() once more; use the engine that "
                "came from there"
            )
        if not self._copies:
            return
        away = [kind.value for kind in kinds if self._is_away(kind)]
        if away:
            raise ZeroError(
                f"{what} while {' and '.join(sorted(away))} are offloaded; call "
                "engine.reload_states() first"
            )

    def _is_away(self, kind: Kind) -> bool:
        return any(self._storage(t)._cdata in self._copies for t in self.tensors_of(kind))

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage:
        """Of the tensor on the device, whatever it shows."""
        _, home = self._homes.get(id(tensor), (tensor, tensor))
        return home.untyped_storage()

    def tensors_of(self, kind: Kind) -> Iterator[Tensor]:
        """The tensors of a kind that are in the device's memory; some share their storage."""
        here = [unit for unit in self._units if not unit.tiers.offloaded]
        match kind:
            case Kind.optim_states if self._zero is not None:
                yield from self._zero.remembered(here)
            case Kind.hp_params:
                yield from (t for unit in here if unit.trained for t in (unit.shard, unit.master))
            case Kind.lp_params:
                yield from (unit.full for unit in self._units)
                yield from (unit.shard for unit in here if not unit.trained)
                yield from (unit.secondary for unit in here if unit.secondary is not None)
            case Kind.lp_grads if self._zero is not None:
                yield from self._zero.gradient_sums()

    def _of_optimizer(self) -> Iterator[Tensor]:
        """What a script finds in the optimizer."""
        if self._zero is not None:
            for group in self._zero.optimizer.param_groups:
                yield from group["params"]
            for state in self._zero.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def _show_what_is_there(self) -> None:
        for unit in self._units:
            unit.show_what_is_there()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
