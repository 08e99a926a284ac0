"""Step time, CPU time, memory and traffic of ZeRO stages 0-3, beside torch's engines and DeepSpeed.

    python benchmarks/training.py --deepspeed-python /path/to/venv/bin/python
    python benchmarks/training.py --nodes 1x2,2x1,2x2 --rate 1gbit,10gbit --accumulation 1,8
    python benchmarks/training.py --table results.jsonl

Processes with one thread each train the same GPT on the same tokens over gloo. Systems take turns
within each round, each in processes of its own and, as root, in a network namespace for each node,
whose interfaces count the bytes between nodes and inside of them; without root there is one node,
and nothing is counted. So a slow minute of the machine hits all of them. Steps during which other
processes kept the machine busy are left out; where too few remain, all count, and the row is marked
with an asterisk. The *floor* is forward, backward and step in processes that do not talk to each
other. The last losses are printed, too: they must agree before speed means anything (the floor's,
which trains on a part of the batch, is another).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training_model import Shape
from training_network import Place, place
from training_report import Run, show
from training_systems import SYSTEMS
from training_traffic import nodes_of

WORKER = Path(__file__).resolve().parent / "training_worker.py"
DEEPSPEED = tuple(name for name, system in SYSTEMS.items() if system.package == "deepspeed")
LIMIT_S = 900
"""For one system in one round. DeepSpeed compiles its extensions the first time."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one comparison has in common."""

    nodes: tuple[int, ...]
    rate: str
    """Of the cable of each node, in the words of tc; empty: as fast as the machine."""
    accumulation: int
    dtype: str


def measure(system: str, case: Case, args: argparse.Namespace) -> Run:
    world = sum(case.nodes)
    with place(case.nodes, case.rate) as where, tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / f"{rank}.json" for rank in range(world)]
        python = args.deepspeed_python if system in DEEPSPEED else sys.executable
        task = json.dumps(_task(args, case))
        ranks = [
            subprocess.Popen(
                [*where.prefixes[rank], python, str(WORKER), system, str(path), task],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=(Path(directory) / f"{rank}.log").open("w"),
            )
            for rank, (path, environment) in enumerate(
                zip(paths, _environments(where, python), strict=True)
            )
        ]
        try:
            for process in ranks:
                process.wait(LIMIT_S)
        finally:
            for process in ranks:
                process.kill()
        if not all(path.exists() for path in paths):
            logs = "\n".join((Path(directory) / f"{r}.log").read_text() for r in range(world))
            codes = [process.returncode for process in ranks]
            raise SystemExit(f"{system}, {case} failed, exit codes {codes}:\n{logs[-3000:]}")
        return Run(
            system=system,
            **asdict(case),
            ranks=[json.loads(path.read_text()) for path in paths],
            counted=where.counted,
        )


def _task(args: argparse.Namespace, case: Case) -> dict[str, Any]:
    names = ("width", "layers", "length", "vocabulary", "micro")
    shape = Shape(**{name: getattr(args, name) for name in names})
    return {**asdict(case), "shape": asdict(shape), "steps": args.steps, "warmup": args.warmup}


def _environments(where: Place, python: str) -> Iterator[dict[str, str]]:
    """Of each rank, as torchrun would set them."""
    places = [(node, local) for node, count in enumerate(where.nodes) for local in range(count)]
    for rank, (node, local) in enumerate(places):
        count = str(where.nodes[node])
        yield {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(local),
            "LOCAL_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "GROUP_RANK": str(node),
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
    parser.add_argument("--nodes", default="1x2", help="nodes x ranks of each, in a list")
    parser.add_argument("--rate", default="", help="between nodes, as 1gbit, in a list")
    parser.add_argument("--accumulation", default="1", help="micro-batches of a rank, in a list")
    parser.add_argument(
        "--deepspeed-python",
        default=sys.executable,
        help="the Python that has DeepSpeed, if another one; its rows are left out without it",
    )
    parser.add_argument("--out", type=Path, help="add one JSON line per measurement to this file")
    parser.add_argument("--table", type=Path, help="measure nothing: the tables of such a file")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--micro", type=int, default=2, help="sequences per micro-batch")
    args = parser.parse_args()
    args.systems = args.systems.split(",")
    args.dtype = args.dtype.split(",")
    try:
        args.nodes = [nodes_of(text) for text in args.nodes.split(",")]
        args.accumulation = [int(text) for text in args.accumulation.split(",")]
    except ValueError as error:
        parser.error(f"--nodes, --accumulation: {error}; write them as 1x2,2x2 and 1,8")
    if wrong := [name for name in args.systems if name not in SYSTEMS]:
        parser.error(f"--systems: {', '.join(wrong)}: not one of {', '.join(SYSTEMS)}")
    if wrong := [name for name in args.dtype if name not in ("fp32", "bf16")]:
        parser.error(f"--dtype: {', '.join(wrong)}: not fp32 or bf16")
    return args


def main() -> None:
    # Whoever ends this early, such as timeout, leaves no ranks and no namespaces behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args = _arguments()
    if args.table:
        found = [Run(**json.loads(line)) for line in args.table.read_text().splitlines()]
    else:
        _leave_out(args)
        found = _rounds(args)
    show(found)


def _leave_out(args: argparse.Namespace) -> None:
    """Leave out the systems that are not installed, and say why."""
    if not any(name in DEEPSPEED for name in args.systems):
        return
    python = [args.deepspeed_python, "-c", "import torch, deepspeed"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    tried = subprocess.run(python, env=environment, capture_output=True, text=True, check=False)
    if tried.returncode:
        last = tried.stderr.strip().splitlines()[-1:]
        print(f"DeepSpeed is left out: {args.deepspeed_python}: {''.join(last)}", file=sys.stderr)
        args.systems = [name for name in args.systems if name not in DEEPSPEED]


def _cases(args: argparse.Namespace) -> list[Case]:
    rates = args.rate.split(",")
    product = itertools.product(args.nodes, rates, args.accumulation, args.dtype)
    cases = [
        Case(nodes=nodes, rate=rate if len(nodes) > 1 else "", accumulation=count, dtype=dtype)
        for nodes, rate, count, dtype in product
    ]
    return list(dict.fromkeys(cases))  # one node has no rate


def _rounds(args: argparse.Namespace) -> list[Run]:
    found: list[Run] = []
    turns = itertools.product(range(1, args.rounds + 1), _cases(args), args.systems)
    try:
        for number, case, system in turns:
            run = measure(system, case, args)
            found.append(run)
            wall_ms = min(wall for wall, _, _ in run.steps()) * 1e3
            print(f"round {number}: {system}, {case}: {wall_ms:.0f} ms", file=sys.stderr)
            if args.out:
                with args.out.open("a") as lines:
                    lines.write(json.dumps(asdict(run)) + "\n")
    except KeyboardInterrupt:
        print("interrupted; this is what was measured", file=sys.stderr)
    return found


if __name__ == "__main__":
    main()
