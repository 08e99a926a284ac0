"""The engine as an nn.Module around the script's own: what torch and libraries do with one.

Must always hold: names begin with `module.`, as in DeepSpeed; the mode is the module's; nothing
takes parameters away from the buffers that they are views of. The base of `engine.Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, SupportsIndex

from torch import Tensor, nn

from zero_contract.errors import ZeroError


class Wrapper(nn.Module):
    """A module with another one in it; an attribute that it does not have is looked up there."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        del self.training  # so that it, too, is looked up there

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Before `module` is set, looking for it in itself would never end; and what copy and
            # pickle ask for is how to copy us, not the module.
            if name == "module" or name.startswith("__"):
                raise
        return getattr(self.module, name)

    def train(self, mode: bool = True) -> Self:
        """Put the module in training or evaluation mode."""
        self.module.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients are cleared by `step`. Here for scripts that call it."""

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: None = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module's forward, as `torch.compile` does.

        Args:
            backend: As for `torch.compile`.
            compile_kwargs: Its other options.
            schedule: Must be None, as it is for DeepCompile, which is not there.
            compiled_autograd_enabled: Must be False, likewise.
        """
        self.module.compile(**{**(compile_kwargs or {}), "backend": backend})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `.to()`, `.half()`, `.cuda()` come to: nothing, where all is as they ask already."""
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
