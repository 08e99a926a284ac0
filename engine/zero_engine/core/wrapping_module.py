"""An nn.Module around the script's module, in its place.

Must always hold: as torch's wrappers do, it puts `module.` before every name; no parameter can be
taken away from the buffer that it is a view of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, SupportsIndex

from torch import Tensor, nn

from zero_contract.errors import ZeroError


class WrappingModule(nn.Module):
    """Looks up in its module what it does not have itself."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        del self.training  # so that it, too, is looked up in the module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Before `module` is set, looking it up in itself would never end; and the special
            # methods that copy and pickle look up are those of the engine, not of the module.
            if name == "module" or name.startswith("__"):
                raise
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            ours, its = type(self).__name__, type(self.module).__name__
            raise AttributeError(
                f"neither {ours!r} nor its module {its!r} has an attribute {name!r}",
                name=name,
                obj=self,
            ) from error

    def train(self, mode: bool = True) -> Self:
        """Put the module in training or evaluation mode."""
        self.module.train(mode)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's forward, as `torch.compile` does, with its arguments."""
        self.module.compile(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`.to()`, `.half()` and `.cuda()`: refused, unless they change nothing."""
        for name, param in self.named_parameters():
            if fn(param) is not param:
                raise ZeroError(
                    f"to(), half() and the like would take {name} away from the engine, which "
                    "steps it where it is; choose the dtype in the config, or call them on the "
                    "model before initialize()"
                )
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise ZeroError(
            "an engine cannot be copied or pickled: it is one rank's part of a run; copy "
            "engine.module, or call engine.save_checkpoint() or engine.module_state_dict()"
        )
