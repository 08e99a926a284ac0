"""The hooks that a divided module has.

Must always hold: torch.compile runs them as they are, between the parts that it compiles: they give
the parameters memory and take it away, which is nothing for a graph. And they stay with their
module: a copy would come with hooks that gather the parameters of the original.

Used by `param_coordinator` and `module_state`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from zero_engine.errors import EngineError


class Hook:
    """A function and its first arguments, to be registered on a module."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = torch.compiler.disable(partial(function, *args))

    def __call__(self, *args: Any) -> Any:
        """Call it with torch's arguments behind its own."""
        return self._call(*args)

    def __reduce__(self) -> NoReturn:
        """Refuse `copy.deepcopy(module)` and `torch.save(module)`.

        Raises:
            EngineError: Always.
        """
        raise EngineError(
            "a module cannot be copied or pickled at stage 3: its parameters are divided; do it "
            "before initialize(), or make another one and load engine.module_state_dict() into it"
        )
