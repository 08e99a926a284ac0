"""The systems that `stock.py` compares: stock FSDP2 and DDP, as they are and protected.

All use AdamW with foreach and clip at a norm of 1; gradients are reduced in fp32, those of every
micro-batch; of "once" the sums of a step, by no_sync() and `elastic.accumulate`. In bf16 DDP uses
autocast, FSDP2 its policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from training_model import GPT, Shape, batch
from training_systems import CLIP, NODE_BLOCK, SYSTEMS, Setting, Step, System, torch_step

Pair = tuple[Tensor, Tensor]
"""Tokens and targets."""
_STEPS = 1000
"""Of one epoch; no measurement is longer."""


def _wrapped(model: GPT, setting: Setting, wrapper: str, *, compiled: bool) -> nn.Module:
    if wrapper == "floor":
        return torch.compile(model) if compiled else model
    if wrapper == "ddp":
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return torch.compile(ddp) if compiled else ddp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16 if setting.bf16 else None, torch.float32)
    mesh = init_device_mesh("cpu", (setting.world,))
    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _make(
    model: GPT,
    setting: Setting,
    *,
    wrapper: str,
    protected: bool,
    compiled: bool = False,
    once: bool = False,
) -> Step:
    wrapped = _wrapped(model, setting, wrapper, compiled=compiled)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, weight_decay=0.1, foreach=True)
    autocast = setting.bf16 and wrapper != "fsdp2"
    if protected:
        elastic = {"accumulate": "local", "reduction_block": NODE_BLOCK} if once else {}
        return _protected(wrapped, optimizer, setting, elastic, autocast=autocast)
    unsent = wrapped.no_sync if once else nullcontext
    return torch_step(wrapped, optimizer, autocast=autocast, unsent=unsent)


def _protected(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    setting: Setting,
    elastic: dict[str, Any],
    *,
    autocast: bool,
) -> Step:
    import zero_torch

    loader = DataLoader(Tokens(setting.shape, setting.world), batch_size=setting.shape.micro)
    microbatches = setting.world * setting.accumulation
    run = zero_torch.protect(
        model, optimizer, loader, microbatches=microbatches, config={"elastic": elastic}
    )
    batches: Iterator[Pair] = iter(run.loader)

    def step(given: Sequence[Pair]) -> float:
        mean = torch.zeros(())
        for _ in given:  # the loader yields the same
            tokens = next(batches)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(*tokens)
            run.backward(loss)
            run.step(CLIP)
            mean += loss.detach() / len(given)
        return float(mean)

    return step


class Tokens(Dataset[Pair]):
    """The sequences that `batch` makes, such that each rank gets its own of them."""

    def __init__(self, shape: Shape, world: int) -> None:
        self._shape = shape
        self._world = world
        self._made: dict[tuple[int, int], Pair] = {}

    def __len__(self) -> int:
        return _STEPS * self._world * self._shape.micro

    def __getitem__(self, index: int) -> Pair:
        number, sequence = divmod(index, self._shape.micro)
        step, rank = divmod(number, self._world)
        if (step, rank) not in self._made:
            self._made = {(step, rank): batch(self._shape, step, rank)}
        tokens, targets = self._made[step, rank]
        return tokens[sequence], targets[sequence]


def _systems(*, compiled: bool) -> Iterator[tuple[str, System]]:
    mark = "-compiled" if compiled else ""
    packages = {"floor": "torch", "ddp": "torch", "fsdp2": "torch.distributed.fsdp"}
    for wrapper, package in packages.items():
        make = partial(_make, wrapper=wrapper, compiled=compiled)
        name = f"stock-{wrapper}{mark}"
        yield name, System(make=partial(make, protected=False), package=package)
        if wrapper != "floor":
            yield (
                f"{wrapper}-protected{mark}",
                System(make=partial(make, protected=True), package="zero_torch"),
            )


_once = partial(_make, wrapper="ddp", once=True)
ONCE = {
    "stock-ddp-once": System(make=partial(_once, protected=False), package="torch"),
    "ddp-protected-once": System(make=partial(_once, protected=True), package="zero_torch"),
}
"""Gradients travel once in a step."""
STOCK: dict[str, System] = ONCE | {
    name: system for compiled in (False, True) for name, system in _systems(compiled=compiled)
}
"""By names that `training_systems` does not have: a worker knows both tables."""
assert STOCK.keys().isdisjoint(SYSTEMS)
