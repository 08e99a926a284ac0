"""Settings of malloc for training on CPUs: memory that a step frees stays for the next step.

Results do not depend on it, and the peak of steady steps does not: what stays allocated is what
the next step allocates. Where an engine is made again in its process, holes of the former one may
stay: measured at most a seventh of the peak.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""The settings, by their numbers in malloc.h."""
_NEVER, _NONE = -1, 0
"""Their values: the end of the heap is never returned, and no memory is a mapping of its own."""


@functools.cache  # an engine that stays in its process is made again, and asks again
def keep_freed_memory() -> None:
    """Let glibc keep freed memory, unless the environment configures its malloc.

    Call it after the long-lived buffers are allocated: these keep separate mappings then.
    """
    # By default glibc returns the free end of its heap, and each block of 32 MiB, to the kernel
    # after every backward. The next forward allocates it again, zeroed, by a page fault for each
    # 4 KiB: half of the time of a step of four layers of 30 MB.
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim") or is_set(os.environ):  # other C libraries lack it
        return
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    libc.mallopt(_MMAP_MAX, _NONE)
    # A child, such as a loading process, would hold what is free at its fork: as soon as the next
    # step writes to it, it would be there twice.
    os.register_at_fork(before=lambda: libc.malloc_trim(0))


def is_set(environment: Mapping[str, str]) -> bool:
    """Whether the environment sets when malloc maps and returns memory. Source: mallopt(3)."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    names = ("trim_threshold", "mmap_threshold", "mmap_max", "top_pad")
    return any(
        f"MALLOC_{name.upper()}_" in environment or f"glibc.malloc.{name}=" in tunables
        for name in names
    )
