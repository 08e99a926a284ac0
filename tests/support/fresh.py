"""A module of the tests as a process of its own: a new interpreter, or a fork."""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.world import forkserver

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


def run_forked(
    name: str, *arguments: object, cwd: Path = _ROOT, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `python -m name` in a process that begins with torch imported, which takes seconds.

    Args:
        name: The module.
        arguments: Its command line.
        cwd: Where it runs.
        timeout_s: The most that it may take.
    """
    command = [name, *map(str, arguments)]
    with tempfile.NamedTemporaryFile("w+") as out, tempfile.NamedTemporaryFile("w+") as err:
        process = forkserver().Process(target=_be_main, args=(command, cwd, out.name, err.name))
        process.start()
        process.join(timeout_s)
        process.kill()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(command, process.exitcode, out.read(), err.read())


def _be_main(command: Sequence[str], cwd: Path, out: str, err: str) -> None:
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(cwd)
    gc.freeze()  # as each rank of a `WorldPool`
    gc.enable()
    sys.argv[1:] = command[1:]
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
