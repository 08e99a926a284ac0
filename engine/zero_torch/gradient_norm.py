"""The norm of all gradients under stock PyTorch: which rank norms which elements of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from zero_comm.exchange.collectives import Collectives
from zero_step.agree import Agreement
from zero_step.gradients.division import Division, chunks, shares
from zero_torch.ordered_gradients import as_real
from zero_torch.wrapped import local


class GradientNorm:
    """The agreement on the norm of the gradients of some parameters."""

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self._names = list(trained)
        self._shard = collectives.shards[collectives.rank]
        self._divisions = [_division_of(each, collectives.world) for each in trained.values()]
        self.agreement = Agreement(collectives, self._divisions, device)

    def parts(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """What this rank norms of them, flat, as real numbers."""
        pairs = zip(gradients, self._divisions, strict=True)
        return [_part(gradient, division, self._shard) for gradient, division in pairs]

    def first_not_finite(self) -> str:
        """The first parameter whose gradient is not finite. Collective."""
        number, _ = self.agreement.first_not_finite()
        return self._names[number]


def _division_of(parameter: Tensor, world: int) -> Division:
    """Of replicas under FSDP2, the first ones have all of them."""
    reals = 2 if parameter.is_complex() else 1  # in one element
    if not isinstance(parameter, DTensor):
        return shares(parameter.numel() * reals, world)
    sharding, shards = parameter.placements[-1], parameter.device_mesh.size(-1)
    assert isinstance(sharding, Shard)
    division = chunks(parameter.shape, sharding.dim, shards, reals=reals)
    others = (division.stride,) * (world - shards)
    return replace(division, bounds=division.bounds + others)


def _part(gradient: Tensor, division: Division, shard: int) -> Tensor:
    flat = as_real(local(gradient).resolve_conj().reshape(-1))
    if not isinstance(gradient, DTensor):
        flat = flat[division.bounds[shard] :]
    return flat[: division.length(shard)]
