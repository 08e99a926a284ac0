"""Templates and rendered files: every renderer starts from a file of deploy/."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zero_orchestrator.errors import SpecError

DEPLOY = (Path(__file__).parents[1] / "deploy").resolve()
"""In a checkout, a symbolic link to the directory deploy/; the wheel contains the files."""
KUBERNETES = DEPLOY / "kubernetes"
PRIVATE = "etc/zero-elastic"
"""Directory of files that only root may read: a variable may be a password."""


def read(name: str) -> str:
    """The text of a file of deploy/, by its path below deploy/."""
    return (DEPLOY / name).read_text(encoding="utf-8")


def shown(files: Mapping[str, str]) -> str:
    """The files as one text; each of several files follows a line with its name."""
    if len(files) == 1:
        return "".join(files.values())
    return "\n".join(f"# ---- {name}\n{text}" for name, text in files.items())


def write(files: Mapping[str, str], directory: Path) -> list[Path]:
    """Write the files below a directory; files below `PRIVATE` get mode 0600. Returns the paths.

    Raises:
        SpecError: A file or directory cannot be written.
    """
    written = []
    for name, text in files.items():
        path = directory / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Before there is anything in it; and again, if it was there with another mode.
            if name.startswith(PRIVATE):
                path.touch(mode=0o600)
                path.chmod(0o600)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise SpecError(f"--output={directory}: {path}: {error.strerror}") from error
        written.append(path)
    return written
