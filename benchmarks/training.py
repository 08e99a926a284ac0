"""Step time, CPU time, memory and traffic of ZeRO stages 0-3, beside torch's engines and DeepSpeed.

    python benchmarks/training.py --deepspeed-python /path/to/venv/bin/python
    python benchmarks/training.py --throttle 1gbit --systems floor,ddp,fsdp2,zero2,zero3
    python benchmarks/training.py --table results.jsonl

Two processes with one thread each train the same GPT on the same tokens over gloo. Systems take
turns within each round, each in processes of its own and, as root, in a network namespace of its
own, whose interface counts the bytes; without root there is no such column. So a slow minute of
the machine hits all of them. Steps during which other processes kept the machine busy are left
out; where too few remain, all count, and the row is marked with an asterisk. The *floor* is
forward, backward and step in two processes that do not talk to each other. The last losses are
printed, too: they must agree before speed means anything (the floor's, which trains on half of
the batch, is another).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training_model import Shape
from training_network import Place, place
from training_report import Run, show
from training_systems import SYSTEMS

WORKER = Path(__file__).resolve().parent / "training_worker.py"
DEEPSPEED = tuple(name for name, system in SYSTEMS.items() if system.package == "deepspeed")
WORLD = 2
LIMIT_S = 900
"""For one system in one round. DeepSpeed compiles its extensions the first time."""


def measure(system: str, dtype: str, args: argparse.Namespace) -> Run:
    with place(WORLD, args.throttle) as where, tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / f"{rank}.json" for rank in range(WORLD)]
        python = args.deepspeed_python if system in DEEPSPEED else sys.executable
        task = json.dumps(_task(args, dtype, where))
        ranks = [
            subprocess.Popen(
                [*where.prefixes[rank], python, str(WORKER), system, str(path), task],
                env=_environment(rank, where, python),
                stdout=subprocess.DEVNULL,
                stderr=(Path(directory) / f"{rank}.log").open("w"),
            )
            for rank, path in enumerate(paths)
        ]
        try:
            for process in ranks:
                process.wait(LIMIT_S)
        finally:
            for process in ranks:
                process.kill()
        if not all(path.exists() for path in paths):
            logs = "\n".join((Path(directory) / f"{r}.log").read_text() for r in range(WORLD))
            raise SystemExit(f"{system}, {dtype} failed:\n{logs[-3000:]}")
        return Run(
            system=system,
            dtype=dtype,
            ranks=[json.loads(path.read_text()) for path in paths],
            counted=where.counted,
            one_host=where.one_host,
        )


def _task(args: argparse.Namespace, dtype: str, where: Place) -> dict[str, Any]:
    names = ("width", "layers", "length", "vocabulary", "micro")
    shape = Shape(**{name: getattr(args, name) for name in names})
    return {
        "shape": asdict(shape),
        "dtype": dtype,
        "steps": args.steps,
        "warmup": args.warmup,
        "interface": where.interface,
    }


def _environment(rank: int, where: Place, python: str) -> dict[str, str]:
    local = {"LOCAL_RANK": str(rank), "LOCAL_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    remote = {"LOCAL_RANK": "0", "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {
        **os.environ,
        **(local if where.one_host else remote),
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": where.address,
        "MASTER_PORT": str(where.port),
        "GLOO_SOCKET_IFNAME": where.interface,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "DS_ACCELERATOR": "cpu",
        # DeepSpeed compiles with the ninja of its own environment.
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="of " + ", ".join(SYSTEMS))
    parser.add_argument("--dtype", default="fp32,bf16", help="fp32, bf16 or both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="counted, in each round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    parser.add_argument("--throttle", default="", help="two hosts and this rate between, as 1gbit")
    parser.add_argument("--deepspeed-python", default="", help="the Python that has DeepSpeed")
    parser.add_argument("--out", type=Path, help="add one JSON line per measurement to this file")
    parser.add_argument("--table", type=Path, help="measure nothing: the tables of such a file")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--micro", type=int, default=2, help="sequences per rank and step")
    args = parser.parse_args()
    args.systems = args.systems.split(",")
    args.dtype = args.dtype.split(",")
    if wrong := [name for name in args.systems if name not in SYSTEMS]:
        parser.error(f"--systems: {', '.join(wrong)}: not one of {', '.join(SYSTEMS)}")
    if wrong := [name for name in args.dtype if name not in ("fp32", "bf16")]:
        parser.error(f"--dtype: {', '.join(wrong)}: not fp32 or bf16")
    if not args.deepspeed_python:
        args.systems = [name for name in args.systems if name not in DEEPSPEED]
    return args


def main() -> None:
    args = _arguments()
    if args.table:
        found = [Run(**json.loads(line)) for line in args.table.read_text().splitlines()]
    else:
        found = _rounds(args)
    show(found, f"{WORLD} ranks, gloo" + (f", {args.throttle}" if args.throttle else ""))


def _rounds(args: argparse.Namespace) -> list[Run]:
    found: list[Run] = []
    turns = itertools.product(range(1, args.rounds + 1), args.dtype, args.systems)
    try:
        for number, dtype, system in turns:
            run = measure(system, dtype, args)
            found.append(run)
            wall_ms = min(wall for wall, _, _ in run.steps()) * 1e3
            print(f"round {number}: {system} {dtype} {wall_ms:.0f} ms", file=sys.stderr)
            if args.out:
                with args.out.open("a") as lines:
                    lines.write(json.dumps(asdict(run)) + "\n")
    except KeyboardInterrupt:
        print("interrupted; this is what was measured", file=sys.stderr)
    return found


if __name__ == "__main__":
    main()
