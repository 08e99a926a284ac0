"""The parameters of a module at their places, of which a script may exchange or tie some."""

from __future__ import annotations

from operator import is_

from torch import nn


class Parts:
    """The parts that a module has when a training is made of it."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._found = module, _parts(module)
        self._known = {parameter: name for name, parameter in module.named_parameters()}

    def changed(self) -> bool:
        """Whether the module has others than when they were accepted last."""
        now = _parts(self._module)
        return len(now) != len(self._found) or not all(map(is_, now, self._found))

    def exchanged(self) -> str | None:
        """The name of a trained parameter that was not there at first, or has gone; None: none."""
        now = {parameter: name for name, parameter in self._module.named_parameters()}
        further = (name for p, name in now.items() if p.requires_grad and p not in self._known)
        gone = (name for p, name in self._known.items() if p.requires_grad and p not in now)
        return next(further, None) or next(gone, None)

    def accept(self) -> None:
        """Take those that the module has now as unchanged."""
        self._found = _parts(self._module)


def _parts(module: nn.Module) -> list[nn.Parameter | nn.Module | None]:
    """The parameters and modules of each module: what a script may replace."""
    modules = module.modules()
    return [each for m in modules for each in (*m._parameters.values(), *m._modules.values())]
