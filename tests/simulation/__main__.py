"""Simulate clusters: `python -m tests.simulation --seed N`, or `--minutes M` for as many as fit.

A seed that breaks an invariant is shortened, and its history printed; the same seed gives the same
history each time.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace

from tests.simulation.cluster import end_at_interrupt
from tests.simulation.faults import HEAL, Fault
from tests.simulation.scenarios import setting_of
from tests.simulation.shrink import shrink
from tests.simulation.simulation import Result, plan, run


def main() -> int:
    """Simulate; the exit code is 1 if an invariant is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="simulate this seed alone, and print its history")
    parser.add_argument("--first", type=int, help="the first of many seeds; drawn without it")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to simulate")
    parser.add_argument(
        "--count", type=int, help="how many seeds to simulate, however long it takes"
    )
    parser.add_argument("--free", action="store_true", help="only what must cost no restart")
    parser.add_argument(
        "--fault", action="append", help="instead of those of the seed: '3 kill-agent a'"
    )
    parser.add_argument("--setting", help="instead of that of the seed: 'nodes=2 steps=5'")
    parser.add_argument("--no-shrink", action="store_true", help="print the history as it is")
    args = parser.parse_args()
    if args.seed is None and (args.fault or args.setting):
        parser.error("--fault and --setting take the place of those of a seed; give --seed, too")
    end_at_interrupt()
    if args.seed is not None:
        planned = plan(args.seed, free=True if args.free else None)
        if args.setting:
            planned = replace(planned, setting=setting_of(args.setting))
        if args.fault:
            try:
                faults = sorted(Fault.of(text) for text in args.fault)
            except (ValueError, IndexError):
                parser.error(f"--fault: {args.fault} are not all as '3 kill-agent a'")
            over_s = max(fault.at_s + fault.for_s for fault in faults)
            faults += [] if faults[-1].kind == HEAL else [Fault(over_s + 1.0, HEAL)]
            planned = replace(planned, faults=tuple(faults))
        result = run(planned)
        print(result.text)
        return _report(result, args.no_shrink) if result.problems else 0
    first = args.first if args.first is not None else random.SystemRandom().randrange(10**9)
    return _many(first, args)


def _many(first: int, args: argparse.Namespace) -> int:
    print(f"seeds from {first}")
    began_s, cpu_s = time.monotonic(), time.process_time()
    simulated_s = rounds = taken_over = 0.0
    seed = first
    free = True if args.free else None
    while (
        seed < first + args.count if args.count else time.monotonic() < began_s + 60 * args.minutes
    ):
        result = run(plan(seed, free=free))
        simulated_s += result.simulated_s
        rounds += result.rounds
        taken_over += result.taken_over
        if result.problems:
            return _report(result, args.no_shrink)
        seed += 1
    hours, cores = simulated_s / 3600, (time.process_time() - cpu_s) / 3600
    print(
        f"{seed - first} simulations, {rounds:.0f} rounds, {taken_over:.0f} of them joined by a "
        f"process that waited, {hours:.2f} hours of a cluster, "
        f"{hours / cores:.0f} in each hour of a core; no invariant is broken"
    )
    return 0


def _report(result: Result, as_it_is: bool) -> int:
    seed = result.plan.seed
    print(f"seed {seed}: {result.problems[0]}")
    if not as_it_is:
        result = shrink(result, print)
        print(result.text)
    print(f"{result.plan.setting}")
    faults = " ".join(f"--fault '{fault}'" for fault in result.plan.faults)
    print(
        f"broken: {result.problems[0]}\nreplay: python -m tests.simulation --seed {seed} {faults}"
    )
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
