"""Runs a peer's suite in processes of its own, until every case has an outcome."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from tests.peers.cases import Case, Outcome, judge
from tests.peers.suites import Suite

_ROOT = Path(__file__).parents[2]
_INSIDE = Path(__file__).parent / "inside"
_AT_ONCE = 40
"""Cases of one process."""
_PYTEST = (
    *("-m", "pytest", "-q", "-p", "peer_results", "-p", "no:cacheprovider", "-W", "ignore"),
    "--continue-on-collection-errors",  # else the others of its process have no outcome
)


def collect(suite: Suite, peers: Path) -> list[str]:
    """All cases of the suite, and the files that have none."""
    lines = _lines(suite, peers, ["--collect-only", *suite.files], names=None)
    names = [line["case"] for line in lines if line["outcome"] == "collected"]
    files = {name.partition("::")[0] for name in names}
    return [*names, *(f for f in suite.files if f not in files)]


def sample(names: Iterable[str], most: int) -> list[str]:
    """Of each test so many cases, evenly spread; what fits into a given time is a sample, too."""
    chosen = []
    for _, group in groupby(names, lambda name: name.partition("[")[0]):
        cases = list(group)
        count = min(most, len(cases))
        chosen += [cases[index * len(cases) // count] for index in range(count)]
    random.Random(0).shuffle(chosen)
    return chosen


def run(
    suite: Suite, peers: Path, names: Sequence[str], log: Path | None, minutes: float
) -> dict[str, Case]:
    """Run cases, so many at a time; a process that ends in the middle is followed by another.

    Args:
        suite: The peer's.
        peers: The folder of all peers.
        names: The cases.
        log: A file to which errors are added.
        minutes: No process is started after this time.
    """
    found: dict[str, Case] = {}
    end_s = time.monotonic() + 60 * minutes
    for begin in range(0, len(names), _AT_ONCE):
        chunk = names[begin : begin + _AT_ONCE]
        while (rest := [n for n in chunk if n not in found]) and time.monotonic() < end_s:
            lines = _lines(suite, peers, sorted({name.partition("::")[0] for name in rest}), rest)
            _write_errors(lines, log)
            ended = _judged(rest, lines)
            for name in rest if not ended else ():  # nothing began
                ended[name] = judge(name, "failed", lines[-1]["text"] if lines else "no result")
            found |= ended
        print(f"{suite.name}: {len(found)} of {len(names)}", file=sys.stderr, flush=True)
    return {name: case for name, case in found.items() if case.outcome is not Outcome.ABSENT}


def _write_errors(lines: Sequence[dict[str, str]], log: Path | None) -> None:
    if log is not None:
        with log.open("a") as out:
            out.writelines(
                f"==== {line['case']}: {line['outcome']}\n{line['text']}\n"
                for line in lines
                if line["outcome"] in ("failed", "not collected")
            )


_OF_ANOTHER = "assert not self._finalizers"
"""In pytest's own code: a fixture has failed in another case of its process. It runs again."""


def _judged(names: Sequence[str], lines: Sequence[dict[str, str]]) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for line in lines:  # the end of a case overrides its beginning, and an error after it both
        if _OF_ANOTHER in line["text"]:
            cases.pop(line["case"], None)
        elif line["case"] in names:
            cases[line["case"]] = judge(line["case"], line["outcome"], line["text"])
    return cases


def _lines(
    suite: Suite, peers: Path, arguments: Sequence[str], names: Sequence[str] | None
) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        asked = {}
        if names is not None:
            cases = Path(folder) / "cases"
            cases.write_text("\n".join(names))
            asked = {"PEER_CASES": str(cases)}
        output = _pytest(suite, peers, arguments, asked | {"PEER_RESULTS": str(results)})
        if not results.exists():
            return [{"case": "", "outcome": "failed", "text": output[-4000:]}]
        return [json.loads(line) for line in results.read_text().splitlines()]


def _pytest(
    suite: Suite, peers: Path, arguments: Sequence[str], variables: Mapping[str, str]
) -> str:
    ours = [_ROOT / "engine", _ROOT / "orchestrator", _ROOT / "agent", _INSIDE]
    theirs = [peers / path for path in (*suite.packages, "site")]
    packages = [*ours, *theirs, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **suite.environment,
        **variables,
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with subprocess.Popen(
        [sys.executable, *_PYTEST, *suite.arguments, *arguments],
        cwd=peers / suite.folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        reader = threading.Thread(target=lambda: output.extend(process.stdout or ()))
        output: list[str] = []
        reader.start()
        process.wait()
        with suppress(ProcessLookupError):  # what a case has left running
            os.killpg(process.pid, signal.SIGKILL)
        reader.join()
    return "".join(output)
