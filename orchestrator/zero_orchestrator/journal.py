"""The story of a job: one line for every decision and every fault, with its reason.

Each event is a sentence for people on the log and, when a file is given, a JSON object for
tools, so that a recovery can be timed afterwards. Events of several nodes are told apart by
`node` and put in order by `round`; `time` is this node's wall clock, for people only.

A journal must never stop a job: a full disk or a closed terminal costs the line, not the run.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

log = logging.getLogger("zero")


class Journal:
    """Writes events to the log and to `path`, appending; safe to share between threads."""

    def __init__(self, node: str, path: Path | None = None) -> None:
        self._node = node
        self._path = path
        self._broken = False
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def tell(self, event: str, sentence: str, *, level: int = logging.INFO, **facts: Any) -> None:
        """Record `event` (a short name for tools) with its sentence and machine-readable facts."""
        log.log(level, "%s", sentence)
        record = {"time": time.time(), "node": self._node, "event": event, "text": sentence}
        self._append(json.dumps({**record, **facts}) + "\n")

    def _append(self, line: str) -> None:
        if self._path is None or self._broken:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            self._broken = True
            log.warning("the journal %s cannot be written (%s); it ends here", self._path, error)
