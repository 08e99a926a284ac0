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
import subprocess
import sys
import time

REQUIREMENTS = ("torch", "numpy", "safetensors", "fsspec", "xxhash", "hjson", "tenacity")
LIMIT_S = 120.0
"""Of one check."""
TOTAL_S = 290.0
"""Of all of them."""
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
    """Each check in a process of its own; how many have failed."""
    import torch

    from tests.gpu.checks import CHECKS

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
    failed, end = 0, time.monotonic() + TOTAL_S * slower
    for name in names or CHECKS:
        begun = time.monotonic()
        limit_s = max(1.0, min(LIMIT_S * slower, end - begun))
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "tests.gpu", "--one", name],
                env=environ,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            verdict, told = "FAILED", f"no end within {limit_s:.0f} s"
        else:
            lines = (ended.stdout.strip() or ended.stderr.strip()).splitlines()
            verdict = {0: "ok", SKIPPED: "skipped"}.get(ended.returncode, "FAILED")
            told = lines[-1] if lines else ""
            if verdict == "FAILED":
                told = f"exit {ended.returncode}\n{(ended.stdout + ended.stderr)[-3000:]}"
        failed += verdict == "FAILED"
        took_s = time.monotonic() - begun
        print(f"{verdict:<8}{took_s:6.1f} s  {name.replace('_', ' ')}: {told}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
