"""How the full parameters of a unit travel: from all shards, within a node, as int8.

Source of the idea: ZeRO++ (arXiv 2306.10209), its secondary shards (hpZ) and int8 weights (qwZ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from zero_comm.exchange.collectives import Collectives, Pending
from zero_comm.sums.quantization import pack, packed_size, rounded, unpack


class Wire:
    """The gathers of one unit.

    Attributes:
        rounds: Whether weights travel as int8.
        secondary: From the first gather after a step on, [padded / ranks of the node] of the full
            parameters, from which they are gathered within the node; None: there is no such node.
    """

    def __init__(self, collectives: Collectives, node: Collectives | None, *, rounds: bool) -> None:
        self.rounds = rounds
        self.secondary: Tensor | None = None
        self._collectives = collectives
        self._node = node
        self._packed: Tensor | None = None

    def publish(self, full: Tensor, fetch: Callable[[Tensor], None], what: str) -> Pending:
        """Begin to fill `full` [padded]; `fetch` writes this rank's own weights into its part."""
        if self._node is not None and self.secondary is not None:
            self._node.own(full).copy_(self.secondary)
            return self._node.all_gather(full, what)
        own = self._collectives.own(full)
        fetch(own)
        if not self.rounds:
            return self._collectives.all_gather(full, what)
        size = packed_size(own.numel())
        self._packed = full.new_empty(self._collectives.world * size, dtype=torch.uint8)
        pack(own.view(1, -1), self._collectives.own(self._packed).view(1, -1))
        return self._collectives.all_gather(self._packed, what)

    def arrive(self, full: Tensor) -> None:
        """Finish what `publish` has begun, when it has ended."""
        if self._packed is not None:  # this rank's own weights become those that others see
            world = self._collectives.world
            unpack(self._packed.view(world, -1), full.view(world, -1))
            self._packed = None
        # The first gather since a step was from all ranks; the ranks of the node are enough for
        # those that follow.
        if self._node is not None and self.secondary is None:
            self.secondary = self._node.own(full).clone()

    def as_seen(self, own: Tensor, exact: Iterable[slice]) -> Tensor:
        """This rank's own weights as all ranks see them; `exact` parts are never rounded."""
        if not self.rounds:
            return own
        seen = rounded(own, torch.empty_like(own))  # a copy: `own` may be the shard itself
        for part in exact:
            seen[part].copy_(own[part])
        return seen
