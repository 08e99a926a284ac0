"""The workers' output: forwarded to this terminal, and kept in files if a flag asks for that.

Workers write into pipes that the agent reads, never to the terminal itself: when that is closed,
they continue to save and leave instead of dying of a failed print. `streams.py` decides the route
of a stream. The hub's thread never waits for a terminal or a file; a terminal or a file system that
hangs blocks no worker.
"""

from __future__ import annotations

import json
import logging
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os.path import samestat
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from zero_agent.workers.output.recent import RecentOutput
from zero_agent.workers.output.streams import Route
from zero_contract.hub import Hub
from zero_contract.writer import Writer

log = logging.getLogger("zero")

CHUNK_BYTES = 1 << 16
PAUSE_S = 0.02
"""Pause before a worker is read again whose output found the writer's queue full."""


class Sink(Protocol):
    """Receives output; never fails, and never blocks for long."""

    def write(self, data: bytes) -> None:
        """Take all of `data`."""

    def close(self) -> None:
        """End the output: no more will come."""


class _Behind:
    """Output that a writer's thread writes later."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._dropped_bytes = 0

    def write(self, data: bytes) -> None:
        """Queue all of `data`, or drop it if the queue is full."""
        # The note stands where bytes are missing: before the next output that fits.
        dropped_bytes = self._dropped_bytes
        if self.writer.put(self._write_now, _note(dropped_bytes) + data):
            self._dropped_bytes -= dropped_bytes
        else:
            self._dropped_bytes += len(data)

    def _write_now(self, data: bytes) -> None:
        raise NotImplementedError


def _note(missing_bytes: int) -> bytes:
    return f"\n[zero: {missing_bytes} bytes are missing here]\n".encode() if missing_bytes else b""


class Terminal(_Behind):
    """Standard output or standard error of the agent; once it fails, it stays silent."""

    def __init__(self, fd: int) -> None:
        super().__init__(Writer(f"zero-fd-{fd}"))
        self._fd = fd
        self._broken = False

    @property
    def has_colours(self) -> bool:
        """Whether colours are shown, and wanted (https://no-color.org)."""
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return not plain and os.isatty(self._fd)

    def close(self) -> None:
        """Do nothing: all workers share the terminal."""

    def _write_now(self, data: bytes) -> None:
        """Write all of `data`, or give up on this terminal for good."""
        while data and not self._broken:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # another process that shares it has made it non-blocking
                select.select([], [self._fd], [])
            except OSError:  # closed: the workers go on, and what they print is dropped
                self._broken = True


class File(_Behind):
    """A file that is appended to; a full disk costs the log, not the run."""

    def __init__(self, path: Path, limit_bytes: int = 0) -> None:
        """Open the file when the first bytes are written.

        With its older part, `path` with `.1`, it has at most `limit_bytes`, if that is not 0.
        """
        super().__init__(FILES)
        self._path = path
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._file: BinaryIO | None = None
        self._broken = False
        self._lost_bytes = 0
        self.writer.put(self._write_now, b"")  # the file exists even if nothing is printed

    def close(self) -> None:
        """Close the file when all output is written; safe to call twice."""
        self.writer.put(self._close_now, b"")

    def _write_now(self, data: bytes) -> None:
        """Append `data`, behind a note of what a full disk has not taken before."""
        left = _note(self._lost_bytes) + data
        try:
            # Half of the limit is for the older part, which this file becomes.
            if self._limit_bytes and self._size_bytes + len(left) > self._limit_bytes // 2:
                # Several workers append to one file of filtered lines: another may have moved it.
                moved = self._file is not None and not (
                    self._path.exists()
                    and samestat(os.fstat(self._file.fileno()), self._path.stat())
                )
                self._close_now(b"")
                self._size_bytes = 0
                if self._path.exists() and not moved:
                    self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
                self._size_bytes = self._file.tell()
            while left:  # a disk that fills up takes a part, which the number alone tells
                left = left[self._file.write(left) :]
            # With what others have appended: the position is the end of the file.
            self._size_bytes = self._file.tell()
            self._broken, self._lost_bytes = False, 0
        except OSError as error:
            self._lost_bytes += min(len(left), len(data))  # of a note, nothing is lost
            if not self._broken:
                log.warning("the output in %s ends here until it has room: %s", self._path, error)
            self._broken = True
            self._close_now(b"")

    def _close_now(self, _: bytes) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()  # it may raise: some file systems write only now


FILES = Writer("zero-files")
"""The writer of all workers' files: if the log directory hangs, it hangs as a whole."""
STDOUT, STDERR = Terminal(1), Terminal(2)


class JsonLines(logging.Formatter):
    """The agent's log as JSON, one object a line, for --log-format=json."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        """As `logging.Formatter`."""
        facts = {"time": round(record.created, 3), "node": self._node}
        text = super().format(record)  # with the traceback, if there is one
        return json.dumps({**facts, "level": record.levelname, "text": text})


class Log(logging.Handler):
    """The agent's own log lines, in order with the workers' output on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """As `logging.Handler`."""
        try:
            STDERR.write(f"{self.format(record)}\n".encode(errors="replace"))
        except Exception:
            self.handleError(record)


def flush() -> None:
    """Write all queued output, unless the terminal or the file system hangs."""
    for writer in (FILES, STDOUT.writer, STDERR.writer):
        writer.flush()


class KeptOutput:
    """Keeps the output in memory, for `zero-ctl logs`."""

    def __init__(self, recent: RecentOutput, facts: Mapping[str, Any]) -> None:
        self._recent = recent
        self._facts = facts

    def write(self, data: bytes) -> None:
        """Take whole lines."""
        if data:
            self._recent.add(self._facts, data)

    def close(self) -> None:
        """Do nothing: the output is kept."""


class Changed:
    """Passes whole lines on to another sink, changed."""

    def __init__(self, sink: Sink, change: Callable[[bytes], bytes]) -> None:
        self._sink = sink
        self._change = change

    def write(self, data: bytes) -> None:
        """Take whole lines."""
        self._sink.write(self._change(data))

    def close(self) -> None:
        """Close the sink behind this one."""
        self._sink.close()


def _as_json(facts: Mapping[str, Any], data: bytes) -> bytes:
    """Each line as a JSON object."""
    facts = {"time": round(time.time(), 3), **facts}
    # A text would be cut at U+2028 and a form feed as well.
    lines = (line.decode(errors="replace") for line in data.splitlines())
    return "".join(json.dumps({**facts, "text": line}) + "\n" for line in lines).encode()


def _prefixed(prefix: bytes, texts: Sequence[bytes], data: bytes) -> bytes:
    """Each line that contains one of some texts, with the worker's name before it."""
    lines = data.splitlines(keepends=True)
    return b"".join(prefix + line for line in lines if any(text in line for text in texts))


class Tap:
    """One stream of one worker, from its pipe to the terminal and to files."""

    def __init__(
        self, hub: Hub, terminal: Terminal, path: Path | None, limit_bytes: int = 0
    ) -> None:
        """Show the stream on `terminal`, and keep it in the file `path` if that is given."""
        self._hub = hub
        self._terminal = terminal
        self._recent: RecentOutput | None = None
        self._raw: list[Sink] = [File(path, limit_bytes)] if path is not None else []
        self._by_line: list[Sink] = [terminal]
        self._writers = (FILES, terminal.writer)
        self._rest = b""
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        hub.add(self._read_fd, self._on_readable)

    @classmethod
    def along(
        cls, hub: Hub, terminal: Terminal, route: Route, recent: RecentOutput | None = None
    ) -> Tap:
        """Make a tap that forwards its stream along a route, and keeps the last of it."""
        tap = cls(hub, terminal, route.file, route.file_limit_bytes)
        tap._recent = recent
        tap.follow(route)
        return tap

    def follow(self, route: Route) -> None:
        """Show what comes from now on as a route says; the worker's own file stays."""
        by_line: list[Sink] = [_shown(self._terminal, route)] if route.shown else []
        if self._recent is not None:
            by_line.append(KeptOutput(self._recent, route.facts))
        if route.copy is not None:
            texts = [text.encode() for text in route.filters]
            prefix, file = route.copy_prefix.encode(), File(route.copy, route.file_limit_bytes)
            by_line.append(Changed(file, partial(_prefixed, prefix, texts)))
        former, self._by_line = self._by_line, by_line  # at once: the hub's thread reads it
        for sink in former:
            sink.close()

    def started(self) -> None:
        """Close the agent's copy of the writing end, so that the end of the worker's is seen."""
        os.close(self.write_fd)

    def _on_readable(self) -> None:
        # Backpressure: a worker that prints faster than its output is written waits, as it would
        # without an agent; after a while (`Writer.should_wait`) its output is dropped instead.
        if any(writer.should_wait for writer in self._writers):
            self._hub.pause(self._read_fd, PAUSE_S)
            return
        try:
            data = os.read(self._read_fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        # All copies of the worker's end are closed. The last line may have no end.
        if not data:
            self._pass_on(self._rest)
            self._rest = b""
            for sink in (*self._raw, *self._by_line):
                sink.close()
            self._hub.remove(self._read_fd, lambda: os.close(self._read_fd))
            return
        for sink in self._raw:
            sink.write(data)
        data = self._rest + data
        # Only whole lines: those of two workers do not mix. A progress bar ends its with \r.
        whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - whole > CHUNK_BYTES:
            whole = len(data)  # no line is that long: binary data, forwarded as it comes
        self._pass_on(data[:whole])
        self._rest = data[whole:]

    def _pass_on(self, lines: bytes) -> None:
        for sink in self._by_line:
            sink.write(lines)


def _shown(terminal: Terminal, route: Route) -> Sink:
    """What shows a stream on a terminal, in the format of its route."""
    if route.as_json:
        return Changed(terminal, partial(_as_json, route.facts))
    if not route.prefix:
        return terminal
    prefix = route.prefix.encode()
    # One of six colours, from red (31) to cyan (36), so that neighbours differ.
    if terminal.has_colours:
        prefix = b"\x1b[%dm%b\x1b[0m" % (31 + route.facts.get("rank", 0) % 6, prefix)
    return Changed(terminal, partial(_prefixed, prefix, [b""]))  # in every line
