"""What training costs on one GPU: beside plain torch, deterministic, saved, offloaded, profiled.

    python benchmarks/gpu.py                       # at most 10 minutes, one GPU, no network
    python benchmarks/gpu.py --section overhead
    CUDA_VISIBLE_DEVICES= python benchmarks/gpu.py --small     # on the CPU: does the script run?

Each section is a process with a deadline (`gpu_sections.py`). Systems take turns within each round
of their section, and the hardware's limits are measured in the same run. Every line is printed as
it is known, and all of them are appended to --out as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS_S = {
    "overhead": 140,
    "determinism": 150,
    "processes": 120,
    "saves": 70,
    "offload": 80,
    "profile": 40,
}
"""Sections, in the order of what is most worth knowing, and what each may take."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--section", action="append", choices=LIMITS_S, help="only these")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--out", type=Path, help="append the figures, as JSON lines, to this file")
    args = parser.parse_args()
    failed = 0
    for section in args.section or LIMITS_S:
        begun = time.monotonic()
        print(f"== {section}", flush=True)
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu_sections.py"), section]
        paths = [str(ROOT / part) for part in ("engine", "orchestrator", "benchmarks")]
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONUNBUFFERED": "1",
        }
        with subprocess.Popen(
            command + ["--small"] * args.small,
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as running:
            limit_s = LIMITS_S[section] * (10 if args.small else 1)
            code = show(running, section, args.out, begun + limit_s)
        failed += code != 0
        print(f"   {time.monotonic() - begun:.0f} s{f', FAILED: exit {code}' if code else ''}")
    return failed


def show(running: subprocess.Popen[str], section: str, out: Path | None, deadline: float) -> int:
    """Print the lines of a section as they come, until it ends or its time is over.

    No process that it has started is left: it would use the device beside the next section.
    """
    killer = threading.Timer(deadline - time.monotonic(), kill, [running])
    killer.start()
    try:
        return _show(running, section, out)
    finally:
        killer.cancel()
        kill(running)


def kill(section: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(section.pid, signal.SIGKILL)


def _show(running: subprocess.Popen[str], section: str, out: Path | None) -> int:
    assert running.stdout is not None
    for line in running.stdout:
        try:
            figures = json.loads(line)
        except ValueError:
            print(f"   {line.rstrip()}", flush=True)
            continue
        print("   " + "  ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
        if out is not None:
            with out.open("a") as file:
                print(json.dumps({"section": section, **figures}), file=file)
    return running.wait()


if __name__ == "__main__":
    sys.exit(main())
