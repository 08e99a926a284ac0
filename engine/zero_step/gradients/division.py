"""Which rank norms which elements of tensors that are divided into shards.

Must always hold: every block is normed by one rank, the one that has its first element. The others
send it what they have of the block, so what travels grows with the number of cuts alone: at most 63
elements for each boundary of shards that lie one behind the other. All ranks plan alike. Of columns
whose width is no multiple of a block, all blocks are assembled, by an index for each element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from zero_step.gradients.norm import BLOCK, SHARD_GRAIN


@dataclass(frozen=True, slots=True)
class Division:
    """Which shard has which elements of a flattened tensor.

    Of each `stride` elements, one behind the other, shard i has those from bounds[i] to
    bounds[i + 1]; its own follow each other in memory.
    """

    numel: int
    stride: int
    bounds: tuple[int, ...]

    def shards_of(self, elements: Tensor) -> Tensor:
        """The shards that have these elements."""
        bounds = torch.tensor(self.bounds, device="cpu")
        return torch.bucketize(elements % self.stride, bounds, right=True) - 1

    def elements_of(self, shard: int, positions: Tensor) -> Tensor:
        """The elements that lie at these positions of a shard."""
        low, high = self.bounds[shard : shard + 2]
        width = max(high - low, 1)
        return positions // width * self.stride + low + positions % width

    def length(self, shard: int) -> int:
        """The number of elements of a shard."""
        return (self.bounds[shard + 1] - self.bounds[shard]) * (self.numel // self.stride)

    @property
    def cuts(self) -> bool:
        """Whether a block may have elements of two shards."""
        inside = {self.stride, *self.bounds} - {0, self.numel}
        return any(bound % BLOCK for bound in inside)

    def whole_blocks(self, shard: int) -> slice:
        """The positions of a shard at which whole blocks lie one behind the other, or none."""
        low, high = self.bounds[shard : shard + 2]
        start, stop = 0, self.length(shard)
        if self.length(shard) == high - low:
            start, stop = -low % BLOCK, high // BLOCK * BLOCK - low
        elif any(each % BLOCK for each in (low, high, self.stride)):
            stop = 0
        return slice(start, stop) if stop - start >= SHARD_GRAIN else slice(0, 0)


def chunks(shape: Sequence[int], dim: int, shards: int, *, reals: int = 1) -> Division:
    """A dimension divided as torch.chunk, and so FSDP2, divides it.

    `reals`: the real numbers in an element.
    """
    width = prod(shape[dim + 1 :]) * reals
    chunk = -(-shape[dim] // shards)
    bounds = (min(shard * chunk, shape[dim]) * width for shard in range(shards + 1))
    return Division(prod(shape) * reals, max(1, shape[dim] * width), tuple(bounds))


def shares(numel: int, shards: int) -> Division:
    """A tensor that every rank has whole, of which each norms some blocks."""
    share = -(-numel // (SHARD_GRAIN * shards)) * SHARD_GRAIN
    bounds = (min(shard * share, numel) for shard in range(shards + 1))
    return Division(numel, max(1, numel), tuple(bounds))


Positions = list[tuple[int, Tensor]]
"""Numbers of tensors, with positions in this rank's shard of each."""


@dataclass(frozen=True, slots=True)
class DivisionPlan:
    """The blocks of all tensors that one rank norms.

    Blocks that do not lie in its shards with enough others one behind the other are assembled.
    """

    whole: list[slice] = field(default_factory=list)
    """Of each tensor, the positions of whole blocks."""
    kept: Positions = field(default_factory=list)
    """The elements of assembled blocks that this rank has."""
    places: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """By rank, this one included, where what it has of the assembled blocks belongs: indices into
    [blocks * BLOCK], in the order of the elements."""
    given: dict[int, Positions] = field(default_factory=lambda: defaultdict(list))
    """By rank, what that one norms, in the order of the elements."""
    begins: list[tuple[int, Tensor]] = field(default_factory=list)
    """The assembled blocks: numbers of tensors, with the first element of each block."""

    @property
    def assembled(self) -> int:
        """The number of assembled blocks."""
        return sum(begins.numel() for _, begins in self.begins)


def plan_norm(divisions: Sequence[Division], owners: Sequence[int], rank: int) -> DivisionPlan:
    """Plan what a rank norms; `owners`: by shard, the rank that has it."""
    plan, shard = DivisionPlan(), owners.index(rank)
    ranks = torch.tensor(owners, device="cpu")
    for number, division in enumerate(divisions):
        whole = division.whole_blocks(shard)
        plan.whole.append(whole)
        # What lies in no whole blocks goes to the rank that has the first element of its block.
        others = (0, whole.start), (whole.stop, division.length(shard))
        positions = torch.cat([torch.arange(*each, device="cpu") for each in others])
        elements = division.elements_of(shard, positions)
        targets = ranks[division.shards_of(elements // BLOCK * BLOCK)]
        for target in targets.unique().tolist():
            given = plan.kept if target == rank else plan.given[target]
            given.append((number, positions[targets == target]))
        # This rank assembles the blocks that begin here, from whoever has their elements; behind
        # the end of the tensor a block stays zero.
        begins = elements[elements % BLOCK == 0]
        wanted = (begins[:, None] + torch.arange(BLOCK, device="cpu")).flatten()
        places = torch.arange(wanted.numel(), device="cpu") + plan.assembled * BLOCK
        inside = wanted < division.numel
        sources, places = ranks[division.shards_of(wanted[inside])], places[inside]
        for source in sources.unique().tolist():
            plan.places[source].append(places[sources == source])
        plan.begins.append((number, begins))
    return plan
