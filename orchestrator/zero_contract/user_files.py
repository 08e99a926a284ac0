"""Which files are the user's own: a message names the line of the script, not that of a library."""

from __future__ import annotations

import re

_LIBRARIES = re.compile(
    r"/(site|dist)-packages/|/lib/python3|<frozen|"
    r"/zero_(agent|checkpoint|comm|contract|data|deepspeed|engine|libraries|orchestrator|step|torch|torchrun)/"
)


def is_own(path: str) -> bool:
    """Whether a source file is neither of a library nor of this project."""
    return _LIBRARIES.search(path) is None
