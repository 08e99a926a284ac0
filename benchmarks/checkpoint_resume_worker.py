"""One rank of `checkpoint_resume.py`: saves or resumes with one system, and writes what it took.

    checkpoint_resume_worker.py SYSTEM save|resume DIRECTORY SHAPE RESULT

Runs under any Python that has torch, and DeepSpeed for its part.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from counters import begin_memory, bytes_read, resident_bytes
from torch import nn
from training_model import GPT, Shape, batch

OPTIMIZER = {"lr": 1e-4}


@dataclass(frozen=True, kw_only=True)
class System:
    """One system, made for this rank."""

    module: nn.Module
    step: Callable[[], object]
    save: Callable[[], object]
    load: Callable[[], object]


def ours(shape: Shape, root: Path, world: int) -> System:
    import zero_deepspeed

    config = {**engine_config(world), "optimizer": {"type": "AdamW", "params": OPTIMIZER}}
    engine, *_ = zero_deepspeed.initialize(model=GPT(shape), config=config)
    return System(
        module=engine,
        step=engine_step(engine, shape),
        save=lambda: engine.save_checkpoint(root),
        load=lambda: engine.load_checkpoint(root),
    )


def deepspeed(shape: Shape, root: Path, world: int) -> System:
    import deepspeed as peer

    resumes = (root / "universal").exists()
    config = {
        **engine_config(world),
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": resumes},
    }
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    engine, *_ = peer.initialize(
        model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config
    )

    def load() -> None:
        path, _ = engine.load_checkpoint(str(root), tag="universal")
        assert path, "DeepSpeed found no checkpoint"

    def save() -> None:
        engine.save_checkpoint(str(root), tag="t")
        os.sync()  # it leaves the bytes to the kernel, and we and DCP do not

    return System(module=engine, step=engine_step(engine, shape), save=save, load=load)


def engine_config(world: int) -> dict[str, Any]:
    zero = {"stage": 3, "overlap_comm": False}
    return {
        "train_batch_size": world,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
    }


def engine_step(engine: Any, shape: Shape) -> Callable[[], None]:
    def step() -> None:
        engine.backward(engine(*batch(shape, 1, dist.get_rank())))
        engine.step()

    return step


def sharded(shape: Shape, world: int) -> GPT:
    """The model under FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = GPT(shape), init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def protected(shape: Shape, root: Path, world: int) -> System:
    """FSDP2 under zero_torch."""
    from stock_systems import Tokens

    import zero_torch

    model = sharded(shape, world)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True, **OPTIMIZER)
    loader = torch.utils.data.DataLoader(Tokens(shape, world), batch_size=shape.micro)
    run = zero_torch.protect(model, optimizer, loader, microbatches=world)

    def step() -> None:
        run.backward(model(*next(iter(run.loader))))
        run.step()

    return System(module=model, step=step, save=lambda: run.save(root), load=lambda: run.load(root))


def dcp(shape: Shape, root: Path, world: int) -> System:
    """FSDP2, with torch's own state dictionaries."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded(shape, world)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)

    def step() -> None:
        model(*batch(shape, 1, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def load() -> None:
        found = state()
        checkpoint.load(found, checkpoint_id=root)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )

    def save() -> None:
        checkpoint.save(state(), checkpoint_id=root)  # its writer calls fsync by default

    return System(module=model, step=step, save=save, load=load)


SYSTEMS: dict[str, Callable[[Shape, Path, int], System]] = {
    "ours": ours,
    "protected": protected,
    "DCP": dcp,
    "DeepSpeed": deepspeed,
}
IMPORTS: dict[str, tuple[str, ...]] = {
    "ours": ("zero_deepspeed",),
    "protected": ("zero_torch", "torch.distributed.fsdp", "stock_systems"),
    "DCP": ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"),
    "DeepSpeed": ("deepspeed", "deepspeed.runtime.zero.stage3"),
}
"""Not measured. Every first optimizer imports torch._dynamo, too."""


def save(make: Callable[[], System], shape: Shape) -> dict[str, float]:
    """One step, so that there are moments, and a save."""
    system = make()
    system.step()
    loss = evaluate(system.module, shape)
    with timed() as save_s:
        system.save()
    state_bytes = 12 * sum(param.numel() for param in GPT(shape).parameters())
    return {"save_s": save_s[0], "loss": loss, "state_bytes": state_bytes}


def resume(make: Callable[[], System], shape: Shape) -> dict[str, float]:
    before = begin_memory()
    with timed() as made_s:
        system = make()
    read = bytes_read()
    with timed() as load_s:
        system.load()
    read = bytes_read() - read
    loss = evaluate(system.module, shape)
    with timed() as step_s:
        system.step()
    return {
        "engine_s": made_s[0],
        "load_s": load_s[0],
        "step_s": step_s[0],
        "loss": loss,
        "read": read,
        "peak_bytes": resident_bytes("VmHWM:") - before,
    }


def evaluate(module: nn.Module, shape: Shape) -> float:
    """The loss of one batch, the same on every rank; no part of what is measured."""
    module.eval()
    with torch.no_grad():
        loss = float(module(*batch(shape, 0, 0)))
    module.train()
    return loss


@contextmanager
def timed() -> Iterator[list[float]]:
    """Seconds, from all ranks' beginning to all ranks' end."""
    took: list[float] = []
    dist.barrier()
    begin = time.perf_counter()
    yield took
    dist.barrier()
    took.append(time.perf_counter() - begin)


def main() -> None:
    name, mode, root, text, result = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = Shape(**json.loads(text))
    for module in ("torch._dynamo", *IMPORTS[name]):
        importlib.import_module(module)
    if name == "DeepSpeed":
        sys.modules["deepspeed"].init_distributed("gloo", verbose=False)
    else:
        dist.init_process_group("gloo")
    world = dist.get_world_size()
    work = {"save": save, "resume": resume}[mode]
    took = work(lambda: SYSTEMS[name](shape, Path(root), world), shape)
    Path(result).write_text(json.dumps(took))
    dist.barrier()
    os._exit(0)  # DeepSpeed's threads may not end


if __name__ == "__main__":
    main()
