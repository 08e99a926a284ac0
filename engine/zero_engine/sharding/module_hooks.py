"""The hooks of a sharded module, and those of its inputs.

Must always hold: torch.compile runs a module's hooks as they are, between the parts that it
compiles: they allocate and free the memory of parameters, which no graph can hold. They stay with
their module: a copy would have hooks that gather the parameters of the original. A hook on a tensor
does not refer to the graph, which refers to it: the graph of a forward without a backward is freed
with its last tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zero_contract.errors import ZeroError


class Hook:
    """A function and its first arguments, to be registered on a module."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = torch.compiler.disable(partial(function, *args))

    def __call__(self, *args: Any) -> Any:
        """Call the function with its first arguments, then those of torch."""
        return self._call(*args)

    def __reduce__(self) -> NoReturn:
        """Refuse `copy.deepcopy(module)` and `torch.save(module)`.

        Raises:
            ZeroError: Always.
        """
        raise ZeroError(
            "a module cannot be copied or pickled at stage 3, or with elastic.overlap_param_gather:"
            " its parameters are not always there; do it before initialize(), or make another one "
            "and load engine.module_state_dict() into it"
        )


def owners_inside(root: nn.Module, params: Sequence[nn.Parameter]) -> Iterator[nn.Module]:
    """The modules below `root` that own some of these parameters by themselves."""
    wanted = {id(param) for param in params}
    for module in root.modules():
        own = module.parameters(recurse=False)
        if module is not root and any(id(param) in wanted for param in own):
            yield module


def after_gradients(tensors: Sequence[Tensor], then: Callable[[], None]) -> None:
    """Call `then` in each backward pass that has made the gradients of all these tensors.

    None of them may be a leaf of the graph. torch's `register_multi_grad_hook` also knows which of
    them a backward pass leaves out; for that it refers to the graph.
    """
    count = _Count(len(tensors), then)
    for position, tensor in enumerate(tensors):
        tensor.register_hook(partial(count.note, position))


class _Count:
    """Counts the gradients that the current backward pass has made."""

    def __init__(self, size: int, then: Callable[[], None]) -> None:
        self._size = size
        self._then = then
        self._backward = -1
        self._missing: set[int] = set()

    def note(self, position: int, _gradient: Tensor) -> None:
        """Note one gradient."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward, self._missing = backward, set(range(self._size))
        self._missing.discard(position)
        if not self._missing:
            self._then()
