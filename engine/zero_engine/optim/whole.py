"""Optimizers that step in three passes, of which only the second looks at whole parameters.

`direct` takes the gradients into the state and puts *directions* in their place. `look` changes the
directions by what depends on whole parameters: a norm, an orthogonal factor. `apply` moves the
weights along them.

An optimizer asks `whole` for all that lies beyond its tensors. Without an engine these are whole
parameters (`Itself`); on shards the engine replaces it (`ShardedWhole`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_step.gradients.norm import BLOCK, block_norms

CHUNK = BLOCK
"""Elements per norm; parameters begin at multiples of it in their units."""

Norms = list[tuple[slice, float]]
"""The pieces of one tensor, and the norm of the whole parameter that each is a part of."""

Change = Callable[[Tensor], Tensor]
"""A function from a whole parameter's direction, in its shape, to its new direction."""

Directed = tuple[Tensor, Tensor, dict[str, Any]]
"""A parameter, whose weights may be away and must not be read; its direction; its group."""


class Whole(Protocol):
    """Access to the whole parameters that the optimizer's tensors are pieces of."""

    def parts(self, *, weights_only: bool = False) -> Iterator[None]:
        """Let the optimizer's groups hold one part of all parameters after the other."""

    def direction(self, param: Tensor) -> Tensor | None:
        """The direction that `direct` has left for one of the optimizer's parameters, or None."""

    def norms(self, chunks: Sequence[Tensor]) -> list[Norms]:
        """The pieces of each tensor of the optimizer, from its `chunk_norms`. Collective."""

    def change(self, tensors: Sequence[Tensor], changes: Sequence[Change | None]) -> None:
        """Change whole parameters, piece by piece; a None leaves one as it is. Collective."""


class Itself:
    """Every tensor is a whole parameter."""

    def parts(self, *, weights_only: bool = False) -> Iterator[None]:
        """All parameters at once."""
        del weights_only
        yield

    def direction(self, param: Tensor) -> Tensor | None:
        """The gradient, which `direct` has replaced."""
        return param.grad

    def norms(self, chunks: Sequence[Tensor]) -> list[Norms]:
        """One piece for each tensor."""
        return [[(slice(None), total(each.double().cpu()))] for each in chunks]

    def change(self, tensors: Sequence[Tensor], changes: Sequence[Change | None]) -> None:
        """Change one tensor after the other."""
        for tensor, change in zip(tensors, changes, strict=True):
            if change is not None:
                tensor.copy_(change(tensor))


def chunk_norms(tensor: Tensor) -> Tensor:
    """The norm of every 64 elements, the last of which may be fewer."""
    return block_norms(tensor.flatten())


def total(chunks: Tensor) -> float:
    """The norm of a whole parameter from the norms of its chunks, in fp64 on the CPU."""
    # Of all chunks at once, on every rank: else the order of the sum would be the division's.
    return math.sqrt(float(chunks.square().sum()))


class LooksAtWhole(torch.optim.Optimizer):
    """An optimizer that steps in three passes and overwrites the gradients."""

    whole: Whole = Itself()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on every parameter that has a gradient."""
        loss = torch.enable_grad()(closure)() if closure is not None else None
        # This pass and the last are elementwise: how parameters are divided changes no bit.
        for _ in self.whole.parts():
            for param, group in self._members():
                if param.grad is not None:
                    self.direct(param, param.grad, group)
        directions = (
            (param, self.whole.direction(param), group) for param, group in self._members()
        )
        self.look([(p, direction, g) for p, direction, g in directions if direction is not None])
        for _ in self.whole.parts(weights_only=True):
            for param, group in self._members():
                if param.grad is not None:
                    self.apply(param, param.grad, group)
        return loss

    def _members(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            yield from ((param, group) for param in group["params"])

    def direct(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Take a gradient into the state and put a direction in its place. Elementwise."""
        raise NotImplementedError

    def look(self, directions: Sequence[Directed]) -> None:
        """Change the directions by norms or factors of whole parameters. Collective."""
        raise NotImplementedError

    def apply(self, param: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        """Move weights along their direction. Elementwise."""
        raise NotImplementedError
