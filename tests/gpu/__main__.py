"""Check on this machine's GPU what no CPU can show.

    make gpu-test
    PYTHONPATH=.:engine:orchestrator python3 -m tests.gpu [NAME ...]

Needs the repository, a torch with CUDA, and what `requirements` names; no network, no agent. Each
check is a process with a deadline: a crash or a hang of one is told, and the others run. On a
machine without a device the checks that need one are skipped, and the others run on the CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

REQUIREMENTS = ("torch", "numpy", "safetensors", "fsspec", "msgspec", "xxhash", "hjson", "tenacity")
LIMIT_S = 120.0
"""Of one check."""
TOTAL_S = 290.0
"""Of all of them."""
LEAST_S = 15.0
"""Without so much left a check is not begun: a process takes half of it to import torch."""
SKIPPED = 77


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description="Check on a GPU what no CPU can show."
    )
    parser.add_argument("names", nargs="*", help="checks to run; all of them by default")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if missing := [name for name in REQUIREMENTS if importlib.util.find_spec(name) is None]:
        print(f"not installed: {', '.join(missing)}; pip install {' '.join(missing)}")
        return 2
    if args.rank:
        from tests.gpu.checks import run_rank

        run_rank(args.rank)
        return 0
    if args.one:
        return run_one(args.one)
    return run_all(args.names)


def run_one(name: str) -> int:
    """One check, in this process."""
    from tests.gpu.checks import CHECKS, NoDeviceError

    try:
        print(CHECKS[name]())
    except NoDeviceError:
        print("there is no GPU")
        return SKIPPED
    return 0


def run_all(names: list[str]) -> int:
    """Each check in a process of its own; how many have failed, or were not run."""
    import torch

    from tests.gpu.checks import CHECKS, TIMED

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU: on the CPU"
    print(f"torch {torch.__version__}, {device}", flush=True)
    if unknown := [name for name in names if name not in CHECKS]:
        print(f"no such check: {', '.join(unknown)}; there are {', '.join(CHECKS)}")
        return 2
    # What makes kernels repeatable; `docs/gpu.md` says what it costs.
    environ = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    slower = 1
    if not torch.cuda.is_available():
        environ["OMP_NUM_THREADS"], slower = "1", 10
    end = time.monotonic() + TOTAL_S * slower

    def verdict(name: str) -> bool:
        """Run one, print what it says; whether it has failed."""
        begun = time.monotonic()
        limit_s = min(LIMIT_S * slower, end - begun)
        if limit_s < LEAST_S:
            print(f"NOT RUN: time is over; python -m tests.gpu {name}", flush=True)
            return True
        command = [sys.executable, "-m", "tests.gpu", "--one", name]
        code, out, err = run_limited(command, environ, limit_s)
        lines = (out.strip() or err.strip()).splitlines()
        said = "FAILED" if code is None else {0: "ok", SKIPPED: "skipped"}.get(code, "FAILED")
        told = lines[-1] if lines else ""
        if said == "FAILED":
            how = f"no end within {limit_s:.0f} s" if code is None else f"exit {code}"
            told = f"{how}\n{(out + err)[-3000:]}"
        took_s = time.monotonic() - begun
        print(f"{said:<8}{took_s:6.1f} s  {name.replace('_', ' ')}: {told}", flush=True)
        return said == "FAILED"

    # Most of the time of a check is that of one CPU. Those that look at a clock run alone.
    asked = names or list(CHECKS)
    together = [name for name in asked if name not in TIMED]
    with ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 4))) as pool:
        failed = sum(pool.map(verdict, together))
    return failed + sum(verdict(name) for name in asked if name in TIMED)


def run_limited(
    command: Sequence[str], environ: Mapping[str, str], limit_s: float
) -> tuple[int | None, str, str]:
    """The exit code of a process, None at its limit, and what it has printed.

    Nothing that it has started is left: it would use the device beside the next check.
    """
    with subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            out, err = running.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            return None, *running.communicate()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
        return running.returncode, out, err


if __name__ == "__main__":
    sys.exit(main())
