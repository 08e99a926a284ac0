"""The example, with data on slow storage as long as a file `slow` lies beside the checkpoints.

A test can so change the cluster while a short job runs, and then let it finish at full speed.
Nothing but the time depends on it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

# Mounted as the example itself, so the real one is found from the engine beside it.
import zero_deepspeed

sys.path.insert(0, str(Path(zero_deepspeed.__file__).resolve().parents[2] / "examples"))

import train_gpt

SLOW = Path("/checkpoints/slow")
READ_S = 0.05

_read = train_gpt.Text.__getitem__


def _read_slowly(text: train_gpt.Text, index: int) -> object:
    if SLOW.exists():
        time.sleep(READ_S)
    return _read(text, index)


if __name__ == "__main__":
    train_gpt.Text.__getitem__ = _read_slowly
    train_gpt.main()
