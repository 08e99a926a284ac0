"""Reads of parameters that are not there, by code that no hook of their module announces.

A module's forward may use the weights of another one: heads that are tied by hand, a bias that its
module returns, a hook that looks at what has just been released. While a parameter shows NaN, its
class has a `__torch_function__`, which every operator of torch calls that is given it. Within a
forward or a backward of its model it gathers the unit: a collective, so every rank must read it.

Source of the idea: DeepSpeed's external parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zero_contract.errors import ZeroError
from zero_engine.parameters.places import ZeroParamStatus, place_of
from zero_engine.parts import Core
from zero_engine.sharding.flat_unit import FlatUnit

_NAMES = """
    size dim ndimension numel nelement stride storage_offset element_size data_ptr get_device
    is_floating_point is_complex is_contiguous is_signed is_inference is_shared is_pinned
    untyped_storage requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad
    __hash__ __repr__ __format__ __len__ __set__ __delete__ __reduce_ex__
"""
_DESCRIBING = frozenset(_NAMES.split())
"""Functions that need no values; so are `*_like`, `new_*` and most properties."""
_VALUES = ("T", "mT", "H", "mH", "real", "imag")
"""The properties that are views."""
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_OF_VALUES = frozenset(getattr(Tensor, name).__get__ for name in _VALUES)


class _Absent:
    """The class of a parameter, in front of its own, while it shows NaN."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name == "__get__":
            describes = function not in _OF_VALUES
        else:
            describes = name in _DESCRIBING or name.endswith("_like") or name.startswith("new_")
        with torch._C.DisableTorchFunctionSubclass():
            if describes:
                shown = function(*args, **kwargs)
                return _look(args[0], shown) if function == _DATA else shown
            tensors = _tensors((args, kwargs))
            absent = [each for each in tensors if issubclass(type(each), _Absent)]
            outside = [param for param in absent if not _bring(param)]
            if outside:
                found = place_of(outside[0])
                # A script that looks at a parameter alone (logs, prints, norms) sees NaN; nothing
                # is computed with it.
                if found is not None and len(outside) < len(tensors):  # else it is only looked at
                    raise ZeroError(
                        f"{getattr(function, '__name__', function)}: {found[2].fqn} is divided, "
                        "and no forward of its engine is under way, in which it would be gathered; "
                        "enter zero.GatheredParameters(parameters) on every rank, or compute this "
                        "in a module"
                    )
                return function(*args, **kwargs)
        result = function(*args, **kwargs)
        if not any(each.requires_grad for each in _tensors(result)):
            for param in absent:
                # Autograd does not know that it was read, and so not until when it is needed.
                found = place_of(param)
                if found is not None:
                    core, unit, _ = found
                    core.coordinator.keep(unit)
        return result


class _Look(Tensor):
    """`data` of an absent parameter in a forward, and what is made of it alone."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        tensors = _tensors((args, kwargs))
        if not all(isinstance(each, _Look) for each in tensors):
            raise ZeroError(
                f"{getattr(function, '__name__', function)}: `.data` of a parameter that "
                "is divided, and is not gathered by this; use the parameter itself, or its detach()"
            )
        return super().__torch_function__(function, types, args, kwargs)


def _look(param: Tensor, data: Tensor) -> Tensor:
    # It gathers nothing, so that one rank alone may log `data`.
    found = place_of(param)
    in_forward = found is not None and found[0].coordinator.under_way
    return data.as_subclass(_Look) if in_forward else data


def _tensors(structure: Any) -> list[Tensor]:
    return [each for each in tree_leaves(structure) if isinstance(each, Tensor)]


def _bring(param: Tensor) -> bool:
    """Gather a parameter; False if neither a forward nor a backward of its model is under way."""
    found = place_of(param)
    if found is None:  # its engine is gone
        _mark(param, absent=False)
        return True
    core, unit, _ = found
    if core.stage.shards_parameters:
        return core.coordinator.read(unit)
    core.overlap.gather([unit])
    return True


@cache
def _absent(kind: type) -> type:
    return type(kind.__name__, (_Absent, kind), {"__module__": kind.__module__})


def watch(core: Core) -> None:
    """Let reads of an engine's parameters find these while they are not there."""
    for unit in core.units:
        for param in unit.params:  # an engine that had them before may have left them absent
            _mark(param, absent=False)
        if core.stage.shards_parameters or unit in core.overlap.units:
            unit.on_change = _show
            _show(unit)


def _show(unit: FlatUnit) -> None:
    status = ZeroParamStatus.AVAILABLE if unit.gathered else ZeroParamStatus.NOT_AVAILABLE
    for param in unit.large:
        _mark(param, absent=not unit.gathered)
        if "ds_status" in vars(param):
            vars(param)["ds_status"] = status


def _mark(param: Tensor, *, absent: bool) -> None:
    kind = type(param)
    if issubclass(kind, _Absent) != absent:
        param.__class__ = _absent(kind) if absent else kind.__mro__[2]
