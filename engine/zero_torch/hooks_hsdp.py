"""HSDP: the ordered reduction over both dimensions of a mesh, replicas and shards.

Every rank of a mesh has a gradient of its own, so every one of them counts in the order of the sum.
A rank owns a part of the shard that it shares with its replicas: it sums that part over all ranks
of the mesh. FSDP2's own all-reduce among replicas then brings the parts together: all but one rank
add zeros, which changes no bit. It runs in the last micro-step alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_torch.ordered_gradients import MicroStep, OrderedGradients


class TwoLevels:
    """Takes the place of `OrderedGradients` for the modules of a mesh [replicas, shards]."""

    def __init__(self, gradients: OrderedGradients, mesh: DeviceMesh) -> None:
        """Sum over all ranks of a mesh."""
        self._gradients = gradients
        self._replicas, self._shards = mesh.size(0), mesh.size(1)
        self._replica = mesh.get_local_rank(0)
        self._modules: list[Any] = []
        gradients.begins.append(self._begin)

    @property
    def now(self) -> MicroStep | None:
        """The micro-step."""
        return self._gradients.now

    def add_module(self, module: Any) -> None:
        """Let a module's replicas come together in the last micro-step alone."""
        self._modules.append(module)

    def reduce(self, name: str, gradient: Tensor, out: Tensor, *, now: bool = False) -> None:
        """As `OrderedGradients.reduce`, for a gradient [shards * n] and this rank's shard [n]."""
        del now  # FSDP2's all-reduce reads `out` next
        micro_step = self._gradients.now
        last = micro_step is not None and micro_step.last
        length = out.numel()
        part = -(-length // self._replicas)
        rows = gradient.new_zeros(self._shards, self._replicas * part)
        rows[:, :length] = gradient.view(self._shards, length)
        # By rank: the replicas of a mesh are its rows.
        by_rank = rows.view(self._shards, self._replicas, part).transpose(0, 1).reshape(-1)
        own = torch.empty(part, dtype=out.dtype, device=out.device)
        self._gradients.reduce(name, by_rank, own, now=last)
        if last:
            begin = self._replica * part
            mine = out[begin : begin + part]
            mine.copy_(own[: mine.numel()])

    def _begin(self, now: MicroStep) -> None:
        for module in self._modules:
            module.set_requires_all_reduce(now.last, recurse=False)
