"""Memory that the kernel reads fast."""

from __future__ import annotations

import ctypes
from pathlib import Path

from zero_checkpoint.files.chunks import zeros

SIZE_BYTES = 8 << 20


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping at an address."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            low, high = (int(end, 16) for end in words[0].split("-"))
            within = low <= address < high
        elif within and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError("no such mapping")


def test_huge_pages_are_asked_for_and_no_child_inherits_them() -> None:
    memory = zeros(SIZE_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert {"hg", "dc"} <= set(flags_of(address))
    assert memory.read() == bytes(SIZE_BYTES)
