"""The parameters of a model on all ranks: trained by all or by none, and of the same bits.

Must always hold: where weights that each rank holds whole differ, all ranks know before they are
stepped once more. A script that writes on one rank alone (`if rank == 0: model.load_state_dict()`,
behind the wrapper that would have sent it to the others), or a memory that loses a bit, would
otherwise train weights that no rank has, and save parts of each.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zero_comm.exchange.collectives import Collectives
from zero_contract.errors import ZeroError
from zero_step.checks.bit_sum import bit_sum

PIECE = 1 << 16
"""Elements that are compared in each step: a millisecond of one core."""
_WHAT = "what the parameters are on each rank"
_DIFFERS = (
    "{} has different values on rank 0 and on rank {}: a script has written to it on some ranks, "
    "or not the same; or different hardware has stepped it differently, or the memory of a device "
    "has lost a bit. Write the same on all ranks, or load before the model is wrapped; and go on "
    "from a checkpoint"
)
_TRAINED = (
    "{} is trained on rank {} and not on rank {} (requires_grad): its gradient would lack "
    "micro-batches; freeze and unfreeze the same on all ranks"
)


class Replicas:
    """The parameters of this rank, beside those of the others."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], collectives: Collectives, *, whole: bool
    ) -> None:
        """Begin. `whole`: every rank holds all elements; without it only `requires_grad` counts."""
        self._parameters = dict(parameters) if collectives.world > 1 else {}
        self._collectives = collectives
        self._whole = whole
        self._pieces = _pieces(list(self._parameters.values())) if whole else []
        self._at = 0
        self.stepped()

    def stepped(self) -> None:
        """The step has ended: from here on a change of the weights is the script's."""
        self._versions = self._now()

    def digest(self, device: torch.device) -> Tensor:
        """A whole number that differs, almost surely, if a rank differs: [] in int64."""
        found = torch.zeros((), dtype=torch.int64, device=device)
        if not self._parameters:
            return found
        # A write of the script has a version, and is compared in the step that follows. What has
        # none, such as a bit that memory has lost, is found piece by piece, in some later step.
        trained = bytes(each.requires_grad for each in self._parameters.values())
        written = b"".join(
            b"%d," % (now - before) for now, before in zip(self._now(), self._versions, strict=True)
        )
        found += zlib.crc32(trained + written)
        if self._pieces:
            piece = self._pieces[self._at % len(self._pieces)]
            self._at += 1
            bits = torch.cat([each.detach().flatten()[part] for each, part in piece])
            found += bit_sum(bits).to(device)
        return found

    def check(self) -> None:
        """Look at all of it, after digests that differ. Collective.

        Raises:
            ZeroError: A rank differs; names the first parameter.
        """
        if not self._parameters:
            return
        self._at = 0  # as on all ranks: one that has joined begins with the first piece
        own = [
            torch.stack([torch.tensor(each.requires_grad), self._bits(each)])
            for each in self._parameters.values()
        ]
        everybodys = self._collectives.everybodys(torch.stack(own).flatten(), _WHAT)
        differs = (everybodys != everybodys[0]).nonzero()
        if len(differs):
            rank, at = differs[0].tolist()
            name = list(self._parameters)[at // 2]
            if at % 2:
                raise ZeroError(_DIFFERS.format(name, rank))
            trains, not_ = (0, rank) if everybodys[0, at] else (rank, 0)
            raise ZeroError(_TRAINED.format(name, trains, not_))

    def _bits(self, parameter: nn.Parameter) -> Tensor:
        return bit_sum(parameter).cpu() if self._whole else torch.zeros((), dtype=torch.int64)

    def _now(self) -> list[int]:
        return [each._version for each in self._parameters.values()]


def _pieces(parameters: list[nn.Parameter]) -> list[list[tuple[nn.Parameter, slice]]]:
    """Parts of consecutive parameters of one dtype, of at most PIECE elements together."""
    found: list[list[tuple[nn.Parameter, slice]]] = []
    room, dtype = 0, None
    for each in parameters:
        for start in range(0, each.numel(), PIECE):
            stop = min(start + PIECE, each.numel())
            if stop - start > room or each.dtype != dtype:
                found.append([])
                room, dtype = PIECE, each.dtype
            found[-1].append((each, slice(start, stop)))
            room -= stop - start
    return found
