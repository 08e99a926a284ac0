"""One rank of one system for `training.py`; writes what it measured as JSON.

Runs under any Python that has torch, and DeepSpeed for its stages: it imports nothing of ours
but the engine, and that only for our own stages.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

SYSTEM, DIRECTORY, ARGS = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
VOCABULARY = 4096
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BF16 = ARGS["dtype"] == "bf16"
Step = Callable[[int], float]
"""Runs step i on this rank's tokens; its loss."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's tokens of a step: the same for every system."""
    seed = torch.Generator().manual_seed(1000 * step + RANK)
    shape = (ARGS["micro"], ARGS["length"] + 1)
    tokens = torch.randint(0, VOCABULARY, shape, generator=seed)
    return tokens[:, :-1], tokens[:, 1:]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, fused=True)


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool) -> Step:
    def step(i: int) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(*batch(i))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def floor(model: GPT) -> Step:
    return torch_step(model, adamw(model.parameters()), BF16)


def ddp(model: GPT) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return torch_step(wrapped, adamw(wrapped.parameters()), BF16)


def zro(model: GPT) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, lr=1e-3, weight_decay=0.1, fused=True
    )
    return torch_step(wrapped, optimizer, BF16)


def fsdp2(model: GPT, *, reshard: bool = True) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if BF16 else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return torch_step(model, adamw(model.parameters()), autocast=False)


def ours(model: GPT, stage: int) -> Step:
    import zero_engine

    return deepspeed_step(zero_engine, model, stage)


def deepspeed(model: GPT, stage: int) -> Step:
    import deepspeed as peer

    return deepspeed_step(peer, model, stage)


def deepspeed_step(package: Any, model: GPT, stage: int) -> Step:
    """The same calls for both: our API is DeepSpeed's."""
    config = {
        "train_batch_size": ARGS["micro"] * WORLD,
        "train_micro_batch_size_per_gpu": ARGS["micro"],
        "gradient_clipping": 1.0,
        "bf16": {"enabled": BF16},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    }
    engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(i: int) -> float:
        loss = engine(*batch(i))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


SYSTEMS: dict[str, Callable[[GPT], Step]] = {
    "floor": floor,
    "ddp": ddp,
    "zro": zro,
    "fsdp2": fsdp2,
    "fsdp2-keep": lambda model: fsdp2(model, reshard=False),
    **{f"zero{stage}": lambda model, stage=stage: ours(model, stage) for stage in range(4)},
    **{f"ds{stage}": lambda model, stage=stage: deepspeed(model, stage) for stage in range(4)},
}


def wire_bytes() -> int:
    """Bytes over the loopback so far; all of them ours in a namespace of our own."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[1])
    return 0


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    torch.set_num_threads(1)
    baseline = resident("VmRSS:")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    step = SYSTEMS[SYSTEM](GPT(ARGS["width"], ARGS["layers"], ARGS["length"]))
    for i in range(ARGS["warmup"]):
        step(i)
    dist.barrier()
    times, loss, bytes_before = [], 0.0, wire_bytes()
    cpu_before = time.process_time()
    for i in range(ARGS["warmup"], ARGS["warmup"] + ARGS["steps"]):
        begun = time.perf_counter()
        loss = step(i)
        times.append(time.perf_counter() - begun)
    measured = {
        "step_s": times,
        "cpu_s": time.process_time() - cpu_before,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - baseline,
        "wire_bytes": wire_bytes() - bytes_before,
        "loss": loss,
    }
    dist.barrier()
    (DIRECTORY / f"{RANK}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
