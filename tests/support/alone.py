"""A fresh interpreter that has torch and some packages of ours, and none of the others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = {
    package.parent.name: package.parent
    for folder in ("orchestrator", "agent", "engine")
    for package in (ROOT / folder).glob("*/__init__.py")
}

_ENTRY = """\
import importlib.util, sys
sys.path[:0] = [{place!r}]
sys.path += {installed!r}
found = [name for name in {absent!r} if importlib.util.find_spec(name)]
assert not found, f"can be imported: {{found}}"
"""


def holds_ours(path: Path) -> bool:
    """Whether one of our packages can be imported from a directory."""
    return any((path / name).is_dir() for name in OURS)


def run_alone(place: Path, packages: tuple[str, ...], script: str) -> str:
    """What a script prints that can import `packages` of ours alone, copied to `place`.

    Raises:
        AssertionError: It failed; the message is what it said.
    """
    for name in packages:
        shutil.copytree(OURS[name], place / name)
    installed = [path for path in sys.path if path and not holds_ours(Path(path))]
    absent = sorted(OURS.keys() - set(packages))
    entry = _ENTRY.format(place=str(place), installed=installed, absent=absent)
    # Isolated, and without `site`, which would add what is installed for editing: our own tree.
    command = [sys.executable, "-I", "-S", "-W", "error", "-c", entry + script]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, cwd=place
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
