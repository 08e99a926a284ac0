"""HSDP: the ordered reduction over both dimensions of a mesh, replicas and shards.

Every rank of a mesh has a gradient of its own, so every one of them counts in the order of the sum.
A rank owns a part of the shard that it shares with its replicas: it sums that part over all ranks
of the mesh, and the replicas then give each other their parts, while the backward goes on.

Must always hold: FSDP2's own all-reduce among replicas adds nothing. There is no hook in its place,
so it runs in a group of this rank alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_comm.exchange.collectives import Collectives, Pending
from zero_comm.sums.reduction import Turn
from zero_contract.errors import ConfigError
from zero_torch.ordered_gradients import OrderedGradients


class TwoLevels:
    """Takes the place of `OrderedGradients` for the modules of a mesh [replicas, shards]."""

    def __init__(
        self, gradients: OrderedGradients, collectives: Collectives, mesh: DeviceMesh
    ) -> None:
        """Sum over all ranks of a mesh, which are those of `collectives`."""
        self._gradients = gradients
        self._collectives = collectives
        self._shards = mesh.size(1)
        self._replicas = mesh.mesh[:, mesh.get_local_rank(1)].tolist()
        """The ranks that have this rank's shard."""
        self._alone = dist.new_group([collectives.rank], use_local_synchronization=True)

    @property
    def now(self) -> Turn | None:
        """The micro-step."""
        return self._gradients.now

    def arrive(self, name: str) -> None:
        """As `OrderedGradients.arrive`."""
        self._gradients.arrive(name)

    def replace_all_reduce(self, module: Any) -> None:
        """Let FSDP2's all-reduce of a module's gradients be one of this rank alone.

        Raises:
            ConfigError: This version of torch keeps its group elsewhere.
        """
        try:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if not isinstance(group.mesh_info.replicate_process_group, dist.ProcessGroup):
                    raise AttributeError("replicate_process_group")
                group.mesh_info.replicate_process_group = self._alone
        except AttributeError as error:
            raise ConfigError(
                f"in torch {torch.__version__} the group of an HSDP model's all-reduce is not "
                f"where it was in 2.13 ({error}); shard over one mesh dimension, or use torch 2.13"
            ) from error

    def reduce(self, name: str, gradient: Tensor, out: Tensor, *, now: bool = False) -> None:
        """As `OrderedGradients.reduce`, for a gradient [shards * n] and this rank's shard [n]."""
        length, replicas = out.numel(), len(self._replicas)
        part = -(-length // replicas)
        rows = gradient.new_zeros(self._shards, replicas * part)
        rows[:, :length] = gradient.view(self._shards, length)
        # By rank: the replicas of a mesh are its rows.
        by_rank = rows.view(self._shards, replicas, part).transpose(0, 1).reshape(-1)
        own = torch.empty(part, dtype=out.dtype, device=out.device)
        share = partial(self._share, name, own, out)
        self._gradients.reduce(name, by_rank, own, then=share, now=now)

    def _share(self, name: str, own: Tensor, out: Tensor) -> Pending:
        """Begin to give the replicas this rank's part of their shard, and to take theirs."""
        parts: dict[int, Tensor] = dict(zip(self._replicas, out.split(own.numel()), strict=False))
        held: dict[int, Tensor] = {}
        if (rank := self._collectives.rank) in parts:  # parts at the end may be all padding
            parts[rank].copy_(own[: parts[rank].numel()])
            mine = parts[rank]
            held = dict.fromkeys(self._replicas, mine)
        return self._collectives.exchange_pieces(held, parts, f"sums of {name}")
