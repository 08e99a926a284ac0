"""A few bytes that unpack to many."""

from __future__ import annotations

import zlib


def packed_zeros(size_mib: int) -> bytes:
    """What zlib unpacks to so many MiB of zeros; without an end, which no reader may get to.

    All but the first block are the same bytes, since a full flush forgets what came before:
    compressing a GiB would take seconds and a GiB of memory.
    """
    packer, zeros = zlib.compressobj(), bytes(1 << 20)
    first, other = (packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + other * (size_mib - 1)
