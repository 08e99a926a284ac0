"""elastic.overlap_param_gather: the new weights of stages 1 and 2 arrive after the step has ended.

From the step on a unit's parameters show NaN, as at stage 3, until somebody has waited for the
unit. A wait is no collective: all ranks have begun the same gathers in the same order, in the step.
So a rank that waits for none of them, or in another order, keeps nobody waiting.

Source of the name: Megatron-LM's distributed optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from torch import nn
from torch.utils.hooks import RemovableHandle

from zero_contract.errors import PeerLost
from zero_engine.sharding.flat_unit import FlatUnit
from zero_engine.sharding.module_hooks import CalledAlone, Hook, users_inside
from zero_engine.sharding.module_state import keep, let_go


class OverlappedGather:
    """The weights of one engine that may be arriving."""

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[FlatUnit],
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Hook the modules of `root`, for the units that a step leaves arriving; without any, none.

        `guard` is a context around waits, for a peer that is lost.
        """
        self.units = tuple(units)
        self._guard = guard
        self._failed = False
        """Whether a wait has not come to its end: a peer was lost, or Ctrl-C."""
        self._hooks: list[RemovableHandle] = []
        by_module: defaultdict[nn.Module, list[FlatUnit]] = defaultdict(list)
        for unit in self.units:
            by_module[unit.spec.module].append(unit)
        for module, members in by_module.items():
            self._hooks.append(module.register_forward_pre_hook(Hook(self.gather, members)))
        # The root's unit has the tied and stray parameters: a module inside waits as well, for a
        # script that calls it alone.
        for module, used in users_inside(by_module).items():
            alone = CalledAlone(used, self.gather)
            self._hooks.append(module.register_forward_pre_hook(alone.before))
        unit_of = {id(param): unit for unit in self.units for param in unit.params}
        for module in root.modules():
            own = [id(param) for param in module.parameters(recurse=False)]
            if needed := list(dict.fromkeys(unit_of[each] for each in own if each in unit_of)):
                hook = Hook(self.gather, needed)
                self._hooks += [
                    module.register_state_dict_pre_hook(hook),
                    module.register_load_state_dict_pre_hook(hook),
                ]
        for unit in self.units:
            keep(unit.params, "held by an engine with elastic.overlap_param_gather")

    def wait(self) -> None:
        """Return when the weights of the last step have arrived. Not collective.

        Raises:
            PeerLost: A peer is lost; under an agent the process exits instead.
        """
        self.gather(self.units)

    def end(self) -> None:
        """Wait before this rank leaves its group; what a lost peer has not sent nobody needs."""
        # After a failure nothing would come.
        if not self._failed:
            with suppress(PeerLost):
                for unit in self.units:
                    unit.gather()

    def unhook(self) -> None:
        """Remove the hooks from the modules, whose parameters are there."""
        while self._hooks:
            self._hooks.pop().remove()
        for unit in self.units:
            let_go(unit.params)

    def gather(self, units: Sequence[FlatUnit], *_of_the_hook: object) -> None:
        """Return when these units are there; see `wait`."""
        if all(unit.gathered for unit in units):  # in each forward but the first after a step
            return
        try:
            with self._guard():
                for unit in units:
                    unit.gather()
        except BaseException:
            self._failed = True
            raise
