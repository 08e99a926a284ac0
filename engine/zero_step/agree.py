"""The one exchange at the end of a step, from which all ranks know and decide the same.

Must always hold: a step has one such exchange, of a constant number of values, and the host waits
for it once. Its rows hold the norm of the gradients (`norm`), the notes of each rank, and what has
to be equal on all of them: the order of their exchanges, and a digest of the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from zero_comm.exchange.collectives import Collectives, wait
from zero_step.gradients.division import Division, Positions, plan_norm
from zero_step.gradients.norm import BLOCK, ROW, block_norms, merged, sum_of_squares

_PARTS = "parts of blocks for the norm"


class BlockNorms:
    """The norms of blocks, each by one rank."""

    def __init__(
        self, divisions: Sequence[Division], collectives: Collectives, device: torch.device
    ) -> None:
        """Plan who norms what; `collectives` says which rank has which shard."""
        self._divisions = tuple(divisions)
        self._device = device
        self._collectives = collectives
        self._exchanges = any(division.cuts for division in divisions)
        plan = plan_norm(divisions, collectives.owners, collectives.rank)
        self._shard = collectives.shards[collectives.rank]
        self._whole = plan.whole
        self._begins = plan.begins
        self._assembled = plan.assembled
        self._kept = _on(device, plan.kept)
        self._given = {rank: _on(device, given) for rank, given in plan.given.items()}
        self._places = {rank: torch.cat(at).to(device) for rank, at in plan.places.items()}

    def of(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The norms of the blocks that this rank norms: for each tensor, then of assembled ones.

        Shards are flat and contiguous, also if they are empty.

        Raises:
            PeerLost: A peer is lost.
        """
        # All ranks have shards of the same tensors, and so they take the same kind.
        double = any(each.dtype == torch.float64 for each in shards)
        kind = torch.float64 if double else torch.float32
        found = []
        for shard, whole in zip(shards, self._whole, strict=True):
            found.append(vector_norm(shard[whole].to(kind).view(-1, BLOCK), dim=1))
        rank, places = self._collectives.rank, self._places
        given = {to: _taken(shards, each, kind) for to, each in self._given.items()}
        received = {
            source: torch.empty(at.numel(), dtype=kind, device=self._device)
            for source, at in places.items()
            if source != rank
        }
        if self._exchanges:
            wait(self._collectives.exchange_pieces(given, received, _PARTS))
        if self._kept:
            received[rank] = _taken(shards, self._kept, kind)
        blocks = torch.zeros(self._assembled * BLOCK, dtype=kind, device=self._device)
        for source, elements in received.items():
            blocks[places[source]] = elements
        return [*found, block_norms(blocks)]

    def first_not_finite(self, norms: Sequence[Tensor]) -> tuple[int, int] | None:
        """The first block of this rank's that is not finite: its tensor, and its first element.

        `norms` is what `of` has returned.
        """
        *whole, assembled = (each.isfinite().logical_not().nonzero().flatten() for each in norms)
        found = []
        for number, (at, bad) in enumerate(zip(self._whole, whole, strict=True)):
            positions = at.start + bad.cpu() * BLOCK
            elements = self._divisions[number].elements_of(self._shard, positions)
            found += [(number, element) for element in elements[:1].tolist()]
        begins = [(number, each) for number, some in self._begins for each in some.tolist()]
        found += [begins[block] for block in assembled.tolist()]
        return min(found, default=None)


def _on(device: torch.device, positions: Positions) -> Positions:
    return [(number, each.to(device)) for number, each in positions]


def _taken(shards: Sequence[Tensor], positions: Positions, kind: torch.dtype) -> Tensor:
    return torch.cat([shards[number][at] for number, at in positions]).to(kind)


_NORM_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ and DeepSpeed
_WHAT = "gradient norms"
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Agreed:
    """The agreement of all ranks."""

    norm: float
    """Of all gradients, as they are; infinite or NaN if one of them is, 0 if there are none."""
    notes: Tensor
    """[world, notes] in fp32, on the CPU: the notes that each rank has handed in."""
    alike: bool
    """Whether all ranks have handed in the same digest."""


class Agreement:
    """The end of the steps of a training."""

    def __init__(
        self,
        collectives: Collectives,
        divisions: Sequence[Division] = (),
        device: torch.device = _CPU,
    ) -> None:
        """Describe how gradients are divided; without divisions nobody asks for a norm."""
        self._collectives = collectives
        self._norms = BlockNorms(divisions, collectives, device)
        self._not_finite: list[Tensor] = []
        """The block norms of the last step, if the norm was not finite."""
        self.device = device
        """Where the gradients are."""

    @torch.no_grad()
    def reach(
        self, shards: Sequence[Tensor], notes: Tensor, digest: Tensor | None = None
    ) -> Agreed:
        """Tell all ranks this rank's flat and contiguous shards, and notes [n] in fp32. Collective.

        The digest, [] in int64, has to be equal on all ranks.

        Raises:
            Diverged: The ranks have not exchanged the same in the same order.
            PeerLost: A peer is lost.
        """
        group, device = self._collectives, self.device
        norms = self._norms.of(shards)
        order = group.numbers([group.order.checksum()], device)
        own = [
            sum_of_squares(torch.cat(norms)),
            torch.zeros(1, dtype=torch.int64, device=device) if digest is None else digest.view(1),
            # The bits of fp64, which holds fp32 exactly: one exchange has one dtype.
            torch.cat([order, notes]).double().view(torch.int64),
        ]
        # The host waits here, once in a step, and for a few numbers.
        rows = group.to_host(group.everybodys(torch.cat(own), _WHAT), _WHAT)
        told = rows[:, ROW + 1 :].contiguous().view(torch.float64)
        group.check_order(told[:, 0].tolist())
        digests = rows[:, ROW]
        norm = merged(rows[:, :ROW].tolist())
        self._not_finite = [] if math.isfinite(norm) else norms
        return Agreed(
            norm=norm,
            notes=told[:, 1:].float(),
            alike=bool((digests == digests[0]).all()),
        )

    def first_not_finite(self) -> tuple[int, int]:
        """The first block of all that is not finite: its tensor, and its first element. Collective.

        Only after a `reach` whose norm is not finite.
        """
        group = self._collectives
        # A rank that has none names a tensor behind all others.
        beyond = torch.iinfo(torch.int64).max
        own = self._norms.first_not_finite(self._not_finite) or (beyond, 0)
        rows = group.everybodys(torch.tensor(own, device=_CPU), "the first that is not finite")
        number, element = min(rows.tolist())
        return number, element


def clipped(norm: float, factor: float, most: float | None) -> tuple[float, float]:
    """The norm of unscaled gradients, and the one factor that unscales and clips them.

    `factor` unscales them: the share of their micro-batches, without the loss scale. `most` is the
    largest norm; None: any.
    """
    norm *= factor
    clip = math.inf if most is None else most / (norm + _NORM_EPSILON)
    return norm, factor * clip if clip < 1 else factor
