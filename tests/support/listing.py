"""What happens to a directory just before it is listed, as another process might do it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

_waiting: dict[str, Callable[[], object]] = {}


def before_listing(directory: object, action: Callable[[], object]) -> None:
    """Do something once, when this process next lists a directory, before it does."""
    if not _waiting:
        sys.addaudithook(_audit)
    _waiting[str(directory)] = action


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event in {"os.scandir", "os.listdir"} and isinstance(arguments[0], str | os.PathLike):
        action = _waiting.pop(os.fspath(arguments[0]), None)
        if action is not None:
            action()
