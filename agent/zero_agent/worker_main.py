"""A worker from its fork to its end: becomes the user's program, as `python script.py` would.

An exception that nobody catches is written to the worker's error file, in torchelastic's
format, and not printed: the agent shows the one that was the root cause, once, at the end.
A function decorated with torchelastic's `@record` writes the same file by itself.

Source of the format: torch.distributed.elastic.multiprocessing.errors.ErrorHandler.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import runpy
import sys
import threading
import time
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the user asked to run."""

    target: str
    """A script's path, or a module's name."""
    is_module: bool
    arguments: list[str]
    cold: bool = False
    """Start a fresh interpreter instead of going on in the forked one."""


def run(program: Program) -> NoReturn:
    """Become the program: the process ends when it does, with its exit code."""
    if program.cold:
        option = ["-m"] if program.is_module else []
        command = [sys.executable, "-u", *option, program.target, *program.arguments]
        os.execv(sys.executable, command)
    faulthandler.enable()
    _refresh_seeds()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [program.target, *program.arguments]
    try:
        _execute(program)
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except Exception as error:
        write_error_file(error)
        code = 1
    _end(code)


def _exit_code(end: SystemExit) -> int:
    """As the interpreter: a message is printed and means 1."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _end(code: int) -> NoReturn:
    """End as an interpreter does, without taking thousands of modules apart first.

    That would take half a second of CPU per worker, in every restart. Threads are joined,
    `atexit` functions run and streams are flushed, as multiprocessing does in its children.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _execute(program: Program) -> None:
    # The first entry is the nursery's idea of a program's directory; put the user's there.
    if program.is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(program.target).resolve().parent)
    runpy.run_path(program.target, run_name="__main__")


def _refresh_seeds() -> None:
    """Give this worker its own randomness: the libraries were imported before the fork."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def write_error_file(error: Exception) -> None:
    """Leave the traceback for the agent, without the frames that are ours."""
    path = os.environ.get(ENV_ERROR_FILE)
    text = "".join(traceback.format_exception(error.with_traceback(_users_frames(error))))
    if path is None or Path(path).exists():
        if path is None:
            sys.stderr.write(text)
        return
    facts = {"py_callstack": text, "timestamp": str(int(time.time()))}
    record = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": facts}}
    Path(path).write_text(json.dumps(record), encoding="utf-8")


def _users_frames(error: Exception) -> types.TracebackType | None:
    frame = error.__traceback__
    ours = (__file__, runpy.run_path.__code__.co_filename)
    while frame is not None and frame.tb_frame.f_code.co_filename in ours:
        frame = frame.tb_next
    return frame or error.__traceback__
