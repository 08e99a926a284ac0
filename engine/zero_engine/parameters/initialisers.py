"""What the modules of a model set their parameters to, for those on the meta device.

Of each module, after those inside it: its `reset_parameters`, then the `_init_weights` of the
innermost model around it, as constructors do. An initialiser runs with all parameters of its unit;
one of a module that has none itself and spans several units does not run.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_contract.errors import ConfigError
from zero_engine.parameters.early_shards import hide
from zero_engine.sharding.partition import UnitSpec

_OWN = ("reset_parameters", "_reset_parameters")
"""A module's initialiser of its own parameters, by torch's convention."""
_OF_THE_MODEL = "_init_weights"
"""A model's initialiser of each of its modules, by the convention of transformers."""
_REMEDY = (
    "give the class a reset_parameters() that sets all of them; or make the model under zero.Init "
    "in the place of torch.device('meta'), which runs constructors as they are; or set "
    'elastic.initial_weights to a directory of safetensors files, or to "checkpoint" if '
    "load_checkpoint follows"
)


def leave_meta(model: nn.Module) -> frozenset[int]:
    """Move what is on the meta device to the host, without values and memory; its `id`s."""
    moved = set()
    for param in model.parameters():
        if param.is_meta:
            blank = torch.empty((), dtype=param.dtype, device="cpu").expand(param.shape)
            # The parameter stays the same object: optimizers, ties and flat lists refer to it.
            torch._C._swap_tensor_impl(param, nn.Parameter(blank, param.requires_grad))
            hide(param)
            moved.add(id(param))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
                moved.add(id(module._buffers[name]))
    return frozenset(moved)


