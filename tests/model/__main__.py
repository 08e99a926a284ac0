"""Search deeper than a test has time for.

python -m tests.model --nodes 3 --rounds 3 --faults 1
"""

from __future__ import annotations

import argparse
import time

from tests.model.search import explore
from tests.model.walks import walk
from tests.model.world import begin
from zero_orchestrator.membership.spec import JobSpec


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.model",
        description="Visit every world that a small job can get into, and check the invariants.",
    )
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--at-least", type=int, default=1, help="nodes that a round needs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", type=int, default=1)
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--commits", type=int, default=0, help="checkpoints that are published")
    parser.add_argument("--drains", type=int, default=0, help="nodes that are told to leave")
    parser.add_argument("--sticks", type=int, default=0, help="workers that cannot be killed")
    parser.add_argument("--late", action="store_true", help="all that only after a node is done")
    parser.add_argument("--breaks", type=int, default=0, help="links that break")
    parser.add_argument("--parks", action="store_true", help="who leaves may wait in its process")
    parser.add_argument("--warms", action="store_true", help="who comes may warm up first")
    parser.add_argument("--walk", type=int, help="so many random events instead of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="store_true", help="a user may ask for a stop")
    args = parser.parse_args()
    if args.walk:
        print(f"{walk(args.nodes, args.walk, args.seed)} rounds, no invariant broken")
        return
    spec = JobSpec(min_nodes=args.at_least, max_nodes=args.nodes, max_restarts=args.restarts)
    requests = {
        "may_stop": args.stop,
        "commits": args.commits,
        "drains": args.drains,
        "sticks": args.sticks,
        "late": args.late,
        "breaks": args.breaks,
        "parks": args.parks,
        "warms": args.warms,
    }
    world = begin(spec, args.nodes, args.faults, **requests)
    began = time.process_time()
    count = explore(world, args.rounds)
    print(f"{count:,} worlds, no invariant broken, {time.process_time() - began:.0f} s")


if __name__ == "__main__":
    main()
