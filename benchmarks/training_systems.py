"""The systems that `training.py` compares: each makes a step function from a model.

All use AdamW in torch's fused kernel where they let us, and clip at a norm of 1. In bf16, plain
torch, DDP and ZeroRedundancyOptimizer use autocast, as their users do; FSDP2, DeepSpeed, ours and
the floor hold bf16 weights beside fp32 masters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from training_model import GPT, Shape, batch

Tokens = tuple[Tensor, Tensor]
Step = Callable[[Sequence[Tokens]], float]
"""Runs one step on this rank's micro-batches; its loss."""

CLIP = 1.0
NODE_BLOCK = 16
"""The block of systems that add several micro-steps before anything travels."""
_ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a system must know besides the model."""

    nodes: tuple[int, ...]
    """Ranks of each node."""
    shape: Shape
    accumulation: int
    """Micro-batches of this rank in one step."""
    bf16: bool

    @property
    def world(self) -> int:
        return sum(self.nodes)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True, **_ADAMW)


# ---- torch ----


def floor(model: GPT, setting: Setting) -> Step:
    """The work that no system can leave out: forward, backward, step, in one process alone.

    With the heap as our engine sets it: page faults can be left out.
    """
    from zero_comm.exchange.cpu.malloc import keep_freed_memory

    keep_freed_memory()
    if setting.bf16:
        return _with_masters(model)
    return torch_step(model, adamw(model.parameters()), autocast=False)


def _with_masters(model: GPT) -> Step:
    masters = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    model.bfloat16()
    optimizer, params = adamw(masters), list(model.parameters())

    def step(microbatches: Sequence[Tokens]) -> float:
        loss = torch.zeros(())
        for tokens in microbatches:
            part = model(*tokens) / len(microbatches)
            part.backward()
            loss += part.detach()
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, params, strict=True):
                param.copy_(master)
                master.grad = None
        return float(loss)

    return step


def torch_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    autocast: bool,
    unsent: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    """`unsent`: the context of micro-steps before the last one."""

    def step(microbatches: Sequence[Tokens]) -> float:
        loss = torch.zeros(())
        for number, tokens in enumerate(microbatches, start=1):
            with unsent() if number < len(microbatches) else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    part = model(*tokens) / len(microbatches)
                part.backward()
            loss += part.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def passes(model: GPT, setting: Setting) -> Step:
    """Forward and backward alone, each gradient dropped as it comes: what activations need."""
    for param in model.bfloat16().parameters() if setting.bf16 else model.parameters():
        param.register_post_accumulate_grad_hook(_drop_gradient)

    def step(microbatches: Sequence[Tokens]) -> float:
        loss = torch.zeros(())
        for tokens in microbatches:
            part = model(*tokens) / len(microbatches)
            part.backward()
            loss += part.detach()
        return float(loss)

    return step


def _drop_gradient(param: Tensor) -> None:
    param.grad = None


def ddp(model: GPT, setting: Setting) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(wrapped.parameters())
    return torch_step(wrapped, optimizer, autocast=setting.bf16, unsent=wrapped.no_sync)


def zro(model: GPT, setting: Setting) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, fused=True, **_ADAMW
    )
    return torch_step(wrapped, optimizer, autocast=setting.bf16, unsent=wrapped.no_sync)


def fsdp2(
    model: GPT, setting: Setting, *, reshard: bool, fp32: bool = False, by_nodes: bool = False
) -> Step:
    """`fp32`: gradients are summed in it; `by_nodes`: HSDP, a replica on each node."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if by_nodes:
        shape = (len(setting.nodes), setting.nodes[0])
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (setting.world,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if setting.bf16 else None,
        reduce_dtype=torch.float32 if fp32 else None,
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return torch_step(model, adamw(model.parameters()), autocast=False)


# ---- ours and DeepSpeed: one API ----


class _Samples(Dataset[Tokens]):
    """The sequences of all ranks, in the order of the micro-batches of each step."""

    def __init__(self, setting: Setting) -> None:
        self._shape = setting.shape
        self._world = setting.world

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tokens:
        microbatch, sequence = divmod(index, self._shape.micro)
        turn, rank = divmod(microbatch, self._world)
        tokens, targets = batch(self._shape, turn, rank)
        return tokens[sequence], targets[sequence]


def ours(model: GPT, setting: Setting, *, stage: int, elastic: dict[str, Any]) -> Step:
    """If gradients are added before they travel, the engine says which rank has which samples."""
    import zero_deepspeed

    config = {
        "optimizer": {"type": "AdamW", "params": _ADAMW},
        "elastic": {"shuffle": False, **elastic},
    }
    samples = _Samples(setting) if "accumulate" in elastic else None
    zero = {"stage": stage}
    return _engine_step(zero_deepspeed, model, setting, zero, config=config, samples=samples)


def deepspeed(model: GPT, setting: Setting, *, stage: int, offload: bool = False) -> Step:
    import deepspeed as peer

    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False}
    config: dict[str, Any] = {"zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        zero["offload_optimizer"] = {"device": "cpu"}
        optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **_ADAMW)
    else:
        optimizer = adamw(model.parameters())
    return _engine_step(peer, model, setting, zero, config=config, optimizer=optimizer)


