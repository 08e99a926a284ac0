"""How the torch optimizer steps the segments when all state is in the memory of the device.

Owns the protocol of stepping. Between steps `optimizer.state` shows whole tensors, wherever they
rest. Called by `zero_optimizer`; `engine_state` fills the state that `make_state` makes. The
other way to step is `sub_groups`.
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
        """Each part of all segments while it is all that the optimizer has. Raises TierError.

        Args:
            weights_only: The optimizer's state of the part may be away.
        """

    def make_state(
        self, segment: Segment, dtypes: Mapping[str, torch.dtype], before: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Memory for a segment's optimizer keys, to be filled, where they will rest.

        What is not filled, between parameters and after them, is zero or as it was.

        Args:
            segment: Whose state it is.
            dtypes: Key -> dtype.
            before: The segment's state until now; its memory is used again.
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
        """All at once."""
        del weights_only
        for segment in self._segments:
            segment.param.grad = segment.gradient  # the user may have called zero_grad()
        with only(self._optimizer, self._segments):
            yield

    def make_state(
        self, segment: Segment, dtypes: Mapping[str, torch.dtype], before: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Beside the weights."""
        return {
            key: _room_for(segment.param, dtype, before.get(key)) for key, dtype in dtypes.items()
        }


def step(optimizer: torch.optim.Optimizer, steps: Steps) -> None:
    """Let the optimizer step every part; one that looks at whole parameters asks for them."""
    if isinstance(optimizer, LooksAtWhole):
        optimizer.step()
    else:
        for _ in steps.parts():
            optimizer.step()


def _room_for(param: Tensor, dtype: torch.dtype, old: Any) -> Tensor:
    """A tensor like a parameter; new memory costs more than filling it does."""
    wanted = (dtype, param.device, param.shape)
    if isinstance(old, Tensor) and (old.dtype, old.device, old.shape) == wanted:
        return old
    return torch.zeros_like(param, dtype=dtype, requires_grad=False)


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
