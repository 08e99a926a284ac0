"""The hooks of a sharded module, and those of its inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zero_contract.errors import ZeroError
from zero_engine.sharding.flat_unit import FlatUnit


class Hook:
    """A function and its first arguments, to be registered on a module."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        # It allocates and frees the memory of parameters, which no graph can hold.
        self._call = torch.compiler.disable(partial(function, *args))

    def __call__(self, *args: Any) -> Any:
        """Call the function with its first arguments, then those of torch."""
        return self._call(*args)

    def __reduce__(self) -> NoReturn:
        """Refuse `copy.deepcopy(module)` and `torch.save(module)`. Always raises ZeroError."""
        # A copy would have hooks that gather the parameters of the original.
        raise ZeroError(
            "a module cannot be copied or pickled at stage 3, or with elastic.overlap_param_gather:"
            " its parameters are not always there; do it before initialize(), or make another one "
            "and load engine.module_state_dict() into it"
        )


class CalledAlone:
    """The hooks of a module inside of a unit's module, for calls of it alone.

    torch.compile traces the usual case, in which the unit is there.
    """

    def __init__(
        self,
        units: Sequence[FlatUnit],
        before: Callable[..., None],
        after: Callable[..., None] = lambda *_: None,
        end: Callable[..., None] = lambda *_: None,
    ) -> None:
        """Note what to call.

        Args:
            units: Those that the module uses.
            before: The pre-hook of a unit's module, called if one of them is not gathered.
            after: Its hook, called after such a forward.
            end: The same, called before `after`, and after an error.
        """
        self._units = tuple(units)
        self._before, self._after = Hook(before, units), Hook(after)
        self._end = Hook(end)
        self._alone = False

    def before(self, module: nn.Module, args: Any) -> None:
        """Before the module's forward."""
        if not all(unit.gathered for unit in self._units):
            self._alone = True
            self._before(module, args)
        elif self._alone:  # it has raised before
            self._alone = False

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """At its end, or that of an attempt."""
        if self._alone:
            self._end(module, args, output)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After it."""
        if self._alone:
            self._alone = False
            self._after(module, args, kwargs, output)


def users_inside(
    units: Mapping[nn.Module, Sequence[FlatUnit]],
) -> Mapping[nn.Module, Sequence[FlatUnit]]:
    """The modules below those of units that have a parameter, and the units that they use.

    Args:
        units: The module of units -> these.
    """
    inside: defaultdict[nn.Module, list[FlatUnit]] = defaultdict(list)
    for above, members in units.items():
        for module in above.modules():
            own = {id(param) for param in module.parameters()}
            used = [unit for unit in members if any(id(param) in own for param in unit.params)]
            if used and module is not above:
                inside[module] += used
    return inside


def owners_inside(root: nn.Module, params: Sequence[nn.Parameter]) -> Iterator[nn.Module]:
    """The modules below `root` that own some of these parameters by themselves."""
    wanted = {id(param) for param in params}
    for module in root.modules():
        own = module.parameters(recurse=False)
        if module is not root and any(id(param) in wanted for param in own):
            yield module


def after_gradients(tensors: Sequence[Tensor], then: Callable[[], None]) -> None:
    """Call `then` in each backward pass that has made the gradients of all these tensors.

    None of them may be a leaf of the graph.
    """
    # Not by torch's `register_multi_grad_hook`, which refers to the graph: that of a forward
    # without a backward is to be freed with its last tensor.
    size, backward, missing = len(tensors), -1, set[int]()

    def note(position: int, _gradient: Tensor) -> None:
        nonlocal backward, missing
        task = torch._C._current_graph_task_id()
        if task != backward:
            backward, missing = task, set(range(size))
        missing.discard(position)
        if not missing:
            then()

    for position, tensor in enumerate(tensors):
        tensor.register_hook(partial(note, position))
