"""The C heap of a process that trains on CPUs: memory that a step frees stays for the next step.

Owns the two settings of glibc's malloc that decide it. By default glibc gives the free end of its
heap back to the kernel whenever much of it is free, so after every backward; the next forward then
gets it anew, zeroed and by one page fault for each 4 KiB, which a training step waits for. Results
do not depend on it, and the peak is where it was: what stays is what the next step takes.

Called by `assembly` when the long-lived buffers are there: they keep mappings of their own, and
what comes and goes does so beside them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The names of the settings in malloc.h,"""
_NEVER, _LARGEST_BYTES = -1, 32 << 20
"""and their values. The second is the largest that glibc takes, and where its own way of adapting
it ends; setting the first ends that way. Larger tensors are mapped each by itself, as before."""


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, unless the environment says how its malloc is to behave."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not is_set(os.environ):  # other C libraries have none
        mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_TRIM_THRESHOLD, _NEVER)


def is_set(environment: Mapping[str, str]) -> bool:
    """Whether somebody has chosen when malloc maps and returns memory. Source: mallopt(3)."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    names = ("trim_threshold", "mmap_threshold", "mmap_max", "top_pad")
    return any(
        f"MALLOC_{name.upper()}_" in environment or f"glibc.malloc.{name}=" in tunables
        for name in names
    )
