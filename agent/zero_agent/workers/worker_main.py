"""A worker from its fork to its end: becomes the user's program, as `python script.py` would.

An uncaught exception is written to the worker's error file, in torchelastic's format, and not
printed: the agent shows the root cause once, at the end of the job.

Source of the format: torch.distributed.elastic.multiprocessing.errors.ErrorHandler.
"""

from __future__ import annotations

import argparse
import atexit
import bz2
import contextlib
import faulthandler
import gc
import gzip
import io
import json
import lzma
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self

from zero_contract.errors import ConfigError, UsageExit
from zero_contract.worker import ExitCode

ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
PERMANENT = (ConfigError, SyntaxError)
"""Errors that a restart would meet again."""
ARGPARSE_REFUSAL = 2
"""The exit code with which argparse refuses arguments."""
STACKS_SIGNAL = signal.SIGRTMIN + 7
"""On this signal a worker writes the stacks of all its threads beside its error file, and
continues."""
FINISHED_IN_TURN: tuple[tuple[Callable[[Any], object], tuple[type, ...]], ...] = (
    (lambda file: file.flush(), (io.TextIOWrapper,)),
    (lambda file: file.close(), (gzip.GzipFile, bz2.BZ2File, lzma.LZMAFile)),  # writes a trailer
    (lambda file: file.flush(), (io.BufferedWriter, io.BufferedRandom)),
)
"""Text is written to compressors, and those to buffers. Readers may be in use by a thread."""
_LEFT: list[object] = []
"""The variables that the program leaves behind: never freed, see `end_process`."""


class _Main(runpy._TempModule):
    """The module of the program, which stays `__main__`: runpy would put the forkserver's back."""

    def __enter__(self) -> Self:
        # For the outermost one alone: a script may use `runpy` itself.
        vars(runpy)["_TempModule"] = _Main.__base__
        return super().__enter__()

    # Threads that go on, and functions of `atexit`, look up names in `__main__`, as does pickle.
    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program that the user asked to run."""

    target: str
    """A script's path, or a module's name."""
    is_module: bool
    arguments: list[str]
    command: list[str] = field(default_factory=list)
    """Execute this command instead of running in the forked interpreter."""


def run(program: Program) -> NoReturn:
    """Become the program: the process ends when it does, with its exit code."""
    if program.command:
        _replace(program.command)
    # A crash in native code leaves the Python stacks on stderr: such an end has no exception.
    faulthandler.enable()
    # Its stacks come even from an interpreter that is stuck in a call of a library.
    if path := os.environ.get(ENV_ERROR_FILE):
        with contextlib.suppress(OSError):  # a disk that is full or read-only costs the stacks
            stacks_file(path).write_text("")
            # It stays open, because the handler can open no file. The agent empties it meanwhile.
            file = stacks_file(path).open("a")
            faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    # numpy was imported before the fork: give this worker its own randomness. Python's `random`
    # draws anew after a fork by itself, and torch begins with the same seed in every process.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    # Into a pipe Python writes whole blocks: the last lines of a killed worker would be lost.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [program.target, *program.arguments]
    vars(runpy)["_TempModule"] = _Main
    try:
        # The first entry of sys.path is the forkserver's; a program expects its own directory.
        if program.is_module:
            sys.path[0] = os.getcwd()
            _LEFT.append(runpy.run_module(program.target, run_name="__main__", alter_sys=True))
        else:
            sys.path[0] = str(Path(program.target).resolve().parent)
            _LEFT.append(runpy.run_path(program.target, run_name="__main__"))
        code = 0
    except SystemExit as end:
        _LEFT.append(end)
        code = _code_of(end)
    except KeyboardInterrupt as interrupt:
        _LEFT.append(interrupt)
        traceback.print_exception(interrupt.with_traceback(_users_frames(interrupt)))
        code = 128 + signal.SIGINT
    except BaseException as error:  # asyncio's CancelledError is no Exception
        _LEFT.append(error)
        write_error_file(error)
        code = 1
    end_process(code)


def _code_of(end: SystemExit) -> int:
    """The exit code that a program has asked for; its reason is written to the error file."""
    if end.code is None or isinstance(end.code, int):
        # The engine ends a worker with this code from the error that says which peer, and why.
        if end.code == ExitCode.PEER_LOST and end.__cause__ is not None:
            write_error(f"{type(end.__cause__).__name__}: {end.__cause__}")
        if end.code == ARGPARSE_REFUSAL and (trace := end.__traceback__) is not None:
            while trace.tb_next is not None:
                trace = trace.tb_next
            # Any program may exit with this code: argparse is known by the method that has raised.
            parser = trace.tb_frame.f_locals.get("self")
            if isinstance(parser, argparse.ArgumentParser) and parser.prog:
                write_error(f"{parser.prog} refused its arguments", permanent=True)
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)  # as the interpreter: a message is printed, and means 1
    write_error(str(end.code), permanent=isinstance(end, UsageExit))
    return 1


def _replace(command: list[str]) -> NoReturn:
    """Execute another program in this process; exit codes of failures as the shell's."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be executed: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def end_process(code: int) -> NoReturn:
    """End as an interpreter does (threads, `atexit`, open files), but take no module apart."""
    # To take the modules apart costs half a second of CPU per worker, in every restart, and could
    # wait without end: a DDP model freed with the GIL held joins gloo's thread, which may be
    # waiting for the GIL.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # Flush the files that the program left open, as if they had been freed. Only objects younger
    # than the fork are looked at: the forkserver has frozen the others.
    files = [item for item in gc.get_objects() if issubclass(type(item), io.IOBase)]
    for finish, kinds in FINISHED_IN_TURN:
        for file in files:
            if isinstance(file, kinds):
                with contextlib.suppress(Exception):  # as in a destructor
                    finish(file)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have put anything in its place
            stream.flush()
    os._exit(code)


def stacks_file(error_file: str) -> Path:
    """The path at which a worker with this error file writes its stacks."""
    return Path(error_file).with_name("stacks.txt")


def write_error_file(error: BaseException) -> None:
    """Write an exception to the error file, without this package's frames in its traceback."""
    text = "".join(traceback.format_exception(error.with_traceback(_users_frames(error))))
    if ENV_ERROR_FILE not in os.environ:
        sys.stderr.write(text)
    # As the last line of a traceback has it: an exception may not say what it is.
    try:
        said = str(error)
    except Exception:
        said = "<exception str() failed>"
    permanent = isinstance(error, PERMANENT)
    write_error(f"{type(error).__name__}: {said}", text, permanent=permanent)


def write_error(message: str, text: str = "", *, permanent: bool = False) -> None:
    """Write the error file, unless there is one; a restart would meet a `permanent` error again."""
    path = os.environ.get(ENV_ERROR_FILE)
    # A function decorated with torchelastic's `@record` has written the file itself.
    if path is None or os.path.exists(path):
        return
    facts = {"py_callstack": text, "timestamp": str(int(time.time())), "permanent": permanent}
    record = {"message": {"message": message, "extraInfo": facts}}
    try:
        Path(path).write_text(json.dumps(record), encoding="utf-8")
    except OSError:  # a full disk: the error is told here, or nowhere
        print(text, end="", file=sys.stderr)


def _users_frames(error: BaseException) -> types.TracebackType | None:
    frame = error.__traceback__
    # The outermost ones alone: a script may use `runpy` itself.
    ours = (__file__, runpy.run_path.__code__.co_filename)
    while frame is not None and frame.tb_frame.f_code.co_filename in ours:
        frame = frame.tb_next
    return frame or error.__traceback__
