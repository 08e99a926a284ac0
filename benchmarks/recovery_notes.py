"""What the scripts with state of `recovery.py` note: each step that they have finished."""

import os
import time
from pathlib import Path


class Notes:
    """A new file for each round of a worker; its name ends in the rank there."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._round = directory, ""

    def finish(self, step: int, world: int) -> None:
        """Note `time step world`."""
        if self._round != os.environ["ZERO_ROUND"]:
            self._round = os.environ["ZERO_ROUND"]
            name = f"{time.time_ns()}-{os.getpid()}-{os.environ['RANK']}"
            self._file = (self._directory / name).open("a", buffering=1)
        self._file.write(f"{time.time()} {step} {world}\n")
