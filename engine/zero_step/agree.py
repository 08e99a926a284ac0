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

from zero_comm.exchange.collectives import Collectives
from zero_step.block_norms import BlockNorms
from zero_step.division import Division
from zero_step.norm import ROW, merged, sum_of_squares

_NORM_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ and DeepSpeed
_WHAT = "gradient norms"
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know."""

    norm: float
    """Of all gradients, as they are; infinite or NaN if one of them is, 0 if there are none."""
    notes: Tensor
    """[world, notes] in fp32, on the CPU: the notes that each rank has handed in."""
    alike: bool
    """Whether all ranks have handed in the same digest."""


class Agreement:
    """The end of the steps of a training.

    Attributes:
        divisions: How the gradients are divided into shards.
    """

    def __init__(
        self,
        collectives: Collectives,
        divisions: Sequence[Division] = (),
        device: torch.device = _CPU,
    ) -> None:
        """Describe how gradients are divided; without divisions nobody asks for a norm."""
        self.divisions = tuple(divisions)
        self._collectives = collectives
        self._norms = BlockNorms(divisions, collectives, device)
        self._not_finite: list[Tensor] = []
        """The block norms of the last step, if the norm was not finite."""
        self._device = device

    @torch.no_grad()
    def reach(
        self, shards: Sequence[Tensor], notes: Tensor, digest: Tensor | None = None
    ) -> Agreed:
        """Tell all ranks. Collective.

        Args:
            shards: What this rank has of each gradient, flat and contiguous.
            notes: [n] in fp32, the same n on all ranks.
            digest: [] in int64, what has to be equal on all ranks.

        Raises:
            Diverged: The ranks have not exchanged the same in the same order.
            PeerLost: A peer is lost.
        """
        group, device = self._collectives, self._device
        norms = self._norms.of(shards)
        order = group.numbers([group.order.checksum()], device)
        own = [
            sum_of_squares(torch.cat(norms)),
            torch.zeros(1, dtype=torch.int64, device=device) if digest is None else digest.view(1),
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
        beyond = torch.iinfo(torch.int64).max
        own = self._norms.first_not_finite(self._not_finite) or (beyond, 0)
        rows = group.everybodys(torch.tensor(own, device=_CPU), "the first that is not finite")
        number, element = min(rows.tolist())
        return number, element


def clipped(norm: float, factor: float, most: float | None) -> tuple[float, float]:
    """How gradients are unscaled and clipped: they are multiplied once.

    Args:
        norm: Of the gradients as they are.
        factor: Of the gradients: the share of their micro-batches, without the loss scale.
        most: The largest norm; None: no clipping.

    Returns:
        The norm behind `factor`, before clipping; and the one factor for both.
    """
    norm *= factor
    clip = math.inf if most is None else most / (norm + _NORM_EPSILON)
    return norm, factor * clip if clip < 1 else factor