class Initialisers:
    """Runs the initialisers of a model's modules."""

    def __init__(self, model: nn.Module, without_values: frozenset[int]) -> None:
        self._modules = dict(_children_first("", model))
        self._without_values = without_values
        self._seed = torch.initial_seed()
        self._names = {id(module): name for name, module in self._modules.items()}
        self.buffers = [
            f"{name}.{key}".lstrip(".")
            for name, module in self._modules.items()
            for key, buffer in module._buffers.items()
            if id(buffer) in without_values
        ]

    def check(self, names: Iterable[str]) -> None:
        """Raise ConfigError if the module of such a parameter or buffer has no initialiser."""
        for name in names:
            owner = name.rpartition(".")[0]
            if not any(self._initialisers(owner)):
                raise ConfigError(
                    f"{name} is on the meta device, and module {owner or 'the model'} "
                    f"({type(self._modules[owner]).__name__}) has no initialiser; {_REMEDY}"
                )

    def set_buffers(self) -> None:
        """Set the buffers that have no values. The parameters of their modules stay as they are."""
        owners = dict.fromkeys(name.rpartition(".")[0] for name in self.buffers)
        for name in owners:
            with self._values_in({name: self._modules[name]}, {}, buffers=True):
                self._initialise(name)
                _check_set(name, self._modules[name], self._modules[name]._buffers)

    def draw(self, spec: UnitSpec, places: Mapping[int, Tensor]) -> None:
        """Write the parameters of a unit to their places, by `id`."""
        if spec.is_root:  # its module contains those of all units
            chosen = {
                name: module
                for name, module in self._modules.items()
                if any(id(param) in places for param in module._parameters.values())
            }
        else:
            chosen = dict(_children_first(self._names[id(spec.module)], spec.module))
        own = {
            name: {k: p for k, p in module._parameters.items() if p is not None and id(p) in places}
            for name, module in chosen.items()
        }
        with self._values_in(chosen, places):
            for name in chosen:
                self._initialise(name)
            for name, params in own.items():
                _check_set(name, chosen[name], params)
                for param in params.values():
                    place = places[id(param)]
                    if param.data_ptr() != place.data_ptr():
                        place.copy_(param.detach())

    def _initialisers(self, name: str) -> tuple[Callable[[], Any] | None, Callable[[], Any] | None]:
        """A module's own initialiser, and that of the innermost model around it."""
        module, parts = self._modules[name], name.split(".") if name else []
        own = next((each for key in _OWN if _accepts(each := getattr(module, key, None))), None)
        for depth in range(len(parts), -1, -1):
            around = self._modules.get(".".join(parts[:depth]))
            hook = getattr(around, _OF_THE_MODEL, None)
            if hook is not None and _accepts(hook, module):
                return own, partial(hook, module)
        return own, None

    def _initialise(self, name: str) -> None:
        """Run a module's initialisers, as its constructor and then its model do."""
        own, of_the_model = self._initialisers(name)
        module = self._modules[name]
        # By the module's name: it draws the same whatever has been drawn before.
        seed = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()[:8]
        both = (own, of_the_model)
        # Mostly the model replaces all that the module would draw: then that need not be drawn.
        alone = of_the_model is not None and len(_tensors(module)) > 0
        for attempt in ((of_the_model,), both) if alone else (both,):
            # What the script draws afterwards does not depend on what was drawn here.
            with torch.no_grad(), torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(int.from_bytes(seed, "big"))
                for initialiser in attempt:
                    if initialiser is not None:
                        initialiser()
            if not any(map(_is_unset, _tensors(module))):
                return

    @contextmanager
    def _values_in(
        self,
        modules: Mapping[str, nn.Module],
        places: Mapping[int, Tensor],
        *,
        buffers: bool = False,
    ) -> Iterator[None]:
        """Let the parameters of modules have memory: of their places, or for the moment.

        `buffers`: those without values are to get some; all others are kept.
        """
        with ExitStack() as after:
            for module in modules.values():
                for tensor in _tensors(module):
                    is_buffer = not isinstance(tensor, nn.Parameter)
                    has_values = id(tensor) not in self._without_values
                    # It keeps what an initialiser writes: it has memory of its own already.
                    if is_buffer and buffers and not has_values:
                        _unset(tensor)
                        continue
                    after.callback(setattr, tensor, "data", tensor.data)
                    if is_buffer or has_values:  # an initialiser may write to it: to a copy
                        tensor.data = tensor.data.clone()
                        continue
                    place = places.get(id(tensor))
                    # Initialisers draw on the CPU in the parameter's dtype, whatever the unit has.
                    if place is None or place.device.type != "cpu" or place.dtype != tensor.dtype:
                        place = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    tensor.data = place
                    _unset(tensor)
            yield


def _children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        yield from _children_first(f"{name}.{key}" if name else key, child)
    yield name, module


def _tensors(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module itself."""
    own = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in own if tensor is not None]


def _accepts(method: Any, *args: Any) -> bool:
    """Whether this is a method that can be called with these arguments alone."""
    try:
        inspect.signature(method).bind(*args)
    except (TypeError, ValueError):  # the second: Python knows no signature of it
        return False
    return True


def _unset(tensor: Tensor) -> None:
    """Fill a tensor with what no initialiser sets: NaN, or the least whole number."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.data.fill_(torch.iinfo(tensor.dtype).min)


def _is_unset(tensor: Tensor) -> bool:
    """Whether an element is still what `_unset` has written."""
    if tensor.is_floating_point() or tensor.is_complex():
        # One NaN makes the sum NaN: no tensor of flags is made, as large as the weights.
        return bool(tensor.detach().sum().isnan())
    if tensor.dtype == torch.bool:
        return False
    return bool((tensor.detach() == torch.iinfo(tensor.dtype).min).any())


def _check_set(name: str, module: nn.Module, own: Mapping[str, Tensor | None]) -> None:
    """Raise ConfigError if the initialisers of a module have left one of its tensors as it was."""
    for key, tensor in own.items():
        if tensor is not None and _is_unset(tensor):
            raise ConfigError(
                f"{name}.{key}".lstrip(".") + f" is on the meta device, and the initialiser of "
                f"{type(module).__name__} leaves elements of it unset; {_REMEDY}"
            )
