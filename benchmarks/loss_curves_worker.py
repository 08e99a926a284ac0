"""One rank of `loss_curves.py`: trains a small GPT on real text, prints the mean loss per step.

The text is the reference manual that comes with Python (pydoc_data.topics). Rank 0 prints one JSON
object at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import zero_deepspeed
from zero_data.global_batch import BatchShape, plan_epoch, sample_ids

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from train_gpt import GPT

LENGTH, MICRO_BATCH, MICROBATCHES, SEED = 64, 4, 6, 42
BATCH = MICRO_BATCH * MICROBATCHES
RATE = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def text() -> TensorDataset:
    """Consecutive stretches of the manual, and what follows each byte."""
    from pydoc_data.topics import topics

    whole = "".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()
    count = (len(tokens) - 1) // LENGTH
    cut = [part[: count * LENGTH].view(count, LENGTH) for part in (tokens, tokens[1:])]
    return TensorDataset(*cut)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(width=64, layers=3, heads=4, length=LENGTH, dropout=0.0)


def zero(stage: int, steps: int, bf16: bool) -> list[float]:
    """The mean losses of our engine."""
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": RATE},
        "seed": SEED,
    }
    engine, _, loader, _ = zero_deepspeed.initialize(
        model=make_model(), training_data=text(), config=config
    )
    losses: list[float] = []
    for tokens, targets in loader:
        engine.backward(engine(tokens, targets))
        engine.step()
        if engine.global_steps > len(losses):
            losses.append(engine.mean_loss)
        if len(losses) == steps:
            break
    return losses


def ddp(steps: int) -> list[float]:
    """Those of torch's DistributedDataParallel on the same batches, divided among the ranks."""
    zero_deepspeed.init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), **RATE)
    losses = []
    for tokens, targets in batches(text(), steps):
        own = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        optimizer.zero_grad()
        loss = model(tokens[own], targets[own])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def batches(dataset: TensorDataset, steps: int) -> Iterator[tuple[Tensor, ...]]:
    """The global batches, in our engine's order."""
    size, shape = len(dataset), BatchShape(microbatches=MICROBATCHES, micro_batch=MICRO_BATCH)
    for plan, _ in zip(plan_epoch(0, shape, size), range(steps), strict=False):
        microbatches = [plan.microbatch(index, 0, 1) for index in range(plan.microbatches)]
        ids = [
            i for microbatch in microbatches for i in sample_ids(plan, microbatch, size, size, SEED)
        ]
        yield dataset[ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=["zero", "ddp"], required=True)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours = args.system == "zero"
    losses = zero(args.stage, args.steps, args.bf16) if ours else ddp(args.steps)
    if dist.get_rank() == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
