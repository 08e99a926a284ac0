"""`zero_agent.heartbeat()`: with it the agent detects that any script, in any language, hangs.

The environment of a worker names its heartbeat file, ZERO_HEARTBEAT_FILE. Each change of the file's
modification time is a heartbeat, whatever made it (`touch` in a shell script will do). The file may
contain the number of the last finished step, and after it what else is known of it:
`12 loss=0.53 samples=96 tokens=98304 total_steps=400`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ENV_FILE = "ZERO_HEARTBEAT_FILE"
"""As `zero_contract.worker.ENV_HEARTBEAT`; a script's heartbeat imports nothing for it."""
_LENGTH = 160
"""The length of what `heartbeat` writes: padded, so that it replaces what was there."""


class Beat(NamedTuple):
    """What a heartbeat says of the step that has ended."""

    step: int
    loss: float | None = None
    samples: int = 0
    tokens: int = 0
    total_steps: int = 0


def heartbeat(
    step: int | None = None,
    *,
    loss: float | None = None,
    samples: int = 0,
    tokens: int = 0,
    total_steps: int = 0,
) -> None:
    """Send a heartbeat: this worker makes progress. Call it once per step.

    `zero-ctl status`, the metrics and the curves of `zero-ctl report` show what is given beside the
    step.

    Args:
        step: The number of the step that has just ended, if steps have numbers. `zero-ctl status`
            shows it, and it distinguishes a job that makes progress from one in a crash loop.
        loss: The loss of the step; the mean over all ranks, if the script knows it.
        samples: The samples that all ranks have consumed since the run began.
        tokens: The tokens that they have consumed.
        total_steps: The steps of the whole job, from which the time that is left follows. A script
            whose steps the engine or `zero_torch` reports may say it once.
    """
    path = os.environ.get(ENV_FILE)
    if path is None:  # no agent looks
        return
    # No value that a script passes, and no full disk, ends its training.
    with contextlib.suppress(OSError, ValueError, TypeError, OverflowError):
        given = {"samples": samples, "tokens": tokens, "total_steps": total_steps}
        counts = {name: int(count) for name, count in given.items()}
        text = b"" if step is None else _line(int(step), loss, counts)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # One write of a fixed length: a reader sees the old line or the new one.
            os.pwrite(descriptor, text.ljust(_LENGTH), 0)
        finally:
            os.close(descriptor)


def _line(step: int, loss: float | None, counts: Mapping[str, int]) -> bytes:
    words = [str(step)]
    # Nine digits tell every float32 from its neighbours.
    words += [f"loss={float(loss):.9g}"] if loss is not None else []
    words += [f"{name}={count}" for name, count in counts.items() if count]
    return " ".join(words).encode()


def parse(text: bytes) -> Beat | None:
    """What the content of a heartbeat file says; None if it begins with no number.

    Words that this version does not know, and values that are none, are left out.
    """
    step, *words = text.split() or [b""]
    if not step.isdigit():
        return None
    beat = Beat(int(step))
    for word in words:
        name, _, value = word.partition(b"=")
        with contextlib.suppress(ValueError):
            if name == b"loss":
                beat = beat._replace(loss=float(value))
            elif name in {b"samples", b"tokens", b"total_steps"}:
                beat = beat._replace(**{name.decode(): int(value)})
    return beat


class Heartbeats:
    """The agent's side: the heartbeat files of a round's workers."""

    def __init__(self, files: dict[int, Path]) -> None:
        """No heartbeat has been seen yet."""
        self._files = files
        self._seen_ns: dict[int, int] = {}

    def beats(self) -> Iterator[tuple[int, Beat | None]]:
        """The ranks with a heartbeat since the last call, with what the file says of the step."""
        for rank, file in self._files.items():
            try:
                at_ns = file.stat().st_mtime_ns
                # Any change, not a later time: clocks of file systems may be set back.
                if at_ns != self._seen_ns.get(rank):
                    self._seen_ns[rank] = at_ns
                    with file.open("rb") as content:
                        text = content.read(_LENGTH)
                    yield rank, parse(text)
            except OSError:
                continue  # this worker has not sent a heartbeat yet
