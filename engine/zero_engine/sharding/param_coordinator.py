"""Stage 3: when the full parameters of a unit are gathered and released.

A unit is gathered before its module's forward and before the backward of that module's outputs, and
is released when the pass through the module ends. While it computes, the next ones are prefetched.
The root stays gathered from the beginning of forward to the end of backward.

Source of the idea: FSDP2's pre- and post-backward hooks.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from zero_comm.exchange.collectives import Collectives
from zero_engine.sharding.flat_unit import FlatUnit
from zero_engine.sharding.module_hooks import (
    CalledAlone,
    Hook,
    after_gradients,
    owners_inside,
    users_inside,
)
from zero_engine.sharding.module_state import ModuleState

# ---- the order of the gathers, as data ----
# Every rank gathers every unit of the order, in that order, in every pass: a rank whose branch
# leaves a module out takes part in its gather all the same. At first the order is that of the
# modules; after the first step it is the one in which they really ran, if all ranks agree
# (DeepSpeed traces its first step in the same way).


class Pass:
    """One pass, forward or backward, by the numbers of the units."""

    def __init__(self, order: Sequence[int] = ()) -> None:
        self._order = tuple(order)
        self._next = 0

    def seek(self, unit: int) -> tuple[int, ...]:
        """Advance to a unit that is needed now; returns the units to gather before it, unused.

        A unit that the order does not have any more is needed out of order: nothing comes before
        it, and the gather ends only if all ranks need it.
        """
        if unit not in self._order[self._next :]:
            return ()
        place = self._order.index(unit, self._next)
        skipped = self._order[self._next : place]
        self._next = place + 1
        return skipped

    def coming(self) -> Iterator[int]:
        """The units that come next."""
        return iter(self._order[self._next :])

    def end(self) -> tuple[int, ...]:
        """The units that the pass has left out at its end."""
        rest, self._next = self._order[self._next :], len(self._order)
        return rest


def complete(trace: Sequence[int], default: Sequence[int]) -> tuple[int, ...]:
    """A trace with the units that it lacks, each after its predecessor in the default order.

    In the trace, the order in which they were needed, a unit may occur several times.
    """
    order = list(trace)
    for place, unit in enumerate(default):
        if unit not in order:
            order.insert(order.index(default[place - 1]) + 1 if place else 0, unit)
    return tuple(order)


def ahead(coming: Iterator[int], sizes: Sequence[int], budget: int | None) -> list[int]:
    """Prefetch: the coming units to begin to gather before they are needed.

    Their sizes together are at most the budget, in elements; None: one unit of any size.
    """
    if budget is None:
        return list(islice(coming, 1))
    found: list[int] = []
    for unit in coming:
        budget -= sizes[unit]
        if budget < 0:
            break
        found.append(unit)
    return found


@dataclass(frozen=True, slots=True)
class _Call:
    """A forward under way that gathers units, or may."""

    module: nn.Module
    units: dict[FlatUnit, None]
    """Those that must stay until it ends; a dict has an order, the same on all ranks."""
    saves: bool
    """Whether autograd saves what its backward needs."""


class ParamCoordinator:
    """Gathers and releases the units of one model."""

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[FlatUnit],
        collectives: Collectives,
        prefetch: int | None = None,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Hook the modules; `prefetch`: the elements that are gathered ahead, None: one unit."""
        self._guard = guard
        self._units = tuple(units)
        self._collectives = collectives
        self._prefetch = prefetch
        self._in_backward = False
        self._ran: set[FlatUnit] = set()
        """The units whose modules have run in forward since the last backward but one has ended."""
        self._backward_ended = False
        self._differentiated: defaultdict[FlatUnit, set[object]] = defaultdict(set)
        """The calls of a unit's module whose backward is under way."""
        self.on_skipped: Callable[[FlatUnit], None] = lambda _: None
        """Called in backward for a unit whose turn has passed, and whose module has not run."""
        self.on_plain_backward: Callable[[], None] | None = None
        """Called by an unannounced backward pass, before it gathers."""
        # They stay for the whole pass: no call tells where a tied or a stray parameter is used.
        self._root_units = tuple(unit for unit in units if unit.spec.is_root)
        self._blocks = tuple(unit for unit in units if not unit.spec.is_root)
        self._numbers = {id(unit): number for number, unit in enumerate(self._blocks)}
        self._sizes = [unit.padded for unit in self._blocks]
        self._forward: Sequence[int] = range(len(self._blocks))
        self._backward: Sequence[int] = self._forward[::-1]
        self._pass = Pass()
        self._traces: tuple[list[int], list[int]] | None = ([], [])
        """The units needed in forward and in backward; None when the order is settled."""
        self._hooks: list[RemovableHandle | ModuleState] = []
        end = Hook(self._end_call)
        if units:
            self._hook(root, Hook(self._before_root), end, Hook(self._after_root))
            self._hooks.append(ModuleState(root, units))
        self._calls: list[_Call] = []
        """The forwards under way of the model, of units' modules, and of modules called alone."""
        self._ended = _Call(root, {}, saves=False)
        """The call that has ended last."""
        self._kept: dict[FlatUnit, None] = {}
        """The units that a script has read and that stay as the root does."""
        self._kept_for_last = False
        """Whether these are of a forward that has had its backward."""
        self._root_awaits_backward = False
        """Whether the root was there before the forward under way, as after one with gradients."""
        self._host: nn.Module | None = None
        """The module for which the root was gathered, without the model's own forward."""
        strays = [param for unit in self._root_units for param in unit.params]
        # A script may run modules without the model's own forward (a method beside it): the first
        # that owns a stray parameter gathers the root.
        for module in owners_inside(root, strays):
            self._hook(module, Hook(self._before_stray), end, Hook(self._after_stray))
        by_module: defaultdict[nn.Module, list[FlatUnit]] = defaultdict(list)
        for unit in self._blocks:
            by_module[unit.spec.module].append(unit)
        for module, members in by_module.items():
            before = Hook(self._before_forward, members)
            self._hook(module, before, end, Hook(self._after_forward))
        for module, used in users_inside(by_module).items():
            alone = CalledAlone(used, self._before_forward, self._after_forward, self._end_call)
            self._hook(module, alone.before, alone.end, alone.after)

    def _hook(
        self,
        module: nn.Module,
        before: Callable[..., None],
        end: Callable[..., None],
        after: Callable[..., None],
    ) -> None:
        self._hooks += [
            module.register_forward_pre_hook(before),
            # Also after an error, such as the one that ends a recomputation early.
            module.register_forward_hook(end, always_call=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def unhook(self) -> None:
        """Remove the hooks from the modules, whose parameters are going to be whole."""
        while self._hooks:
            self._hooks.pop().remove()

    # ---- passes ----

    def begin_backward(self) -> None:
        """Begin a backward pass: forwards in it are recomputations, and do not release units."""
        self._in_backward, self._kept_for_last = True, False
        # A backward before this one has released them.
        self._gather([*self._root_units, *self._kept])
        self._begin(self._backward)

    def end_gathers(self) -> None:
        """Take part in the gathers that this rank has left out; before the reducer finishes."""
        with self._guard():
            self._take_part(self._pass.end())

    def end_backward(self) -> None:
        """Release all units, the root included; after the first step, settle the order."""
        self._in_backward, self._backward_ended, self._kept_for_last = False, True, True
        self._differentiated.clear()
        for unit in self._units:
            if not unit.holders:
                unit.release()
        if not self._units or self._traces is None:
            return
        # After the first step: the order in which the modules ran, if it was the same on all ranks.
        (forward, backward), self._traces = self._traces, None
        checksum = zlib.crc32(repr((forward, backward)).encode())
        own = torch.tensor([checksum], device="cpu")
        with self._guard():
            seen = self._collectives.everybodys(own, "the order of the modules")
        if bool((seen == seen[0]).all()):
            self._forward = complete(forward, self._forward)
            self._backward = complete(backward, self._backward)

    def release_trained(self, unit: FlatUnit) -> None:
        """Release a trained unit: a weight's gradient is the last thing that reads the weight."""
        if not unit.spec.is_root:
            self._release([unit])

    @property
    def under_way(self) -> bool:
        """Whether a forward or a backward is."""
        return bool(self._calls) or self._in_backward

    def read(self, unit: FlatUnit) -> bool:
        """Gather a unit for a read of one of its parameters, which its module does not make.

        False, and nothing is gathered, if neither forward nor backward is under way.
        """
        if not self.under_way:
            return False
        if self._calls and not unit.spec.is_root:
            self._calls[-1].units[unit] = None
        # It may get a gradient: no zeros are sent in its place when its turn has passed.
        self._ran.add(unit)
        self._gather([unit])
        return True

    def keep(self, unit: FlatUnit) -> None:
        """Let a unit that was read stay to the end of backward."""
        if unit.spec.trained and self._calls and self._calls[-1].saves:
            self._kept[unit] = None

    def _begin(self, order: Sequence[int]) -> None:
        self._pass = Pass(order)
        # Of several forwards before the first backward the last one is traced.
        if self._traces is not None:
            self._traces[self._in_backward].clear()
        with self._guard():
            self._look_ahead()

    # ---- hooks ----

    def _forget_ran(self) -> None:
        # At the first forward after a backward: what ran before that has had its gradients.
        if self._backward_ended and not self._in_backward:
            self._ran.clear()
            self._backward_ended = False

    def _begin_call(self, module: nn.Module, units: Sequence[FlatUnit] | None = None) -> None:
        """Begin one that has these units, or in which reads are reads of the root."""
        saves = torch.is_grad_enabled()
        if saves and not self._calls and not self._in_backward:
            if self._kept_for_last:
                self._kept.clear()
                self._kept_for_last = False
            # Of those that are there already, by a script's context, no read is seen.
            self._kept.update((unit, None) for unit in self._blocks if unit.gathered)
        root = self._kept if saves else {}
        # What the model's own forward reads stays to the end of backward, as the root does.
        self._calls.append(
            _Call(module, root if units is None else dict.fromkeys(units), saves=saves)
        )

    def _end_call(self, module: nn.Module, _args: Any, _output: Any) -> None:
        # A forward that was refused by its pre-hook ends as well, and has begun no call.
        if self._calls and self._calls[-1].module is module:
            self._ended = self._calls.pop()

    def _before_root(self, module: nn.Module, _args: Any) -> None:
        self._forget_ran()
        self._begin_call(module)
        # A forward without gradients may run between another's forward and its backward, as the
        # reference of DPO does: what that backward reads must stay.
        self._root_awaits_backward = all(unit.gathered for unit in self._root_units)
        self._gather(self._root_units)
        if not self._in_backward:
            self._begin(self._forward)

    def _after_root(self, *_details: Any) -> None:
        if not self._in_backward:
            self.end_gathers()
        self._release_root(self._root_awaits_backward)

    def _release_root(self, stays: bool) -> None:
        """Release what a forward without gradients has read, and the root unless it `stays`."""
        if not torch.is_grad_enabled():
            self._release([*self._ended.units, *(() if stays else self._root_units)])

    def _before_stray(self, module: nn.Module, _args: Any) -> None:
        self._begin_call(module)
        if not all(unit.gathered for unit in self._root_units):
            self._host = module
            self._gather(self._root_units)

    def _after_stray(self, module: nn.Module, *_details: Any) -> None:
        is_host = self._host is module
        if is_host:
            self._host = None
        self._release_root(stays=not is_host)

    def _before_forward(self, units: Sequence[FlatUnit], module: nn.Module, _args: Any) -> None:
        if torch.is_grad_enabled() or module.training:  # a reentrant checkpoint has no gradients
            self._forget_ran()
            self._ran.update(units)
        self._begin_call(module, units)
        self._gather(units)

    def _after_forward(self, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._in_backward:
            return
        units, call = list(self._ended.units), object()
        if self._calls or torch.is_grad_enabled():  # the caller has what the parameters show
            caller = self._calls[-1].units if self._calls else self._kept
            caller.update((unit, None) for unit in units if unit.shows_in(output))
        # On the outputs, not by a module backward hook: that works for any output structure, and
        # with non-reentrant activation checkpointing, whose recomputation runs forward inside of
        # backward.
        for tensor in _differentiable(output):
            if not tensor.is_leaf:
                tensor.register_hook(partial(self._before_backward, units, call))
        # Frozen weights have no gradient that shows that backward has passed them; the gradients of
        # the module's inputs show it. Without such inputs they stay until the end; likewise with a
        # leaf of the graph among these, such as a parameter: its gradient is made right after its
        # last use, be that in the middle of a pass through the module or at the end of another.
        untrained = [unit for unit in units if not unit.spec.trained]
        inputs = list(_differentiable((args, kwargs)))
        if untrained and inputs and not any(tensor.is_leaf for tensor in inputs):
            after_gradients(inputs, partial(self._after_backward, untrained, call))
        self._release(units)

    def _before_backward(self, units: Sequence[FlatUnit], call: object, _gradient: Tensor) -> None:
        if not self._in_backward and self.on_plain_backward is not None:
            self.on_plain_backward()
        for unit in units:
            self._differentiated[unit].add(call)
        self._gather(units)

    def _after_backward(self, units: Sequence[FlatUnit], call: object) -> None:
        # The gradient of a tensor between two calls begins one before it ends the other.
        for unit in units:
            self._differentiated[unit].discard(call)
        self._release([unit for unit in units if not self._differentiated[unit]])

    # ---- gather and release ----

    def _gather(self, units: Sequence[FlatUnit]) -> None:
        with self._guard():
            for unit in units:
                if unit.gathered:
                    continue
                number = self._numbers.get(id(unit))
                if number is None:  # of the root
                    unit.gather()
                    continue
                if self._traces is not None:
                    self._traces[self._in_backward].append(number)
                # All ranks gather in the order of the pass. One that is needed out of that order is
                # gathered on the spot; if the ranks do not agree in that, they wait for each other,
                # and `collectives` reports it.
                self._take_part(self._pass.seek(number))
                unit.gather()
                self._look_ahead()

    def _take_part(self, numbers: Iterable[int]) -> None:
        # This rank does not use these units: others may.
        for number in numbers:
            unit = self._blocks[number]
            if not unit.gathered:  # by a script's GatheredParameters, perhaps
                unit.gather()
                unit.release()
                # Its zeros are sent in its turn: at the end they would keep other ranks waiting.
                if self._in_backward and unit not in self._ran:
                    self.on_skipped(unit)

    def _look_ahead(self) -> None:
        for number in ahead(self._pass.coming(), self._sizes, self._prefetch):
            self._blocks[number].begin_gather()

    def _release(self, units: Sequence[FlatUnit]) -> None:
        needed = [call.units for call in self._calls]
        if not self._kept_for_last:
            needed.append(self._kept)
        for unit in units:
            if not unit.holders and not any(unit in each for each in needed):
                unit.release()


def _differentiable(structure: Any) -> Iterator[Tensor]:
    return (
        leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor) and leaf.requires_grad
    )
