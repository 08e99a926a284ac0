"""Optimizers that look at whole parameters, in three passes of which only one does.

`direct` takes the gradients into the state and puts *directions* in their place. `look` changes
the directions by what only whole parameters tell: a norm, an orthogonal factor. `apply` moves the
weights along them. Must always hold:

- `direct` and `apply` are elementwise: `Whole.parts` shows them the parameters part by part, each
  once and in order, and how they are divided changes no bit.
- `look` sees directions, which are in memory where the gradients were, and what `direct` has kept
  of the rest.
- An optimizer asks `whole` for all that lies beyond its tensors. In a script of its own these are
  whole parameters (`Itself`); on shards `zero_optimizer` puts `sharded_whole` in that place.

`lamb` and `muon` are such optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

CHUNK = 64
"""Elements of which one norm is taken; parameters begin at multiples of it in their units."""

Norms = list[tuple[slice, float]]
"""The pieces of one tensor, and the norm of the whole parameter that each is a part of."""

Change = Callable[[Tensor], Tensor]
"""From what is of a whole parameter, in its shape, to what is to be in its place."""


Directed = tuple[Tensor, Tensor, dict[str, Any]]
"""A parameter that is not to be read, its direction, and its group."""


class Whole(Protocol):
    """Who knows the parameters that the optimizer's tensors are pieces of."""

    def parts(self, *, weights_only: bool = False) -> Iterator[None]:
        """Each part of all parameters, while the optimizer's groups hold it and nothing else.

        Args:
            weights_only: The pass needs weights and directions; the state may be away.
        """

    def direction(self, param: Tensor) -> Tensor | None:
        """Where `direct` has left the direction of one of the optimizer's parameters, if it has."""

    def norms(self, chunks: Sequence[Tensor]) -> list[Norms]:
        """For each tensor, in the order of the optimizer's parameters, its pieces. Collective.

        Args:
            chunks: Of each tensor, the `chunk_norms` [its length / CHUNK].
        """

    def change(self, tensors: Sequence[Tensor], changes: Sequence[Change | None]) -> None:
        """Change whole parameters, piece by piece. Collective.

        Args:
            tensors: In the order of the optimizer's parameters.
            changes: For each of them that of its param group; None leaves the group as it is.
        """


class Itself:
    """Every tensor is a whole parameter."""

    def parts(self, *, weights_only: bool = False) -> Iterator[None]:
        """All at once."""
        del weights_only
        yield

    def direction(self, param: Tensor) -> Tensor | None:
        """In the place of the gradient."""
        return param.grad

    def norms(self, chunks: Sequence[Tensor]) -> list[Norms]:
        """One piece each."""
        return [[(slice(None), total(each.double().cpu()))] for each in chunks]

    def change(self, tensors: Sequence[Tensor], changes: Sequence[Change | None]) -> None:
        """One after the other."""
        for tensor, change in zip(tensors, changes, strict=True):
            if change is not None:
                tensor.copy_(change(tensor))


def chunk_norms(tensor: Tensor) -> Tensor:
    """The norm of every 64 elements, the last of which may be fewer."""
    flat = tensor.flatten()
    if missing := -flat.numel() % CHUNK:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return torch.linalg.vector_norm(flat.view(-1, CHUNK), dim=1)


def total(chunks: Tensor) -> float:
    """The norm of a whole parameter from those of its chunks, in fp64 on the CPU."""
    return math.sqrt(float(chunks.square().sum()))


class LooksAtWhole(torch.optim.Optimizer):
    """Steps in three passes; the gradients are used up."""

    whole: Whole = Itself()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on every parameter that has a gradient."""
        loss = torch.enable_grad()(closure)() if closure is not None else None
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
        """Change the directions by what the whole parameters tell. Collective."""
        raise NotImplementedError

    def apply(self, param: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        """Move weights along their direction. Elementwise."""
        raise NotImplementedError
