"""Step time, CPU time, memory and traffic of ZeRO stages 0-3, beside torch's own engines.

    python benchmarks/training.py --rounds 3            # root: traffic is counted exactly
    python benchmarks/training.py --systems ddp,zero2 --dtype bf16

Two processes with one thread each train the same GPT on the same tokens over gloo. Systems take
turns within each round, each in processes of its own (and, as root, in a network namespace of its
own, whose loopback counts the bytes), so that a slow minute of the machine hits all of them. The
*floor* is the same work in two processes that do not talk to each other. Printed are medians over
all rounds with their range, and the final losses, which must agree before speed means anything.

DeepSpeed needs an environment of its own: `--deepspeed-python PATH` adds its stages 0-3.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

WORKER = Path(__file__).resolve().parent / "training_worker.py"
OURS = ("zero0", "zero1", "zero2", "zero3")
TORCH = ("floor", "ddp", "zro", "fsdp2", "fsdp2-keep")
DEEPSPEED = ("ds0", "ds1", "ds2", "ds3")
WORLD = 2
LIMIT_S = 600


@dataclass(frozen=True)
class Measured:
    """One system in one round; lists have an entry per counted step."""

    step_s: list[float]
    cpu_s: float
    """Per step and rank."""
    peak_bytes: int
    """Resident, above what the imports took."""
    wire_bytes: float | None
    """Per step, both ranks together."""
    loss: float


def measure(system: str, args: argparse.Namespace) -> Measured:
    python = args.deepspeed_python if system in DEEPSPEED else sys.executable
    with tempfile.TemporaryDirectory(prefix="training-") as directory:
        work = [python, str(WORKER), system, directory, json.dumps(vars(args))]
        shell = "ip link set lo up && " if isolated() else ""
        ranks = " & ".join(f"RANK={r} LOCAL_RANK={r} {' '.join(map(quote, work))}" for r in (0, 1))
        command = ["bash", "-c", f"{shell}{ranks} & wait"]
        if isolated():
            command = ["unshare", "-n", *command]
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(WORLD),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29533",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONWARNINGS": "ignore",
        }
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        files = sorted(Path(directory).glob("*.json"))
        if len(files) != WORLD:
            raise SystemExit(f"{system} failed:\n{done.stderr[-3000:]}")
        return combine([json.loads(path.read_text()) for path in files], isolated())


def isolated() -> bool:
    return os.geteuid() == 0 and shutil.which("unshare") is not None


def quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def combine(ranks: Sequence[dict[str, float]], counted: bool) -> Measured:
    steps = [max(pair) for pair in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    return Measured(
        step_s=steps,
        cpu_s=statistics.mean(rank["cpu_s"] for rank in ranks) / len(steps),
        peak_bytes=int(max(rank["peak_bytes"] for rank in ranks)),
        wire_bytes=ranks[0]["wire_bytes"] / len(steps) if counted else None,
        loss=ranks[0]["loss"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--systems", default=",".join(TORCH + OURS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--micro", type=int, default=2, help="sequences per rank and step")
    parser.add_argument("--deepspeed-python", default="")
    args = parser.parse_args()
    systems = args.systems.split(",") + (list(DEEPSPEED) if args.deepspeed_python else [])
    found: dict[str, list[Measured]] = {system: [] for system in systems}
    for number in range(args.rounds):
        for system in systems:
            found[system].append(measure(system, args))
            step_ms = statistics.median(found[system][-1].step_s) * 1e3
            print(f"round {number + 1}: {system} {step_ms:.0f} ms", file=sys.stderr, flush=True)
    show(found, args)


def show(found: dict[str, list[Measured]], args: argparse.Namespace) -> None:
    params = 12 * args.layers * args.width**2 / 1e6
    table = Table(title=f"{params:.0f} M parameters in blocks, {args.dtype}, {WORLD} ranks, gloo")
    for column in ("system", "ms per step", "% of floor", "x ddp", "CPU ms", "peak MB", "wire MB"):
        table.add_column(column, justify="left" if column == "system" else "right")
    table.add_column("loss", justify="right")
    middle = {name: statistics.median(all_steps(runs)) for name, runs in found.items()}
    for name, runs in found.items():
        steps, wire = all_steps(runs), runs[0].wire_bytes
        table.add_row(
            name,
            f"{middle[name] * 1e3:.0f} ({min(steps) * 1e3:.0f}-{max(steps) * 1e3:.0f})",
            f"{middle['floor'] / middle[name]:.0%}" if "floor" in middle else "-",
            f"{middle[name] / middle['ddp']:.2f}" if "ddp" in middle else "-",
            f"{statistics.median(run.cpu_s for run in runs) * 1e3:.0f}",
            f"{max(run.peak_bytes for run in runs) / 1e6:.0f}",
            f"{wire / 1e6:.0f}" if wire is not None else "-",
            f"{runs[0].loss:.5f}",
        )
    Console(width=120).print(table)


def all_steps(runs: Sequence[Measured]) -> list[float]:
    return [step for run in runs for step in run.step_s]


if __name__ == "__main__":
    main()
