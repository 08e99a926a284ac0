"""Run the peers' own suites against this tree, under the name `deepspeed`.

python -m tests.peers DIR [--suite NAME] [--keep] [--only PART]

DIR holds a checkout of each peer (`--sources` prints where from). The cases that are run, and what
each is known to do, are in tests/peers/expected; a case that passed and does not pass any more
makes this fail, so those that passed are run. --keep runs all of them, and writes the outcomes;
--sample draws the cases anew, --others 100 so many that have no outcome yet.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.peers.cases import Case, Outcome, read, write
from tests.peers.report import lost, table
from tests.peers.run import collect, run, sample
from tests.peers.suites import SUITES, Suite

_EXPECTED = Path(__file__).parent / "expected"


def main() -> int:
    """Run the suites that are there; 1 if a case has stopped passing."""
    args = _arguments()
    if args.sources:
        print("\n".join(f"{suite.name}: {suite.source}" for suite in SUITES))
        return 0
    gone: list[Case] = []
    for suite in SUITES:
        if args.suite not in (None, suite.name):
            continue
        if not (args.peers / suite.folder).is_dir():
            print(f"{suite.name}: {args.peers / suite.folder} is missing; get {suite.source}")
            continue
        kept = _EXPECTED / f"{suite.name}.tsv"
        expected = read(kept) if kept.exists() and not args.sample else {}
        chosen = [name for name in _names(suite, args, expected) if args.only in name]
        found = run(suite, args.peers, chosen, args.log, args.minutes)
        gone += lost(expected, found)
        print(table(suite.name, found))
        if args.keep:
            write(kept, expected | found)
    for case in gone:
        print(f"does not pass any more: {case.name}\n    {case.reason}")
    return int(bool(gone))


def _names(suite: Suite, args: argparse.Namespace, expected: Mapping[str, Case]) -> list[str]:
    if expected and not args.others:
        passed = (name for name, case in expected.items() if case.outcome is Outcome.PASSED)
        return list(expected if args.keep else passed)
    names = collect(suite, args.peers)
    if not args.others:
        return sample(names, suite.per_test)
    others = [name for name in names if name not in expected]
    return random.Random(args.others).sample(others, min(args.others, len(others)))


def _folder(name: str) -> Path:
    return Path(name).resolve()  # each suite runs in a folder of its own


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("peers", type=_folder, nargs="?", default="peers", metavar="DIR")
    parser.add_argument("--suite", help="only this one")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--log", type=Path, help="a file for the errors of the cases")
    parser.add_argument("--minutes", type=float, default=600, help="start nothing after that")
    parser.add_argument(
        "--keep", action="store_true", help="run those of every outcome, and write it"
    )
    parser.add_argument("--sample", action="store_true", help="draw the cases anew")
    parser.add_argument("--others", type=int, default=0, help="so many that have no outcome yet")
    parser.add_argument("--sources", action="store_true", help="print where the peers are from")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
