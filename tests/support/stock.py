"""A small GPT as stock PyTorch trains it: wrapped in DDP, in FSDP2, or in nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, HEADS, LENGTH = 61, 20, 4, 9
"""Odd ones, so that shards and blocks of the norm begin at different elements."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(b, t, WIDTH)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Returns the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def embedded(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


def make(wrapper: str, seed: int = 0, **options: Any) -> nn.Module:
    """The model under "ddp", "fsdp2" or "plain"; options are those of the wrapper.

    "hsdp" is FSDP2 with two replicas, if the world is even; "columns" shards matrices by columns;
    "tensor" is FSDP2 beside tensor parallelism of degree 2 in each MLP. With
    "reentrant" activations are computed again, in autograd's one way or the other.
    """
    torch.manual_seed(seed)
    model = GPT()
    if (reentrant := options.pop("reentrant", None)) is not None:
        kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        model.blocks = nn.ModuleList(
            checkpoint_wrapper(block, checkpoint_impl=kind) for block in model.blocks
        )
    if wrapper == "tensor":
        shape = (torch.distributed.get_world_size() // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], plan)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["data"])
    return wrap(model, wrapper, model.blocks, **options)


def wrap(
    model: nn.Module, wrapper: str, units: Iterable[nn.Module] = (), **options: Any
) -> nn.Module:
    """See `make`; `units` are sharded by themselves."""
    if wrapper == "ddp":
        return DistributedDataParallel(model, **{"bucket_cap_mb": 0.001, **options})
    if wrapper in ("fsdp2", "hsdp", "columns"):
        world = torch.distributed.get_world_size()
        replicas = 1 if world % 2 else 2
        shape = (replicas, world // replicas) if wrapper == "hsdp" else (world,)
        names = ("replicas", "shards")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if wrapper == "columns":
            options["shard_placement_fn"] = lambda p: Shard(
                1 if p.dim() > 1 and p.shape[1] % world == 0 else 0
            )
        if dtype := options.pop("param_dtype", None):
            options["mp_policy"] = MixedPrecisionPolicy(dtype, torch.float32)
        for module in (*units, model):
            fully_shard(module, mesh=mesh, **options)
    return model
