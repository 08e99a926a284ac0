"""What one process of a benchmark has used and read, as the kernel counts it; and a cold cache.

Runs under any Python: the workers of other systems import it, too.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def resident_bytes(field: str) -> int:
    """A field of this process's status, such as `VmRSS:`; 0 where there is none."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def begin_memory() -> int:
    """Forget the peak of the imports, and return what they hold."""
    with suppress(OSError):  # where this is not allowed, the imports' own peak stays in
        Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS:")


def forget(root: Path) -> None:
    """Drop the files under `root` from the page cache."""
    os.sync()
    for path in root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def bytes_read() -> int:
    """Bytes that this process has read by system calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
