"""How the torch optimizer steps the segments when all state is in the memory of the device.

Owns the protocol of stepping; the other way to step is by sub-groups. Between steps
`optimizer.state` shows whole tensors, wherever they rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_engine.optim.whole import LooksAtWhole
from zero_engine.sharding.segments import Segment


class Steps(Protocol):
    """A way to step all segments."""

    def step(self) -> None:
        """Step every segment with its gradient. Raises TierError."""

    def parts(self, *, weights_only: bool = False) -> Iterator[None]:
        """Let the optimizer have one part of all segments after the other. Raises TierError."""

    def make_state(
        self, segment: Segment, dtypes: Mapping[str, torch.dtype], before: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Memory for a segment's optimizer keys, to be filled, where they will rest.

        That of `before`, the state until now, is used again. Elements between parameters and after
        them, which nothing fills, are zero or unchanged.
        """


class StepAtOnce:
    """State in the memory of the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, segments: Sequence[Segment]) -> None:
        self._optimizer = optimizer
        self._segments = tuple(segments)

    def step(self) -> None:
        """One call of the optimizer."""
        step(self._optimizer, self)

    def parts(self, *, weights_only: bool = False) -> Iterator[None]:
        """All segments at once."""
        del weights_only
        for segment in self._segments:
            segment.param.grad = segment.gradient  # the user may have called zero_grad()
        with only(self._optimizer, self._segments):
            yield

    def make_state(
        self, segment: Segment, dtypes: Mapping[str, torch.dtype], before: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Tensors like the parameter; old ones where they fit: new memory costs more to make."""
        param, state = segment.param, dict[str, Tensor]()
        for key, dtype in dtypes.items():
            old, wanted = before.get(key), (dtype, param.device, param.shape)
            if isinstance(old, Tensor) and (old.dtype, old.device, old.shape) == wanted:
                state[key] = old
            else:
                state[key] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        return state


def step(optimizer: torch.optim.Optimizer, steps: Steps) -> None:
    """Let the optimizer step every part; a `LooksAtWhole` iterates over them itself."""
    if isinstance(optimizer, LooksAtWhole):
        optimizer.step()
    else:
        for _ in steps.parts():
            optimizer.step()


@contextmanager
def only(optimizer: torch.optim.Optimizer, chosen: Sequence[Segment]) -> Iterator[None]:
    """Let the optimizer have no parameters but those of some segments."""
    everything = [group["params"] for group in optimizer.param_groups]
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = [segment.param for segment in chosen if segment.group == index]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, everything, strict=True):
            group["params"] = params
