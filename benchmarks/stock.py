"""Step time of stock FSDP2 and DDP under zero_torch, beside the same without it.

    python benchmarks/stock.py                         worlds 2 and 4, eager
    python benchmarks/stock.py --compiled              the same with torch.compile
    python benchmarks/stock.py --worlds 4 --throttle 1gbit     2 hosts of 2 ranks, and a slow cable
    python benchmarks/checkpoint_resume.py --systems protected DCP     save, and resume

Processes with one thread each train the same GPT on the same tokens over gloo; systems take turns
within each round, each in processes and, as root, in a network namespace of its own. The *floor* is
forward, backward, clipping and step in as many processes that do not talk to each other. A ratio is
that of the medians of one round; printed are its median over the rounds, and its range. Where ranks
share cores, or other processes run, the ratio of CPU times says more than that of times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from stock_systems import STOCK
from training import measure
from training_report import Row, Run, summarize

PAIRS = {"ddp": "ddp-protected", "fsdp2": "fsdp2-protected"}
TARGETS = {False: 1.05, True: 1.0}
"""By whether a slow cable joins two hosts: the most that a step may take, in stock's."""


def main() -> None:
    args = parse_arguments()
    for world in args.worlds:
        args.world = world
        runs: dict[str, list[Run]] = defaultdict(list)
        for number in range(1, args.rounds + 1):
            for system in args.systems:
                run = measure(system, args.dtype, args)
                runs[system].append(run)
                print(f"round {number}: {system} {middle_ms(run, 0):.0f} ms", file=sys.stderr)
        show(runs, args)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile")
    parser.add_argument("--systems", nargs="+", choices=list(STOCK), help="in the place of all")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="counted, in each round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    parser.add_argument("--throttle", default="", help="two hosts and this rate between, as 1gbit")
    sizes = {"width": 512, "layers": 8, "length": 256, "vocabulary": 8192, "micro": 2}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    args.deepspeed_python = ""
    kind = [name for name in STOCK if name.endswith("-compiled") == args.compiled]
    args.systems = args.systems or kind
    return args


def middle_ms(run: Run, column: int) -> float:
    """The median step of a round: wall clock time (0) or CPU time per rank (1)."""
    return statistics.median(step[column] for step in run.steps()) * 1e3


def show(runs: Mapping[str, Sequence[Run]], args: argparse.Namespace) -> None:
    rows = summarize([run for members in runs.values() for run in members])
    where = f"2 hosts, {args.throttle}" if args.throttle else "one host"
    parameters = next(iter(rows.values())).parameters / 1e6
    table = Table(title=f"{parameters:.1f} M parameters, {args.dtype}, {args.world} ranks, {where}")
    for column in ("system", "ms per step", "quartiles", "CPU ms", "peak MB", "wire MB", "loss"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for system, row in rows.items():
        table.add_row(system, *cells(row))
    console = Console(width=120)
    console.print(table)
    for stock, protected in PAIRS.items():
        for mark in ("", "-compiled"):
            pair = runs.get(protected + mark), runs.get(stock + mark)
            if pair[0] and pair[1]:
                times, cpu = [ratio(*pair, column) for column in (0, 1)]
                target = TARGETS[bool(args.throttle)]
                console.print(
                    f"{protected}{mark}: {times} x the step time of {stock}{mark}, target "
                    f"{target}; CPU {cpu}"
                )


def cells(row: Row) -> tuple[str, ...]:
    """What a row of the table says."""
    return (
        f"{row.wall_ms:.0f}",
        "{:.0f}-{:.0f}".format(*row.spread_ms),
        f"{row.cpu_ms:.0f}",
        f"{row.peak_bytes / 1e6:.0f}",
        "-" if row.wire_bytes is None else f"{row.wire_bytes / 1e6:.0f}",
        f"{row.loss:.5f}",
    )


def ratio(protected: Sequence[Run], stock: Sequence[Run], column: int) -> str:
    """Median over the rounds, and the range."""
    pairs = zip(protected, stock, strict=False)
    values = [middle_ms(own, column) / middle_ms(other, column) for own, other in pairs]
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
