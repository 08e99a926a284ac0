"""Settings of malloc for training on CPUs: memory that a step frees stays for the next step.

Results and peak memory do not depend on it: what stays allocated is what the next step allocates.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The settings, by their numbers in malloc.h."""
_NEVER, _LARGEST_BYTES = -1, 32 << 20
"""Their values. The second is the largest that glibc accepts, and the limit of its own adaptation,
which ends when the first is set. Larger tensors have separate mappings, as before."""


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, unless the environment configures its malloc.

    Call it after the long-lived buffers are allocated: these keep separate mappings then.
    """
    # By default glibc returns the free end of its heap to the kernel after every backward, and the
    # next forward allocates it again, zeroed, by a page fault for each 4 KiB.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not is_set(os.environ):  # other C libraries have none
        mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_TRIM_THRESHOLD, _NEVER)


def is_set(environment: Mapping[str, str]) -> bool:
    """Whether the environment sets when malloc maps and returns memory. Source: mallopt(3)."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    names = ("trim_threshold", "mmap_threshold", "mmap_max", "top_pad")
    return any(
        f"MALLOC_{name.upper()}_" in environment or f"glibc.malloc.{name}=" in tunables
        for name in names
    )
