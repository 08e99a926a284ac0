"""What torch's `load_state_dict` copies, recorded instead of copied.

While a load is recorded, the chosen tensors stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_OURS = {"torch", "zero_engine"}
"""The packages whose code is known to read and write no parameter but by `copy_`."""


class RecordedLoad(TorchFunctionMode):
    """A context in which copies to chosen tensors are recorded, and not made."""

    def __init__(self, chosen: Iterable[Tensor]) -> None:
        """Record nothing yet; the parameters and buffers may lack memory."""
        super().__init__()
        self._chosen = {id(tensor): tensor for tensor in chosen}
        self._sources: dict[int, Tensor] = {}
        self._token: Token[RecordedLoad | None] | None = None

    def __enter__(self) -> Self:
        self._token = _recording.set(self)
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        assert self._token is not None, "it has been entered"
        _recording.reset(self._token)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record a copy; do anything else."""
        if func is Tensor.copy_ and self.covers(args[0]):
            target, source = args[0], args[1].detach()
            # One element is copied: what cannot be copied is an error now, where torch tells it.
            one = source[(slice(1),) * source.dim()]
            target.new_empty(one.shape).copy_(one)
            self._sources[id(target)] = source
            return target
        return func(*args, **(kwargs or {}))

    def covers(self, tensor: Tensor) -> bool:
        """Whether copies to a tensor are recorded."""
        return id(tensor) in self._chosen

    def source(self, tensor: Tensor) -> Tensor | None:
        """The tensor that is to be copied to this one; None: nothing is."""
        return self._sources.get(id(tensor))

    def copy(self, tensors: Iterable[Tensor]) -> None:
        """Make the recorded copies to these tensors."""
        with torch.no_grad():
            for tensor in tensors:
                if (source := self.source(tensor)) is not None:
                    tensor.copy_(source)


_recording: ContextVar[RecordedLoad | None] = ContextVar("recording", default=None)


def is_recorded(tensor: Tensor) -> bool:
    """Whether copies to a tensor are being recorded, so that it needs no memory."""
    recording = _recording.get()
    return recording is not None and recording.covers(tensor)


def with_own_code(root: nn.Module) -> Iterator[nn.Module]:
    """The modules that load by code of a script, each with all modules below it."""
    seen: set[nn.Module] = set()
    for module in root.modules():
        hooks = [module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks]
        code = [module._load_from_state_dict, *(hook for some in hooks for hook in some.values())]
        packages = {(getattr(each, "__module__", None) or "").partition(".")[0] for each in code}
        # It may read or write its parameters meanwhile.
        if packages - _OURS:
            for below in module.modules():
                if below not in seen:
                    seen.add(below)
                    yield below
