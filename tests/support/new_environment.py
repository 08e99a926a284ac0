"""Python environments of their own, into which a test installs packages from the index.

They are made once for each list of packages and stay for the session. Where no index answers, the
test that asks for one is skipped.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


def pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`pip` of an environment, to its end."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


@functools.cache
def python_with(*packages: str, base: str = sys.executable) -> Path:
    """The Python of a new environment that has these packages, and what they need."""
    where = Path(tempfile.mkdtemp(prefix="zero-tests-environment-"))
    subprocess.run([base, "-m", "venv", str(where)], check=True, capture_output=True)
    python = where / "bin" / "python"
    done = pip(python, "install", "--quiet", *packages)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip(f"no package index that has {', '.join(packages)}: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    return python
