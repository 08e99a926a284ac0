"""Run a script whose every step takes some seconds more, for tests that need it to last.

    python paced.py FILE SCRIPT ARGUMENT...

The file holds the seconds, and may be replaced at any time. How long a step takes has no influence
on what it computes: the hash stays that of the script. What the engine logs is shown, too.
"""

import logging
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

from zero_engine import Engine
from zero_engine.observe.reporting import LOGGERS


def slower(step: Callable[..., None], pause: Path) -> Callable[..., None]:
    """`Engine.step`, with a pause at each step boundary."""

    def paced(engine: Engine, *args: object) -> None:
        if engine.is_gradient_accumulation_boundary():
            time.sleep(float(pause.read_text()))
        step(engine, *args)

    return paced


HANDLER = logging.StreamHandler()
for name in LOGGERS:
    logging.getLogger(name).addHandler(HANDLER)
    logging.getLogger(name).setLevel(logging.INFO)
Engine.step = slower(Engine.step, Path(sys.argv[1]))  # type: ignore[method-assign]
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
