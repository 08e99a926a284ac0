"""A terminal window: a program with a controlling terminal that can be closed under it."""

from __future__ import annotations

import os
import select
import subprocess
import threading
from collections.abc import Mapping, Sequence


class Terminal:
    """Runs a command as the session leader of a new pseudo-terminal and keeps what it shows."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._master, slave = os.openpty()
        # Under nohup the tests ignore SIGHUP, and so would what they start.
        own = ["setsid", "--ctty", "env", "--default-signal=HUP"]
        self.process = subprocess.Popen(
            [*own, *command], stdin=slave, stdout=slave, stderr=slave, env=dict(env)
        )
        os.close(slave)
        self._shown = bytearray()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return self._shown.decode(errors="replace").replace("\r\n", "\n")

    def type(self, keys: bytes) -> None:
        """Press keys; b"\\x03" is Ctrl-C."""
        os.write(self._master, keys)

    def close(self) -> None:
        """Close the window: the kernel hangs up on the program."""
        self._closing.set()
        self._reader.join(60)

    def _read(self) -> None:
        try:
            while not self._closing.is_set():
                if select.select([self._master], [], [], 0.02)[0]:
                    self._shown += os.read(self._master, 1 << 16)
        except OSError:
            pass  # the program has ended, and the terminal with it
        finally:
            os.close(self._master)
