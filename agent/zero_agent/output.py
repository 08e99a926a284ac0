"""What the workers print: passed on to this terminal, and kept in files when asked for.

Workers write into pipes that the agent reads, never to the terminal itself: when the terminal
is closed, the agent drops what it can no longer show, while the workers go on to save and
leave instead of dying of a failed print.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from zero_agent.hub import Hub

CHUNK_BYTES = 1 << 16


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


class Tap:
    """One stream of one worker, from its pipe to the terminal and to a file.

    Whole lines are passed on, so that the lines of two workers do not mix; a progress bar's
    carriage return ends a line too.
    """

    def __init__(self, hub: Hub, terminal: Terminal, path: Path | None) -> None:
        self._hub = hub
        self._terminal = terminal
        self._file: BinaryIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        self._rest = b""
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        hub.add(self._read_fd, self._on_readable)

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
        self._keep(data)
        data = self._rest + data
        whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - whole > CHUNK_BYTES:
            whole = len(data)  # no line is that long: binary data, passed on as it comes
        self._terminal.write(data[:whole])
        self._rest = data[whole:]

    def _keep(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError:  # a full disk costs the log, not the run
            self._file.close()
            self._file = None

    def _end(self) -> None:
        self._terminal.write(self._rest)
        self._rest = b""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._hub.remove(self._read_fd, lambda: os.close(self._read_fd))
