"""Step time of stock FSDP2 and DDP under zero_torch, beside the same without it.

    python benchmarks/stock.py                         2 and 4 ranks of one node, eager
    python benchmarks/stock.py --compiled              the same with torch.compile
    python benchmarks/stock.py --nodes 2x2 --rate 1gbit     2 nodes of 2 ranks, and slow cables
    python benchmarks/stock.py --accumulation 8        with DDP that sends once in a step, too
    python benchmarks/checkpoint_resume.py --systems protected DCP     save, and resume

Processes with one thread each train the same GPT on the same tokens over gloo; systems take turns
within each round, each in processes and, as root, in network namespaces of its own. The *floor* is
forward, backward, clipping and step in as many processes that do not talk to each other. A ratio is
that of the medians of one round; printed are its median over the rounds, and its range. Where ranks
share cores, or other processes run, the ratio of CPU times says more than that of times.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from stock_systems import ONCE, STOCK
from training import Case, measure
from training_report import Row, Run, summarize
from training_traffic import nodes_of

PAIRS = {
    "stock-ddp": "ddp-protected",
    "stock-fsdp2": "fsdp2-protected",
    "stock-ddp-once": "ddp-protected-once",
}
TARGETS = {False: 1.05, True: 1.0}
"""By whether a slow cable joins two nodes: the most that a step may take, in stock's."""


def main() -> None:
    # Whoever ends this early, such as timeout, leaves no ranks and no namespaces behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args = parse_arguments()
    for nodes in args.nodes:
        case = Case(
            nodes=nodes,
            rate=args.rate if len(nodes) > 1 else "",
            accumulation=args.accumulation,
            dtype=args.dtype,
        )
        runs: dict[str, list[Run]] = defaultdict(list)
        for number in range(1, args.rounds + 1):
            for system in args.systems:
                run = measure(system, case, args)
                runs[system].append(run)
                print(f"round {number}: {system} {middle_ms(run, 0):.0f} ms", file=sys.stderr)
        show(runs, case)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nodes", type=nodes_of, nargs="+", default=[(2,), (4,)], help="nodes x ranks, as 2x2"
    )
    parser.add_argument("--rate", default="", help="between nodes, as 1gbit")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a rank")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile")
    parser.add_argument("--systems", nargs="+", choices=list(STOCK), help="in the place of all")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="counted, in each round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    sizes = {"width": 512, "layers": 8, "length": 256, "vocabulary": 8192, "micro": 2}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    args.deepspeed_python = ""
    kind = [n for n in STOCK if n not in ONCE and n.endswith("-compiled") == args.compiled]
    if args.accumulation > 1 and not args.compiled:
        kind += ONCE
    args.systems = args.systems or kind
    return args


def middle_ms(run: Run, column: int) -> float:
    """The median step of a round: wall clock time (0) or CPU time per rank (1)."""
    return statistics.median(step[column] for step in run.steps()) * 1e3


def show(runs: Mapping[str, Sequence[Run]], case: Case) -> None:
    rows = summarize([run for members in runs.values() for run in members])
    parameters = next(iter(rows.values())).parameters / 1e6
    nodes = f"nodes x ranks: {len(case.nodes)}x{case.nodes[0]}"
    where = f"{nodes}, {case.rate}" if case.rate else nodes
    table = Table(title=f"{parameters:.1f} M parameters, {case.dtype}, {where}")
    columns = ("system", "ms per step", "quartiles", "CPU ms", "peak MB", "MB between", "MB inside")
    for column in (*columns, "loss"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for system, row in rows.items():
        table.add_row(system, *cells(row))
    console = Console(width=120)
    console.print(table)
    for stock, protected in PAIRS.items():
        for mark in ("", "-compiled"):
            own, other = runs.get(protected + mark), runs.get(stock + mark)
            if own and other:
                console.print(
                    f"{protected}{mark}: {ratio(own, other, 0)} x the step time of {stock}{mark}, "
                    f"target {TARGETS[bool(case.rate)]}; CPU {ratio(own, other, 1)}"
                )


def cells(row: Row) -> tuple[str, ...]:
    """What a row of the table says."""
    sent = row.sent
    return (
        f"{row.wall_ms:.0f}",
        "{:.0f}-{:.0f}".format(*row.spread_ms),
        f"{row.cpu_ms:.0f}",
        f"{row.peak_bytes / 1e6:.0f}",
        *(("-", "-") if sent is None else (f"{b / 1e6:.0f}" for b in (sent.between, sent.inside))),
        f"{row.loss:.5f}",
    )


def ratio(protected: Sequence[Run], stock: Sequence[Run], column: int) -> str:
    """Median over the rounds, and the range."""
    pairs = zip(protected, stock, strict=False)
    values = [middle_ms(own, column) / middle_ms(other, column) for own, other in pairs]
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
