"""Gathers sharded parameters for the time of a context. Collective."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from zero_engine.parameters.access import units_of
from zero_engine.parameters.early_shards import early_shares
from zero_engine.sharding.flat_unit import FlatUnit

_log = logging.getLogger(__name__)
_told: set[str] = set()
"""The parameters of which has been said that writes to them are dropped."""


def _warn(of: str) -> None:
    if of not in _told:
        _told.add(of)
        _log.warning(
            "zero.GatheredParameters: the script has written to parameters of %s without a "
            "modifier_rank, and the writes are dropped, as in DeepSpeed; give modifier_rank=RANK: "
            "what that rank writes then counts on all ranks",
            of,
        )


class GatheredParameters:
    """A context in which some parameters are whole, also while modules run in it.

    Args:
        params: A parameter, several, or a module. A None, such as the missing bias of a layer, is
            ignored.
        modifier_rank: The rank whose changes in the context are broadcast to all ranks: weights,
            master weights and shards. None: changes are dropped, with a warning.
        fwd_module: Accepted for DeepSpeed's signature, and ignored.
        enabled: False makes the context do nothing.
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter | None],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        del fwd_module
        if isinstance(params, nn.Module):
            several: Iterable[nn.Parameter | None] = params.parameters()
        else:
            several = [params] if isinstance(params, nn.Parameter) else params
        chosen = [param for param in several if param is not None] if enabled else []
        # Others belong to no engine yet, or are not sharded: one script serves all stages.
        self._units = units_of(chosen)
        self._early = early_shares(chosen)
        self._modifier = modifier_rank
        self._gathered_here: list[FlatUnit] = []
        self._early_here: set[nn.Parameter] = set()
        self._versions: dict[nn.Parameter, int] = {}

    def __enter__(self) -> None:
        for core in self._units.values():
            core.overlap.wait()  # a step may have followed since this was made
        for unit, core in self._units.items():
            core.coordinator.read(unit)  # within a forward: its backward needs them, too
        self._gathered_here = [unit for unit in self._units if not unit.gathered]
        for unit in self._gathered_here:
            with self._units[unit].guard():
                unit.gather()
        # After all gathers: one that fails leaves no unit held for ever.
        for unit in self._units:
            unit.holders += 1
        self._early_here = {param for param, share in self._early.items() if not share.gathered}
        for param, share in self._early.items():
            if param in self._early_here:
                share.gather(param)
            share.holders += 1
            self._versions[param] = param._version

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for unit, core in self._units.items():
            unit.holders -= 1
            if self._modifier is not None and kind is None:
                # A save in the background may still be copying these weights.
                core.moved.hold_copies()
                with core.guard():
                    # A step or a load in the context has released it: what `open` would show has
                    # been written by nobody.
                    unit.gather()
                    unit.open()  # with what was written to parameters that are always whole
                    unit.adopt_full(self._modifier)
                    if unit not in self._gathered_here:
                        unit.gather()  # an outer context needs it
            elif unit in self._gathered_here:
                if kind is None and unit.is_written():
                    _warn(unit.label)
                unit.let_go()
        source = self._modifier if kind is None else None
        for param, share in self._early.items():
            share.holders -= 1
            if param in self._early_here:
                if source is None and kind is None and param._version != self._versions[param]:
                    _warn(f"shape {tuple(param.shape)}")
                share.divide(param, source)
            elif source is not None:
                share.spread(param, source)
