"""Stage 3: when the full parameters of a unit are there.

Owns the gather and release hooks. Must always hold: a unit is gathered before its module's
forward and before the backward of that module's outputs, and is released when the pass through
the module ends; the root stays gathered from the beginning of forward to the end of backward,
because tied and stray parameters live there. Gathers are collective: all ranks must run their
modules in the same order. (Prefetch belongs into `_gather`: the next unit is known there.)

Gathering before backward hangs on the module's output tensors, not on a module backward hook:
that works for any output structure, and with non-reentrant activation checkpointing, whose
recomputation runs forward inside backward and must not release.

Called by `engine`. Source of the idea: FSDP2's pre- and post-backward hooks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from zero_engine.errors import EngineError
from zero_engine.flat_unit import FlatUnit


class ParamCoordinator:
    """Gathers and releases the units of one model."""

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[FlatUnit],
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._guard = guard
        self._units = tuple(units)
        self._in_backward = False
        self._root_units = tuple(unit for unit in units if unit.is_root)
        if units:
            root.register_forward_pre_hook(self._before_root)
            root.register_forward_hook(self._after_root)
            root.register_state_dict_pre_hook(_refuse_state_dict)
        for module, members in _by_module(units):
            if module is not root:
                module.register_forward_pre_hook(partial(self._before_forward, members))
                module.register_forward_hook(
                    partial(self._after_forward, members), with_kwargs=True
                )

    def begin_backward(self) -> None:
        """Forwards from here on are recomputations: they gather, but do not release."""
        self._in_backward = True

    def end_backward(self) -> None:
        """Release everything, the root included."""
        self._in_backward = False
        self._release(self._units)

    def release_trained(self, unit: FlatUnit) -> None:
        """Release a trained unit: a weight's gradient is the last thing that reads the weight."""
        if not unit.is_root:
            unit.release()

    def _before_root(self, _module: nn.Module, _args: Any) -> None:
        self._gather(self._root_units)

    def _after_root(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.is_grad_enabled():
            self._release(self._root_units)

    def _before_forward(self, units: Sequence[FlatUnit], _module: nn.Module, _args: Any) -> None:
        self._gather(units)

    def _after_forward(
        self, units: Sequence[FlatUnit], _module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        if self._in_backward:
            return
        for tensor in _differentiable(output):
            tensor.register_hook(partial(self._before_backward, units))
        self._watch_untrained(units, (args, kwargs))
        self._release(units)

    def _before_backward(self, units: Sequence[FlatUnit], _gradient: Tensor) -> None:
        self._gather(units)

    def _watch_untrained(self, units: Sequence[FlatUnit], inputs: Any) -> None:
        # Frozen weights have no gradient of their own to tell that backward has passed them; the
        # gradients of the module's inputs do. Without such inputs they stay until the end.
        untrained = [unit for unit in units if not unit.trained]
        tensors = list(_differentiable(inputs))
        if untrained and tensors:
            register_multi_grad_hook(tensors, lambda _gradients: self._release(untrained))

    def _gather(self, units: Sequence[FlatUnit]) -> None:
        with self._guard():
            for unit in units:
                unit.gather()

    def _release(self, units: Sequence[FlatUnit]) -> None:
        for unit in units:
            unit.release()


def _refuse_state_dict(_module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
    # Reading a freed parameter would crash the process.
    raise EngineError(
        "at stage 3 the parameters are sharded, so the module has no state_dict of its own; "
        "call engine.module_state_dict() on every rank, or engine.save_checkpoint()"
    )


def _by_module(units: Sequence[FlatUnit]) -> Iterator[tuple[nn.Module, tuple[FlatUnit, ...]]]:
    members: defaultdict[nn.Module, list[FlatUnit]] = defaultdict(list)
    for unit in units:
        members[unit.module].append(unit)
    return ((module, tuple(group)) for module, group in members.items())


def _differentiable(structure: Any) -> Iterator[Tensor]:
    return (
        leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor) and leaf.requires_grad
    )
