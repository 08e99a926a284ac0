"""The console scripts from their first instant: what they may rely on, and that Ctrl-C ends them.

This module imports next to nothing, and knows the programs by name alone. They have all three
standard streams, which take any text.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import NoReturn

from zero_contract.exit_codes import CRASHED
from zero_contract.extras import remedy


def agent() -> NoReturn:
    """`zero-agent`."""
    run("zero_agent.command.cli")


def ckpt() -> NoReturn:
    """`zero-ckpt`. A TAB is answered by its parser alone, without torch, which takes seconds."""
    if "_ARGCOMPLETE" in os.environ:
        # Its modules can then be imported without what its __init__ imports.
        if (spec := find_spec("zero_checkpoint")) is not None:
            sys.modules["zero_checkpoint"] = module_from_spec(spec)
        run("zero_checkpoint.tools.parser")
    run("zero_checkpoint.tools.cli")


def ctl() -> NoReturn:
    """`zero-ctl`."""
    run("zero_orchestrator.ctl.cli")


def run(module: str) -> NoReturn:
    """Import a module, and end with what its `main` returns."""
    # What the caller has closed (`>&-`) leads nowhere. Its number would else be that of the first
    # file to be opened, and what a library prints would be written there; and Python has no stream
    # in its place.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.dup2(descriptor, number)
            if descriptor > number:
                os.close(descriptor)
            os.set_inheritable(number, True)  # a program that is started has streams as well
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    # What a terminal cannot show (the name of a file that is not UTF-8, a table in a locale of 8
    # bits) is shown as Python writes it: one such character in a job would end every look at it.
    # In the C locale it takes what stands for a byte, and no other half of a character.
    if sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        with _killed_by_interrupt():
            gc.disable()  # no garbage comes of imports, and collections take a tenth of torch's
            main = import_module(module).main
            gc.freeze()
            gc.enable()
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        # A code of its own: Python's 1 would say that a job has failed.
        if isinstance(error, ModuleNotFoundError) and not f"{error.name}".startswith("zero_"):
            print(remedy(str(error.name)), file=sys.stderr)
            sys.exit(CRASHED)
        with contextlib.suppress(OSError):  # a full disk behind stderr
            sys.excepthook(type(error), error, error.__traceback__)  # imports nothing
            print(f"internal error in {module}; no verdict on any job", file=sys.stderr)
        sys.exit(CRASHED)


@contextlib.contextmanager
def _killed_by_interrupt() -> Iterator[None]:
    """SIGINT kills; where it is ignored, as in the background of a script, it stays ignored."""
    # Imports take seconds, above all torch's, and Python would answer a Ctrl-C in them with a
    # traceback through other people's modules. Who starts this process may have blocked SIGINT.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Unblocked last: what was pressed before ends the process now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
