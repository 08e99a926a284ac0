"""What a step costs when its state rests elsewhere, beside what the disk can do.

    python benchmarks/offload.py --path /local_nvme       two minutes
    python benchmarks/offload.py --quick                  ten seconds, small; proves nothing

One process trains a stack of linear layers in bf16 with Adam at stage 3, in each tier in turn
within every round; medians and ranges of the step, and of the step of the optimizer in it, are
printed. The batch is tiny, so that it is the state that counts.

    floor     the optimizer's step in memory, or 24 bytes of each parameter past the page cache at
              the rate of the plainest loop of reads and writes, whichever is longer
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import zero_deepspeed
from zero_engine.core.engine import Engine
from zero_engine.tiers.scratch import ScratchFile, aligned

NONE = "no offloading"
TIERS: dict[str, dict[str, Any]] = {
    NONE: {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme"}},
    "nvme, parameters too": {
        "offload_optimizer": {"device": "nvme"},
        "offload_param": {"device": "nvme", "max_in_cpu": 0},
    },
}
STATE_BYTES = 24
"""Of each parameter: master weights and two moments, read and written."""
_CHUNK_BYTES = 8 << 20


class Stack(nn.Module):
    """Layers of one size."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    console = Console()
    with tempfile.TemporaryDirectory(dir=args.path, prefix="offload-bench") as folder:
        engines = {name: make_engine(zero, args, folder) for name, zero in TIERS.items()}
        steps, optimizer_steps = measure(engines, args)
        rate = disk_rate(Path(folder), args.quick)
    parameters = sum(p.numel() for p in Stack(args.width, args.layers).parameters())
    console.print(render(steps, optimizer_steps, parameters, rate))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="a directory on the disk")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a small model and two rounds")
    args = parser.parse_args()
    if args.quick:
        args.width, args.layers, args.rounds = 256, 4, 2
    if min(args.width, args.layers, args.rounds, args.threads) < 1:
        parser.error("--width, --layers, --rounds and --threads begin at 1")
    if not args.path.is_dir():
        parser.error(f"--path {args.path}: there is no such directory")
    return args


def make_engine(zero: dict[str, Any], args: argparse.Namespace, folder: str) -> Engine:
    torch.manual_seed(0)
    sections = {name: {"nvme_path": folder, **section} for name, section in zero.items()}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, **sections},
    }
    return zero_deepspeed.initialize(model=Stack(args.width, args.layers), config=settings)[0]


def measure(
    engines: dict[str, Engine], args: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each step and of each optimizer step, by tier; a first round is not counted."""
    steps: dict[str, list[float]] = defaultdict(list)
    optimizer_steps: dict[str, list[float]] = defaultdict(list)
    batch = torch.ones(1, args.width, dtype=torch.bfloat16)
    for turn in range(args.rounds + 1):
        for name, engine in engines.items():
            begin = time.perf_counter()
            engine.backward(engine(batch))
            middle = time.perf_counter()
            engine.step()
            end = time.perf_counter()
            if turn:
                steps[name].append(end - begin)
                optimizer_steps[name].append(end - middle)
    hashes = {engine.weight_hash() for engine in engines.values()}
    assert len(hashes) == 1, "the tiers do not agree"
    return steps, optimizer_steps


def disk_rate(folder: Path, quick: bool) -> float:
    """Bytes per second, half of them read and half of them written, past the page cache."""
    file, chunks = ScratchFile(folder), 4 if quick else 48
    held = file.reserve(chunks * _CHUNK_BYTES, torch.uint8)
    buffer = aligned(_CHUNK_BYTES)
    parts = held.split(_CHUNK_BYTES)
    seconds = [
        timed(lambda move=move: [move(part, buffer) for part in parts])  # type: ignore[misc]
        for _ in range(4)
        for move in (file.write, file.read)
    ]
    return 2 * held.nbytes / (statistics.median(seconds[2::2]) + statistics.median(seconds[3::2]))


def timed(what: Callable[[], object]) -> float:
    begin = time.perf_counter()
    what()
    return time.perf_counter() - begin


def render(
    steps: dict[str, list[float]],
    optimizer_steps: dict[str, list[float]],
    parameters: int,
    rate: float,
) -> Table:
    in_memory = statistics.median(optimizer_steps[NONE])
    on_disk = STATE_BYTES * parameters / rate
    table = Table(
        title=f"{parameters / 1e6:.1f} M parameters, disk {rate / 1e9:.2f} GB/s, "
        f"{os.cpu_count()} cores"
    )
    for heading in ("tier", "step ms", "optimizer ms", "floor ms", "of the floor"):
        table.add_column(heading, justify="left" if heading == "tier" else "right")
    for name, whole in steps.items():
        floor = max(in_memory, on_disk) if "nvme" in name else in_memory
        median = statistics.median(optimizer_steps[name])
        table.add_row(
            name,
            ranged(whole),
            ranged(optimizer_steps[name]),
            f"{floor * 1e3:.0f}",
            f"{floor / median:.0%}",
        )
    return table


def ranged(seconds: list[float]) -> str:
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{middle * 1e3:.0f} ({low * 1e3:.0f}-{high * 1e3:.0f})"


if __name__ == "__main__":
    main()
