"""`python -m zero_deepspeed.as_deepspeed SCRIPT ...`, or `-m MODULE ...`: runs it unchanged."""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import zero_deepspeed.as_deepspeed  # noqa: F401 - its import installs the finder
from zero_contract.errors import UsageExit


def main() -> None:
    """Run the script or module that the arguments name."""
    match sys.argv[1:]:
        case ["-m", module, *rest]:
            sys.argv, sys.path[0] = [module, *rest], os.getcwd()
            if find_spec(module.partition(".")[0]) is None:
                raise UsageExit(f"zero_deepspeed.as_deepspeed: {module}: there is no such module")
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *rest] if not script.startswith("-"):
            if not Path(script).exists():
                raise UsageExit(f"zero_deepspeed.as_deepspeed: {script}: there is no such script")
            sys.argv, sys.path[0] = [script, *rest], str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
        case _:
            raise UsageExit(
                "usage: python -m zero_deepspeed.as_deepspeed [-m MODULE | SCRIPT] ARGUMENTS"
            )


if __name__ == "__main__":
    main()
