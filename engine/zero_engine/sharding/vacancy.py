"""Memory that is given back while views of it live: what they read is NaN.

Owns one range of addresses per process, as long as the longest storage that was ever vacant, in
which the same few pages of ones lie over and over: bytes of 0xFF are NaN in every floating dtype,
-1 in whole numbers. A storage without memory points there, so a view that a script has kept reads
NaN where it would end the process. Must always hold: nobody can write there; the range is never
given back; a storage that is filled again has its own memory, and says of itself what it says
without all this (`nbytes` is 0 meanwhile).

On other devices, or where the kernel has no such range to give or torch no such calls, it is as if
this were not here.

Called by `flat_unit`.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ
from typing import cast

import torch

_TILE_BYTES = 2 << 20
_MOST_BYTES = 32 << 30
"""Of one storage: each tile is a mapping, of which a process has 65530."""
_MAP_FIXED = 0x10
_range: list[tuple[int, int]] = []
"""Address and size of the longest."""


class Vacancy:
    """What one storage points to while it has no memory."""

    def __init__(self) -> None:
        self._swapped = False
        self._nothing: torch.UntypedStorage | None = None

    def free(self, storage: torch.UntypedStorage) -> None:
        """Give the memory of a storage back, if it has any."""
        if not storage.nbytes():
            return
        if self._nothing is None and storage.device.type == "cpu":
            self._nothing = _nan_storage(storage.nbytes())
        storage.resize_(0)
        self._swap(storage)

    def fill(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Give it memory again, with anything in it."""
        if self._swapped:
            self._swap(storage)
        storage.resize_(size_bytes)

    def _swap(self, storage: torch.UntypedStorage) -> None:
        if self._nothing is not None:
            storage._swap_data_ptr_(self._nothing)  # type: ignore[attr-defined]
            self._swapped = not self._swapped


def _nan_storage(size_bytes: int) -> torch.UntypedStorage | None:
    """A storage of no bytes that points to at least so many; None if there can be none."""
    # Neither is torch's promise: where it has one of them no more, nothing is shown.
    construct = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if construct is None or not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        return None
    if size_bytes > _MOST_BYTES:
        return None
    if not _range or _range[-1][1] < size_bytes:
        with suppress(OSError, AttributeError):  # too many mappings; no such calls here
            _range.append(_map(-(-size_bytes // _TILE_BYTES) * _TILE_BYTES))
    if not _range or _range[-1][1] < size_bytes:
        return None
    return cast("torch.UntypedStorage", construct(_range[-1][0], torch.device("cpu"), 0))


def _map(size_bytes: int) -> tuple[int, int]:
    """A range of ones, and its size; raises OSError."""
    file = os.memfd_create("nan")
    try:
        os.write(file, b"\xff" * _TILE_BYTES)
        base = _call_mmap(None, size_bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1)
        for at in range(0, size_bytes, _TILE_BYTES):
            _call_mmap(base + at, _TILE_BYTES, MAP_PRIVATE | _MAP_FIXED, file)
    finally:
        os.close(file)
    return base, size_bytes


def _call_mmap(address: int | None, size_bytes: int, flags: int, file: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    found = call(address, size_bytes, PROT_READ, flags, file, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)
