"""Memory on huge pages, for what a disk reads or fills: the kernel has few pages to hold on to.

Direct writes and reads cost less with them. Where the kernel has no huge pages to give, it is
memory like any other.

Must always hold: a child process does not inherit it, or each page that is written to meanwhile
would be copied once.

Called by `chunks`, `room` and `fetches`.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def are_given() -> bool:
    """Whether the kernel gives huge pages to who asks for them."""
    try:
        return "[never]" not in SETTING.read_text()
    except OSError:  # a kernel without them
        return False


def zeros(size_bytes: int) -> mmap.mmap:
    """Zeros that begin on a page; given back when nobody refers to them."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)
    return memory