def _engine_step(
    package: Any,
    model: GPT,
    setting: Setting,
    zero: dict[str, Any],
    *,
    config: dict[str, Any],
    optimizer: Any = None,
    samples: Dataset[Tokens] | None = None,
) -> Step:
    """`samples`: trained in place of the micro-batches of a step, divided by the engine."""
    config = {
        "train_batch_size": setting.shape.micro * setting.world * setting.accumulation,
        "train_micro_batch_size_per_gpu": setting.shape.micro,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": setting.bf16},
        "zero_optimization": zero,
        **config,
    }
    engine, *_ = package.initialize(
        model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config
    )

    loader = None
    if samples is not None:
        loader = iter(DataLoader(samples, batch_sampler=engine.batch_sampler(samples)))

    def step(microbatches: Sequence[Tokens]) -> float:
        sum_ = torch.zeros(())
        for tokens in islice(loader, len(microbatches)) if loader else microbatches:
            loss = engine(*tokens)
            engine.backward(loss)
            engine.step()
            sum_ += loss.detach()
        return float(sum_) / len(microbatches)

    return step


# ---- the table ----


@dataclass(frozen=True, kw_only=True)
class System:
    """One row of the comparison."""

    make: Callable[[GPT, Setting], Step]
    package: str = "torch"
    """What it imports: the memory of the import itself is not counted."""
    stage: int | None = None
    """The ZeRO stage, of those that have one."""
    peers: tuple[str, ...] = ()
    """Whom ours is measured against."""


def _ours(stage: int, *peers: str, **elastic: Any) -> System:
    def make(model: GPT, setting: Setting) -> Step:
        return ours(model, setting, stage=stage, elastic=elastic)

    return System(make=make, package="zero_deepspeed", stage=stage, peers=(*peers, f"ds{stage}"))


def _deepspeed(stage: int, *, offload: bool = False) -> System:
    def make(model: GPT, setting: Setting) -> Step:
        return deepspeed(model, setting, stage=stage, offload=offload)

    return System(make=make, package="deepspeed", stage=stage)


def _fsdp2(*, reshard: bool = True, **options: bool) -> System:
    def make(model: GPT, setting: Setting) -> Step:
        return fsdp2(model, setting, reshard=reshard, **options)

    return System(make=make, package="torch.distributed.fsdp", stage=3)


SYSTEMS: dict[str, System] = {
    "floor": System(make=floor, package="zero_comm.exchange.cpu.malloc"),
    "passes": System(make=passes),
    "ddp": System(make=ddp, stage=0),
    "zro": System(make=zro, package="torch.distributed.optim", stage=1),
    "fsdp2": _fsdp2(fp32=True),
    "fsdp2-default": _fsdp2(),
    "fsdp2-keep": _fsdp2(reshard=False),
    "hsdp": _fsdp2(fp32=True, by_nodes=True),
    "hsdp-default": _fsdp2(by_nodes=True),
    "zero0": _ours(0, "ddp", "fsdp2"),
    "zero1": _ours(1, "ddp", "fsdp2", "zro"),
    "zero2": _ours(2, "ddp", "fsdp2"),
    "zero3": _ours(3, "fsdp2"),
    "zero1-overlap": _ours(1, "ddp", "fsdp2", overlap_param_gather=True),
    "zero2-overlap": _ours(2, "ddp", "fsdp2", overlap_param_gather=True),
    "zero0-local": _ours(0, "ddp", "fsdp2", accumulate="local", reduction_block=NODE_BLOCK),
    "zero1-local": _ours(1, "ddp", "fsdp2", accumulate="local", reduction_block=NODE_BLOCK),
    "zero2-node": _ours(2, "ddp", "fsdp2", accumulate="node", reduction_block=NODE_BLOCK),
    "zero3-node": _ours(3, "fsdp2", accumulate="node", reduction_block=NODE_BLOCK),
    "zero2-native": _ours(2, "ddp", "fsdp2", reduction="native"),
    "zero3-native": _ours(3, "fsdp2", reduction="native"),
    **{f"ds{stage}": _deepspeed(stage) for stage in range(4)},
    "ds2-offload": _deepspeed(2, offload=True),
}
