"""A module of the tests as a process of its own, with its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]


def run_module(
    name: str,
    given: Any = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> Any:
    """Run `python -m name` to its end, which must be exit code 0.

    Args:
        name: The module.
        given: Its standard input, as JSON.
        environment: Variables beside those of this process.
        timeout_s: The most that it may take.

    Returns:
        The last line of its standard output, which must be JSON.
    """
    run = subprocess.run(
        [sys.executable, "-m", name],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=_ROOT,
    )
    assert run.returncode == 0, f"{name}: exit {run.returncode}\n{run.stderr}"
    return json.loads(run.stdout.splitlines()[-1])
