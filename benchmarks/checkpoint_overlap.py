"""How much slower a step is while a checkpoint is being written, by us and by torch DCP.

    python benchmarks/checkpoint_overlap.py --root /fast/disk
    python benchmarks/checkpoint_overlap.py --quick       a minute, small; proves nothing

Two ranks with one thread each train the same GPT with our engine, stage 2. In turn, within each
round: steps without a save, and steps during each of which a save is in flight, because the next
one begins as soon as the one before is durable. What is saved is as large for both: all weights
and Adam's moments, DCP's as flat shards, its best case. Printed are medians and ranges of

    step     seconds, without the stall
    ratio    of that to the step without a save in the same round; target 1.10 at most
    stall    how long the call that begins a save holds training up
    saves    how many were written, at how many GB/s; the rest of the machine is not idle meanwhile
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_worker import distributed
from inside import persistence_of
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from training_model import GPT, Shape, batch

import zero_deepspeed

WORLD = 2
TARGET = 1.10
KINDS = ("param", "exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Window:
    """Some steps in a row."""

    steps_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """All of it, until the last save is durable."""


class Savers:
    """Begins saves of one rank; `busy` while one is in flight, `wait` until it is durable."""

    def __init__(self, root: Path, shape: Shape) -> None:
        config = {
            "train_batch_size": WORLD,
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "checkpoint": {"async": True, "weight_hash": False},
        }
        self.root = root
        self.engine, *_ = zero_deepspeed.initialize(model=GPT(shape), config=config)
        mesh = init_device_mesh("cpu", (WORLD,))
        units = self.engine._core.units
        self._state = {
            f"{kind}/{unit.spec.name}": distributed(unit.layout.numel, mesh)
            for unit in units
            for kind in KINDS
        }
        self.state_bytes = 12 * sum(unit.layout.numel for unit in units)
        # It fsyncs as we do.
        self._writer = dcp.FileSystemWriter(root, single_file_per_rank=True, thread_count=1)
        self._group = dist.new_group()  # its threads talk while training does
        self._future: Future[object] | None = None
        self._copy: subprocess.Popen[bytes] | None = None
        self._count = 0

    def begin_ours(self) -> None:
        self.engine.save_checkpoint(self.root / "ours")

    def begin_dcp(self) -> None:
        self._count += 1
        path = self.root / f"dcp{self._count}"
        self._future = dcp.async_save(
            self._state,
            checkpoint_id=path,
            storage_writer=self._writer,
            process_group=self._group,
        )

    def begin_disk(self) -> None:
        self._count += 1
        path = self.root / f"disk{self._count}-{dist.get_rank()}"
        path.mkdir()
        size = f"count={self.state_bytes // WORLD}"
        ways = ["iflag=count_bytes", "oflag=direct", "conv=fsync", "bs=16M", "status=none"]
        self._copy = subprocess.Popen(["dd", "if=/dev/zero", f"of={path / 'file'}", size, *ways])

    def busy(self) -> bool:
        """On any rank: all of them begin the next one together."""
        own = self._future is not None and not self._future.done()
        own |= self._copy is not None and self._copy.poll() is None
        flags = torch.tensor([own or persistence_of(self.engine).saver.busy], dtype=torch.int32)
        dist.all_reduce(flags)
        return bool(flags)

    def wait(self) -> None:
        self.engine.wait_for_checkpoint()
        if self._future is not None:
            self._future.result()
        if self._copy is not None:
            assert self._copy.wait() == 0
        self._future = self._copy = None
        dist.barrier()

    def clear(self) -> None:
        if dist.get_rank() == 0:
            for path in self.root.iterdir():
                shutil.rmtree(path)
        dist.barrier()


SYSTEMS: dict[str, Callable[[Savers], None] | None] = {
    "no save": None,
    "disk": Savers.begin_disk,
    "ours": Savers.begin_ours,
    "DCP": Savers.begin_dcp,
}


def run_rank(
    rank: int, port: int, root: Path, shape: Shape, rounds: int, steps: int
) -> tuple[dict[str, list[Window]], int]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    savers = Savers(root, shape)
    found: dict[str, list[Window]] = {system: [] for system in SYSTEMS}
    for _ in range(rounds + 1):
        for system, begin in SYSTEMS.items():
            found[system].append(window(savers, begin, shape, rank, steps))
            savers.clear()
    savers.engine.destroy()
    return {system: windows[1:] for system, windows in found.items()}, savers.state_bytes


def window(
    savers: Savers, begin: Callable[[Savers], None] | None, shape: Shape, rank: int, steps: int
) -> Window:
    took, started = Window(), time.perf_counter()
    for number in range(steps):
        if begin is not None and not savers.busy():
            savers.wait()
            before = time.perf_counter()
            begin(savers)
            took.stalls_s.append(time.perf_counter() - before)
        dist.barrier()
        before = time.perf_counter()
        savers.engine.backward(savers.engine(*batch(shape, number, rank)))
        savers.engine.step()
        took.steps_s.append(time.perf_counter() - before)
    savers.wait()
    took.seconds = time.perf_counter() - started
    return took


def main() -> None:
    args = parse_arguments()
    width, layers = (128, 2) if args.quick else (768, 12)
    shape = Shape(width=width, layers=layers, length=32, vocabulary=16384, micro=1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(dir=args.root, prefix="checkpoint-overlap") as folder,
        ProcessPoolExecutor(WORLD, mp_context=context) as processes,
    ):
        ranks = [
            processes.submit(run_rank, r, store.port, Path(folder), shape, args.rounds, args.steps)
            for r in range(WORLD)
        ]
        found, state_bytes = ranks[0].result()
    Console(width=110).print(table(found, state_bytes))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="a directory on the disk")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="in each window")
    parser.add_argument("--quick", action="store_true", help="a small model and one round")
    args = parser.parse_args()
    args.rounds = 1 if args.quick else args.rounds
    return args


def table(found: Mapping[str, Sequence[Window]], state_bytes: int) -> Table:
    shown = Table(title=f"steps beside saves of {state_bytes / 1e9:.2f} GB by {WORLD} ranks")
    for heading in ("", "step s", f"ratio (<= {TARGET:.2f})", "stall s", "saves", "GB/s"):
        shown.add_column(heading, justify="right" if heading else "left")
    alone = [statistics.median(window.steps_s) for window in found["no save"]]
    for system, windows in found.items():
        steps = [statistics.median(window.steps_s) for window in windows]
        stalls = [stall for window in windows for stall in window.stalls_s]
        rates = [len(w.stalls_s) * state_bytes / w.seconds / 1e9 for w in windows]
        shown.add_row(
            system,
            spread(steps),
            spread([own / base for own, base in zip(steps, alone, strict=True)]),
            *([spread(stalls), str(len(stalls)), spread(rates)] if stalls else []),
        )
    return shown


def spread(values: Sequence[float]) -> str:
    """Median, and the range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


if __name__ == "__main__":
    main()
