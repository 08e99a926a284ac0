"""The systems that `training.py` compares: each makes a step function from a model.

All use AdamW in torch's fused kernel where they let us, and clip at a norm of 1. In bf16, plain
torch, DDP and ZeroRedundancyOptimizer use autocast, as their users do; FSDP2, DeepSpeed, ours and
the floor hold bf16 weights beside fp32 masters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from training_model import GPT

Tokens = tuple[Tensor, Tensor]
Step = Callable[[Tokens], float]
"""Runs one step on this rank's tokens; its loss."""

CLIP = 1.0
_ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a system must know besides the model."""

    world: int
    micro: int
    bf16: bool


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True, **_ADAMW)


# ---- torch ----


def floor(model: GPT, setting: Setting) -> Step:
    """The work that no system can leave out: forward, backward, step, in one process alone.

    With the heap as our engine sets it: page faults can be left out.
    """
    from zero_comm.cpu.malloc import keep_freed_memory

    keep_freed_memory()
    if setting.bf16:
        return _with_masters(model)
    return _torch_step(model, adamw(model.parameters()), autocast=False)


def _with_masters(model: GPT) -> Step:
    masters = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    model.bfloat16()
    optimizer, params = adamw(masters), list(model.parameters())

    def step(tokens: Tokens) -> float:
        loss = model(*tokens)
        loss.backward()
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, params, strict=True):
                param.copy_(master)
                master.grad = None
        return float(loss.detach())

    return step


def _torch_step(model: nn.Module, optimizer: torch.optim.Optimizer, *, autocast: bool) -> Step:
    def step(tokens: Tokens) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(*tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def passes(model: GPT, setting: Setting) -> Step:
    """Forward and backward alone, each gradient dropped as it comes: what activations need."""
    for param in model.bfloat16().parameters() if setting.bf16 else model.parameters():
        param.register_post_accumulate_grad_hook(_drop_gradient)

    def step(tokens: Tokens) -> float:
        loss = model(*tokens)
        loss.backward()
        return float(loss.detach())

    return step


def _drop_gradient(param: Tensor) -> None:
    param.grad = None


def ddp(model: GPT, setting: Setting) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _torch_step(wrapped, adamw(wrapped.parameters()), autocast=setting.bf16)


def zro(model: GPT, setting: Setting) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, fused=True, **_ADAMW
    )
    return _torch_step(wrapped, optimizer, autocast=setting.bf16)


def fsdp2(model: GPT, setting: Setting, *, reshard: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (setting.world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if setting.bf16 else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return _torch_step(model, adamw(model.parameters()), autocast=False)


# ---- ours and DeepSpeed: one API ----


def ours(model: GPT, setting: Setting, *, stage: int) -> Step:
    import zero_deepspeed

    optimizer = {"optimizer": {"type": "AdamW", "params": _ADAMW}}
    return _engine_step(zero_deepspeed, model, setting, {"stage": stage}, config=optimizer)


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
) -> Step:
    config = {
        "train_batch_size": setting.micro * setting.world,
        "train_micro_batch_size_per_gpu": setting.micro,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": setting.bf16},
        "zero_optimization": zero,
        **config,
    }
    engine, *_ = package.initialize(
        model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config
    )

    def step(tokens: Tokens) -> float:
        loss = engine(*tokens)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

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


def _ours(stage: int, *peers: str) -> System:
    def make(model: GPT, setting: Setting) -> Step:
        return ours(model, setting, stage=stage)

    return System(make=make, package="zero_deepspeed", stage=stage, peers=(*peers, f"ds{stage}"))


def _deepspeed(stage: int, *, offload: bool = False) -> System:
    def make(model: GPT, setting: Setting) -> Step:
        return deepspeed(model, setting, stage=stage, offload=offload)

    return System(make=make, package="deepspeed", stage=stage)


def _fsdp2(*, reshard: bool) -> System:
    def make(model: GPT, setting: Setting) -> Step:
        return fsdp2(model, setting, reshard=reshard)

    return System(make=make, package="torch.distributed.fsdp", stage=3)


SYSTEMS: dict[str, System] = {
    "floor": System(make=floor, package="zero_comm.cpu.malloc"),
    "passes": System(make=passes),
    "ddp": System(make=ddp, stage=0),
    "zro": System(make=zro, package="torch.distributed.optim", stage=1),
    "fsdp2": _fsdp2(reshard=True),
    "fsdp2-keep": _fsdp2(reshard=False),
    "zero0": _ours(0, "ddp"),
    "zero1": _ours(1, "ddp", "zro"),
    "zero2": _ours(2, "ddp"),
    "zero3": _ours(3, "fsdp2"),
    **{f"ds{stage}": _deepspeed(stage) for stage in range(4)},
    "ds2-offload": _deepspeed(2, offload=True),
}
