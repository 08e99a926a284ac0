"""The variables that `zero-ctl launch` exports to the hosts.

These are the variables with the prefixes that DeepSpeed's launcher exports, and those in the files
`.deepspeed_env` and `.zero_env` of the home and of the working directory, one `NAME=VALUE` a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from zero_orchestrator.errors import SpecError
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN

PREFIXES = ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW", "GLOO", "TORCH_", "OMP_", ENV_JOIN_TOKEN)
FILES = (".deepspeed_env", ".zero_env")
ENV_FILE_NAME = "DS_ENV_FILE"
"""DeepSpeed's variable for another file than `.deepspeed_env`."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LINE = re.compile(rf"(?:export\s+)?(?P<name>{_NAME.pattern})=(?P<value>.*)", re.DOTALL)


def exported(environ: Mapping[str, str], directories: Iterable[Path]) -> dict[str, str]:
    """The variables for the hosts; later directories win over earlier ones, files over prefixes.

    Raises:
        SpecError: A file cannot be read, or has a line that is no assignment.
    """
    found = {
        name: value
        for name, value in environ.items()
        if name.startswith(PREFIXES) and _NAME.fullmatch(name)  # a shell can export no other
    }
    # Its file wins over all others, and must be there: the user has named it.
    named = environ.get(ENV_FILE_NAME)
    for directory in directories:
        for name in FILES:
            found |= _read(directory / name)
    return found | (_read(Path(named).expanduser(), must_exist=True) if named else {})


def _read(path: Path, *, must_exist: bool = False) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        if must_exist:
            raise SpecError(f"{ENV_FILE_NAME}={path}: there is no such file") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from error
    return parse_assignments(lines, str(path))


def parse_assignments(lines: Iterable[str], where: str) -> dict[str, str]:
    """Parse `NAME=VALUE` lines; blank lines and lines that begin with `#` are skipped.

    Raises:
        SpecError: A line is no assignment; `where` names the file.
    """
    found = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise SpecError(f"{where}:{number}: {text!r}: write NAME=VALUE")
        value = match["value"].strip()
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
        found[match["name"]] = value[1:-1] if quoted else value
    return found
