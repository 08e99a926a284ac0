"""Run a script one of whose processes stops for ever within a save, for a test that kills it there.

    STUCK_FROM_STEP=40 STUCK_MARKER=/tmp/marker python stuck_save.py SCRIPT ARGUMENT...

In the first save of that step or a later one this rank's file is written, and not yet durable, when
the marker appears; nothing of that save happens after it. A process without these variables, or
one that finds the marker there, saves as ever.
"""

import os
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from zero_checkpoint.files.storage import Disk


def stuck(sync: Callable[[Disk, BinaryIO], None], step: int, marker: Path) -> Callable[..., None]:
    """`Disk.sync`, which does not return once."""

    def stop(disk: Disk, file: BinaryIO) -> None:
        of_step = int(Path(file.name).parent.name.split("-")[1].split(".")[0])
        if of_step >= step and not marker.exists():
            marker.touch()
            threading.Event().wait()
        sync(disk, file)

    return stop


if marker := os.environ.get("STUCK_MARKER"):
    from_step = int(os.environ["STUCK_FROM_STEP"])
    Disk.sync = stuck(Disk.sync, from_step, Path(marker))  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
