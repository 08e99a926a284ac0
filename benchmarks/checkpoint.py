"""What checkpoints cost: beside torch DCP, and beside what memory and disk can do here.

    python benchmarks/checkpoint.py --root /fast/disk         some 10 minutes
    python benchmarks/checkpoint.py --quick                   a minute, small; proves nothing

Two workloads, each with Adam's two moments: "gpt2" (124 M parameters, 1.49 GB) and "small"
(10,000 tensors of 4,096 elements). `--save-world` ranks save in turn with each system and load
again; then other numbers of ranks load, `--load-worlds`. Systems take turns within each trial, a
first round is not counted; medians and ranges are printed.

    stall     how long save_checkpoint() holds training up, and that beside one memcpy
    durable   until the checkpoint is whole and survives a power cut (both sides fsync); in
              memory: until all ranks have committed it, with a copy on another node
    load      from files that are not in the page cache, verified only on our side
    read      bytes read by all ranks, in sizes of the checkpoint
    peak      memory of the largest rank above what it held before, in sizes of its share

Last, what a job of 1,024 ranks and 1,000 parameters plans with, on paper.

DCP gets flat 1-D shards in "gpt2", its best case, and one DTensor per tensor in "small".
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch.distributed as dist
from checkpoint_report import Took, Trials, loading, saving, standing
from checkpoint_worker import LOADS, SAVES, run_rank
from rich.console import Console

from zero_checkpoint.format.fragments import check_cover, from_lists
from zero_checkpoint.format.plan import plan
from zero_checkpoint.format.table import Extents

LIMIT_S = 1800.0
WIDTH = 130
"""Columns of the tables, whatever the terminal has."""


def main() -> None:
    args = parse_arguments()
    console = Console(width=max(Console().width, WIDTH))
    for workload in args.workloads:
        with tempfile.TemporaryDirectory(dir=args.root, prefix="checkpoint-bench") as folder:
            same = measure(args, workload, Path(folder), args.save_world, save_plan(args.trials))
            worlds = {args.save_world: same} | {
                world: measure(args, workload, Path(folder), world, load_plan(args.trials))
                for world in args.load_worlds
                if world != args.save_world
            }
        show(console, workload, args.save_world, worlds)
    console.print(plan_line())


def show(console: Console, workload: str, save_world: int, worlds: dict[int, Trials]) -> None:
    saves = worlds[save_world]
    own = saves["save memcpy"][0]["own"]
    title = f"{workload}: {own / 1e9:.2f} GB, saved by {save_world} ranks"
    # What is read raw are the bytes of ours.
    sizes = {name: saves["save DCP" if name == "DCP" else "save ours"][0]["size"] for name in LOADS}
    console.print(saving(title, saves))
    console.print(loading(title, worlds, sizes))
    for line in standing(worlds, save_world):
        console.print(line)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="a directory on the disk")
    parser.add_argument(
        "--workloads", nargs="+", choices=["gpt2", "small"], default=["gpt2", "small"]
    )
    parser.add_argument("--save-world", type=int, default=2, metavar="N")
    parser.add_argument("--load-worlds", type=int, nargs="*", default=[1, 4], metavar="M")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes and two trials")
    args = parser.parse_args()
    if args.quick:
        args.trials = min(args.trials, 2)
    if args.trials < 1 or min(args.save_world, *args.load_worlds) < 1:
        parser.error("--trials, --save-world and --load-worlds begin at 1")
    if not args.root.is_dir():
        parser.error(f"--root {args.root}: there is no such directory")
    return args


def save_plan(trials: int) -> list[str]:
    once = [f"save {name}" for name in SAVES] + [f"load {name}" for name in LOADS]
    return once * (trials + 1)


def load_plan(trials: int) -> list[str]:
    return [f"load {name}" for name in LOADS] * (trials + 1)


def measure(
    args: argparse.Namespace, workload: str, root: Path, world: int, plan: list[str]
) -> Trials:
    """Carry out a plan on fresh processes; the first round is left out."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(world, mp_context=context) as processes:
        ranks = [
            processes.submit(run_rank, r, world, store.port, root, workload, args.quick, plan)
            for r in range(world)
        ]
        try:
            for rank in as_completed(ranks, timeout=LIMIT_S):
                rank.result()
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()  # the others would wait for the one that has failed
            raise
    results = [rank.result() for rank in ranks]
    trials: dict[str, list[Took]] = defaultdict(list)
    for operations in zip(*results, strict=True):
        trials[operations[0][0]].append(together([took for _, took in operations]))
    return {name: rounds[1:] for name, rounds in trials.items()}


def together(ranks: Sequence[Took]) -> Took:
    """The slowest rank's time; the sum of what is read and owned."""
    sums = {"read", "own"}
    joined = {key: (sum if key in sums else max)(took[key] for took in ranks) for key in ranks[0]}
    return {**joined, "largest": max(took["own"] for took in ranks)}


# ---- a large job, on paper ----


def plan_line(ranks: int = 1024, parameters: int = 1000) -> str:
    """How long one rank takes to plan its load, and rank 0 to check everybody's fragments."""
    numels = np.arange(parameters * 3) * 7 + 900_000
    ends = np.cumsum(numels)
    starts, total = ends - numels, int(ends[-1])
    edges = np.unique([*starts, *(total * np.arange(ranks) // ranks)])
    tensor = np.searchsorted(ends, edges, side="right")
    file = np.searchsorted(total * np.arange(1, ranks) // ranks, edges, side="right")
    length = np.diff([*edges, total])
    offset = 4096 + 4 * (edges - (total * file // ranks))
    columns = {"start": edges - starts[tensor], "length": length, "offset": offset}
    begin = time.perf_counter()
    fragments = from_lists({"tensor": tensor, "file": file, **columns})
    gap = check_cover(fragments, numels.tolist(), str)
    checked = time.perf_counter()
    first, nothing = np.arange(3), np.zeros(3, dtype=np.int64)
    mine = Extents(first, nothing, numels[:3], nothing + 4, memory=first, address=nothing)
    reads = plan(mine, fragments, len(numels), 1 << 17)
    planned = time.perf_counter()
    assert gap is None
    return (
        f"{ranks} ranks, {parameters} parameters with two moments, {len(fragments)} fragments: "
        f"rank 0 checks them in {checked - begin:.3f} s, a rank plans its {len(reads)} reads in "
        f"{planned - checked:.3f} s; no collective"
    )


if __name__ == "__main__":
    main()
