"""Memory on huge pages, for what the kernel reads: it has few pages to find and to hold on to.

Direct writes to a disk cost less from them. Where the kernel has no huge pages to give, it is
memory like any other.

Must always hold: a child process does not inherit it, or each page that is written to meanwhile
would be copied once.

Called by `slabs` and `room`.
"""

from __future__ import annotations

import mmap
from contextlib import suppress


def zeros(size_bytes: int) -> mmap.mmap:
    """Zeros that begin on a page; given back when nobody refers to them."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)
    return memory
