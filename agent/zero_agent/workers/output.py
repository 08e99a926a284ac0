"""What the workers print: passed on to this terminal, and kept in files when asked for.

Workers write into pipes that the agent reads, never to the terminal itself: when the terminal
is closed, the agent drops what it can no longer show, while the workers go on to save and
leave instead of dying of a failed print. `streams.py` says where a stream goes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from zero_agent.workers.hub import Hub
from zero_agent.workers.streams import Route

CHUNK_BYTES = 1 << 16


class Sink(Protocol):
    """Takes output; never fails, and never blocks for long."""

    def write(self, data: bytes) -> None:
        """Take all of `data`."""

    def close(self) -> None:
        """No more will come."""


class Terminal:
    """Standard output or standard error of the agent; once it fails, it stays silent."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._broken = False

    def write(self, data: bytes) -> None:
        """Write all of `data`, or give up on this terminal for good."""
        while data and not self._broken:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError:
                self._broken = True

    def close(self) -> None:
        """Nothing: it is every worker's."""


class File:
    """A file that is appended to; a full disk costs the log, not the run."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append, or give up on this file for good."""
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError:
            self.close()

    def close(self) -> None:
        """Close it; safe to call twice."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Prefixed:
    """Puts the worker's name before each line."""

    def __init__(self, sink: Sink, prefix: bytes) -> None:
        self._sink = sink
        self._prefix = prefix

    def write(self, data: bytes) -> None:
        """Take whole lines."""
        self._sink.write(b"".join(self._prefix + line for line in data.splitlines(keepends=True)))

    def close(self) -> None:
        """Close what is behind it."""
        self._sink.close()


class Matching:
    """Lets the lines pass that contain one of some texts."""

    def __init__(self, sink: Sink, texts: Sequence[bytes]) -> None:
        self._sink = sink
        self._texts = texts

    def write(self, data: bytes) -> None:
        """Take whole lines."""
        lines = data.splitlines(keepends=True)
        self._sink.write(b"".join(line for line in lines if self._matches(line)))

    def close(self) -> None:
        """Close what is behind it."""
        self._sink.close()

    def _matches(self, line: bytes) -> bool:
        return any(text in line for text in self._texts)


class Tap:
    """One stream of one worker, from its pipe to the terminal and to files.

    Whole lines are passed on to the terminal, so that the lines of two workers do not mix; a
    progress bar's carriage return ends a line too. The worker's own file gets every byte at once.
    """

    def __init__(self, hub: Hub, terminal: Terminal, path: Path | None) -> None:
        """Shown, and kept at `path` if that is given."""
        self._hub = hub
        self._raw: list[Sink] = [File(path)] if path is not None else []
        self._by_line: list[Sink] = [terminal]
        self._rest = b""
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        hub.add(self._read_fd, self._on_readable)

    @classmethod
    def along(cls, hub: Hub, terminal: Terminal, route: Route) -> Tap:
        """A tap that passes its stream on along a route."""
        tap = cls(hub, terminal, route.file)
        tap._by_line = []
        if route.shown:
            prefix = route.prefix.encode()
            tap._by_line.append(Prefixed(terminal, prefix) if prefix else terminal)
        if route.copy is not None:
            texts = [text.encode() for text in route.filters]
            tap._by_line.append(Matching(File(route.copy), texts))
        return tap

    def started(self) -> None:
        """The worker has its own copy of the writing end; drop ours, so that the end is seen."""
        os.close(self.write_fd)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._read_fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._end()
            return
        for sink in self._raw:
            sink.write(data)
        data = self._rest + data
        whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - whole > CHUNK_BYTES:
            whole = len(data)  # no line is that long: binary data, passed on as it comes
        self._pass_on(data[:whole])
        self._rest = data[whole:]

    def _pass_on(self, lines: bytes) -> None:
        for sink in self._by_line:
            sink.write(lines)

    def _end(self) -> None:
        self._pass_on(self._rest)
        self._rest = b""
        for sink in (*self._raw, *self._by_line):
            sink.close()
        self._hub.remove(self._read_fd, lambda: os.close(self._read_fd))
