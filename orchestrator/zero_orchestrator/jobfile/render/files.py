"""Files: those of deploy/, from which all is rendered, so there is one truth; and what is rendered.

Those of deploy/ travel with the package. Who calls it: the renderers, and `command`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zero_orchestrator.errors import SpecError

DEPLOY = (Path(__file__).parents[1] / "deploy").resolve()
"""In a checkout a link to deploy/ at its top."""
KUBERNETES = DEPLOY / "kubernetes"
PRIVATE = "etc/zero-elastic"
"""Below it are files for root alone: systemd reads them, and a variable may be a password."""


def read(name: str) -> str:
    """The text of one of them."""
    return (DEPLOY / name).read_text(encoding="utf-8")


def shown(files: Mapping[str, str]) -> str:
    """The files as one text; if they are several, each below its name."""
    if len(files) == 1:
        return "".join(files.values())
    return "\n".join(f"# ---- {name}\n{text}" for name, text in files.items())


def write(files: Mapping[str, str], directory: Path) -> list[Path]:
    """Write the files below a directory.

    Raises:
        SpecError: They cannot be written there.
    """
    written = []
    for name, text in files.items():
        path = directory / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.startswith(PRIVATE):
                path.touch(mode=0o600)
                path.chmod(0o600)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise SpecError(f"--output={directory}: {path}: {error.strerror}") from error
        written.append(path)
    return written
