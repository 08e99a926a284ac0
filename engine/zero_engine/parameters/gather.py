"""Sharded parameters made whole for a while. Collective.

Also takes models that no engine has yet, or that are at a stage without sharded parameters, so that
one script serves all stages.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from zero_engine.parameters.access import units_of
from zero_engine.parameters.places import tell_status
from zero_engine.sharding.flat_unit import FlatUnit


class GatheredParameters:
    """Some parameters are whole inside the context, and stay so while modules run in it.

    Args:
        params: A parameter, several, or a module. A None among them, the bias of a layer that has
            none, is passed over.
        modifier_rank: The rank whose changes in the context become everybody's: weights, master
            weights and shards. None: the parameters are only read.
        fwd_module: Accepted for DeepSpeed; nothing depends on it.
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
        self._units = units_of(_listed(params)) if enabled else {}
        self._modifier = modifier_rank
        self._gathered_here: list[FlatUnit] = []

    def __enter__(self) -> None:
        self._gathered_here = [unit for unit in self._units if not unit.gathered]
        for unit in self._gathered_here:
            with self._units[unit].guard():
                unit.gather()
            tell_status(self._units[unit], unit)
        for unit in self._units:
            unit.holders += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for unit, core in self._units.items():
            unit.holders -= 1
            if self._modifier is not None and kind is None:
                with core.guard():
                    unit.adopt_full(self._modifier)
                    if unit not in self._gathered_here:
                        unit.gather()  # somebody around us needs it
            elif unit in self._gathered_here:
                unit.let_go()
            tell_status(core, unit)


def _listed(
    params: nn.Parameter | nn.Module | Iterable[nn.Parameter | None],
) -> list[nn.Parameter]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    several = [params] if isinstance(params, nn.Parameter) else params
    return [param for param in several if param is not None]
