"""What an optimizer that looks at whole parameters is told when it steps shards.

Made by `zero_optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from zero_comm.collectives import Collectives
from zero_engine.optim.parameter_norms import ParameterNorms
from zero_engine.optim.parameter_owners import ParameterOwners
from zero_engine.optim.steps import Steps
from zero_engine.optim.whole import Change, Norms
from zero_engine.sharding.flat_unit import FlatUnit
from zero_engine.sharding.segments import Segment


class ShardedWhole:
    """Parameters of which each rank holds segments, stepped as `steps` shows them."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        segments: Sequence[Segment],
        collectives: Collectives,
        steps: Steps,
    ) -> None:
        self._norms = ParameterNorms(units, segments, collectives)
        self._owners = ParameterOwners(units, segments, collectives)
        self._gradients: dict[Tensor, Tensor] = {
            segment.param: segment.gradient for segment in segments
        }
        self._steps = steps

    def parts(self, *, weights_only: bool = False) -> Iterator[None]:
        """All segments at once, or sub-group by sub-group."""
        return self._steps.parts(weights_only=weights_only)

    def direction(self, param: Tensor) -> Tensor | None:
        """In the sum of gradients, which stays where it is when all else is away."""
        return self._gradients.get(param)

    def norms(self, chunks: Sequence[Tensor]) -> list[Norms]:
        """The pieces of each segment, with the norms of their parameters. Collective."""
        return self._norms.of(chunks)

    def change(self, tensors: Sequence[Tensor], changes: Sequence[Change | None]) -> None:
        """Change each parameter on one rank. Collective."""
        self._owners.change(tensors, changes)
