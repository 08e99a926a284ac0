"""From a checkpoint to the first step at another world size: beside torch DCP and DeepSpeed.

    python benchmarks/checkpoint_resume.py --root /fast/disk --deepspeed-python VENV/bin/python
    python benchmarks/checkpoint_resume.py --quick       a minute, small; proves nothing

gpt2 (124 M parameters) with Adam at ZeRO stage 3 is saved by `--save-world` ranks and goes on with
`--world`. Every rank is a fresh process, as after a failure; systems take turns within each trial,
a first round is not counted. Printed are medians and ranges of

    save        until the checkpoint survives a power cut (of DeepSpeed with an os.sync())
    convert     `ds_to_universal`, which DeepSpeed needs for another world size
    engine      the model and its engine, from modules that are imported
    load        from files that are not in the page cache
    first step  all of it up to the end of the first step: conversion, engine, load and step
    read        bytes read by all ranks (not by the conversion), in sizes of the state
    peak        MB of memory of the largest rank above its imports, while resuming

"ours" is zero_engine at stage 3, "protected" is FSDP2 under zero_torch, "DCP" is FSDP2 alone. The
loss of one batch after the load must be the one before the save, or the script fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from checkpoint_resume_worker import SYSTEMS
from counters import forget
from rich.console import Console
from rich.table import Table

WORKER = Path(__file__).resolve().parent / "checkpoint_resume_worker.py"
LIMIT_S = 600
"""For one system's ranks. DeepSpeed compiles its extensions the first time."""
SHAPES = {
    "gpt2": {"width": 768, "layers": 12, "length": 16, "vocabulary": 50257, "micro": 1},
    "quick": {"width": 128, "layers": 2, "length": 16, "vocabulary": 4096, "micro": 1},
}
TARGETS = {"DCP": 0.8, "DeepSpeed": 0.5}
"""What part of a peer's time to the first step ours may take."""
Took = dict[str, float]


def main() -> None:
    args = parse_arguments()
    trials: dict[str, list[Took]] = defaultdict(list)
    for number in range(args.trials + 1):
        for system in args.systems:
            with tempfile.TemporaryDirectory(dir=args.root, prefix="checkpoint-resume") as folder:
                took = trial(system, Path(folder), args)
            print(f"round {number}: {system}: {took['first step']:.2f} s", file=sys.stderr)
            if number:  # the first fills caches and compiles
                trials[system].append(took)
    show(trials, args)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="a directory on the disk")
    parser.add_argument("--save-world", type=int, default=2, metavar="N")
    parser.add_argument("--world", type=int, default=4, metavar="M")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help="all if not given")
    parser.add_argument("--deepspeed-python", default="", help="the Python that has DeepSpeed")
    parser.add_argument("--quick", action="store_true", help="a small model and one trial")
    args = parser.parse_args()
    args.shape = SHAPES["quick" if args.quick else "gpt2"]
    args.trials = 1 if args.quick else args.trials
    args.systems = args.systems or list(SYSTEMS)
    if not args.deepspeed_python:
        args.systems = [name for name in args.systems if name != "DeepSpeed"]
    return args


def trial(system: str, root: Path, args: argparse.Namespace) -> Took:
    """Save, convert where that is needed, and go on at another world size."""
    saved = on_ranks(system, "save", root, args.save_world, args)
    forget(root)
    convert_s = convert(root, args) if system == "DeepSpeed" else 0.0
    forget(root)
    resumed = on_ranks(system, "resume", root, args.world, args)
    before, after = saved[0]["loss"], resumed[0]["loss"]
    if not math.isclose(before, after, rel_tol=1e-5):
        raise SystemExit(f"{system}: the loss was {before} before the save, {after} after the load")
    engine_s, load_s, step_s = (
        max(rank[name] for rank in resumed) for name in ("engine_s", "load_s", "step_s")
    )
    return {
        "save": max(rank["save_s"] for rank in saved),
        "convert": convert_s,
        "engine": engine_s,
        "load": load_s,
        "first step": convert_s + engine_s + load_s + step_s,
        "read": sum(rank["read"] for rank in resumed) / saved[0]["state_bytes"],
        "peak": max(rank["peak_bytes"] for rank in resumed) / 1e6,
    }


def on_ranks(
    system: str, mode: str, root: Path, world: int, args: argparse.Namespace
) -> list[Took]:
    """What each rank of one system says of saving or resuming."""
    python = args.deepspeed_python if system == "DeepSpeed" else sys.executable
    results = [root.parent / f"{root.name}.{mode}.{rank}.json" for rank in range(world)]
    logs = [path.with_suffix(".log") for path in results]
    common = environment(python, world)
    command = [python, str(WORKER), system, mode, str(root), json.dumps(args.shape)]
    ranks = [
        subprocess.Popen(
            [*command, str(result)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=log.open("w"),
        )
        for rank, (result, log) in enumerate(zip(results, logs, strict=True))
    ]
    try:
        for process in ranks:
            process.wait(LIMIT_S)
        if not all(path.exists() for path in results):
            raise SystemExit(
                f"{system}, {mode}:\n" + "\n".join(p.read_text()[-2000:] for p in logs)
            )
        return [json.loads(path.read_text()) for path in results]
    finally:
        for process in ranks:
            process.kill()
        for path in (*results, *logs):
            path.unlink(missing_ok=True)


def environment(python: str, world: int) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        **os.environ,
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "DS_ACCELERATOR": "cpu",
        # DeepSpeed compiles with the ninja of its own environment.
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
    }


def convert(root: Path, args: argparse.Namespace) -> float:
    """DeepSpeed's offline conversion with as many workers as there were ranks; its seconds."""
    module = "deepspeed.checkpoint.ds_to_universal"
    workers = str(args.save_world)
    folders = ["--input_folder", str(root / "t"), "--output_folder", str(root / "universal")]
    counts = ["--num_extract_workers", workers, "--num_merge_workers", workers]
    begin = time.perf_counter()
    done = subprocess.run(
        [args.deepspeed_python, "-m", module, *folders, *counts],
        check=False,
        env=environment(args.deepspeed_python, 1),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"ds_to_universal failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - begin


def show(trials: Mapping[str, Sequence[Took]], args: argparse.Namespace) -> None:
    columns = ["save", "convert", "engine", "load", "first step", "read", "peak"]
    table = Table(title=f"saved by {args.save_world} ranks, resumed by {args.world}")
    for heading in ("", *columns):
        table.add_column(heading, justify="right" if heading else "left")
    for system, rounds in trials.items():
        table.add_row(system, *(spread([took[name] for took in rounds]) for name in columns))
    console = Console(width=150)
    console.print(table)
    for peer, target in TARGETS.items():
        for own in ("ours", "protected"):
            pairs = zip(trials.get(own, ()), trials.get(peer, ()), strict=False)
            ratios = [mine["first step"] / other["first step"] for mine, other in pairs]
            if ratios:
                console.print(f"{own}, first step: {spread(ratios)} of {peer}'s, target {target}")


def spread(values: Sequence[float]) -> str:
    """Median, and the range."""
    return f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


if __name__ == "__main__":
    main()
