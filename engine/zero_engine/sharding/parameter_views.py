"""What a script sees of parameters whose memory is freed: NaN.

Values are views of the unit's buffer. While that has no memory, a parameter shows NaN instead (0 if
its dtype has no NaN), in its own shape, dtype and device. A view that a script has kept reads NaN
as well, where torch would read address 0 and end the process: torch has no error for it. On other
devices than the CPU, or where the kernel has no such memory to give or torch no such calls, it is
as if this were not here.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_TILE_BYTES = 2 << 20
_MOST_BYTES = 32 << 30
"""The largest storage: each tile is a mapping, of which a process may have 65530."""
_MAP_FIXED = 0x10
_range: list[tuple[int, int]] = []
"""The ranges made so far, as (address, size in bytes); the longest is last."""


class ShownBuffer:
    """The flat buffer of one unit, and what its parameters show of it: their values, or NaN.

    Attributes:
        full: [padded] in the compute dtype; the parameters are its views. Its storage is empty
            between uses at stage 3, and the parameters then show NaN.
    """

    def __init__(self, full: Tensor, params: Sequence[nn.Parameter], starts: Sequence[int]) -> None:
        """Show the values of the parameters, which begin at these elements of the buffer."""
        self.full = full
        self._freed = FreedStorage()
        self._params = tuple(params)
        self._places = tuple((start, p.shape) for start, p in zip(starts, params, strict=True))
        self._has_nan = full.is_floating_point() or full.is_complex()
        # An element for each parameter, so that nothing written to one shows in another.
        self._blank = full.new_empty(len(params))
        self._blanks = [
            element.expand(shape)
            for element, (_, shape) in zip(self._blank, self._places, strict=True)
        ]
        self._cut()
        self.show()

    def _cut(self) -> None:
        """Take the values from the present buffer, from the next `show` on."""
        self._values = [
            self.full[start : start + shape.numel()].view(shape) for start, shape in self._places
        ]

    def show(self) -> None:
        """Let the parameters show their values."""
        self._set(self._values)

    def hide(self) -> None:
        """Let the parameters show NaN, also in elements that a script has overwritten since."""
        self._blank.fill_(float("nan") if self._has_nan else 0)
        self._set(self._blanks)

    def _set(self, shown: Sequence[Tensor]) -> None:
        # `data` touches neither the versions that autograd checks nor what it has saved: a saved
        # parameter shows its values again when backward needs them.
        with torch._C.DisableTorchFunctionSubclass():
            for param, data in zip(self._params, shown, strict=True):
                param.data = data

    def replaced(self) -> int | None:
        """The first parameter that should show its values, and has other memory."""
        pairs = enumerate(zip(self._params, self._values, strict=True))
        return next((at for at, (p, own) in pairs if p.data_ptr() != own.data_ptr()), None)

    @property
    def has_memory(self) -> bool:
        """Whether the buffer has memory: it is not released, and not moved elsewhere."""
        return self.full.untyped_storage().nbytes() > 0

    def fill(self) -> None:
        """Allocate the memory again, with undefined contents."""
        self._freed.fill(self.full.untyped_storage(), self.full.nbytes)

    def free(self) -> None:
        """Free the memory; what looks at it through numpy() keeps it."""
        if self.has_memory and not self.full.untyped_storage().resizable():
            self.leave_memory()
        self._freed.free(self.full.untyped_storage())

    def leave_memory(self) -> None:
        """Leave the memory to tensors that refer to it, and allocate another buffer."""
        with torch.inference_mode(False):  # else nothing outside that mode could write to it
            self.full = torch.empty_like(self.full)
            self._cut()

    def shows_in(self, structure: Any) -> bool:
        """Whether tensors in a structure are the full parameters themselves, or views of them."""
        # The storage itself: its memory has no address while it is freed.
        address = self.full.untyped_storage()._cdata
        return any(
            isinstance(leaf, Tensor)
            and leaf.layout is torch.strided
            and leaf.untyped_storage()._cdata == address
            for leaf in tree_leaves(structure)
        )


class FreedStorage:
    """One storage, which points to NaN while it has no memory."""

    def __init__(self) -> None:
        self._swapped = False
        self._nothing: torch.UntypedStorage | None = None

    def free(self, storage: torch.UntypedStorage) -> None:
        """Free the memory of a storage, if it has any."""
        if not storage.nbytes():
            return
        if self._nothing is None and storage.device.type == "cpu":
            self._nothing = _nan_storage(storage.nbytes())
        storage.resize_(0)
        self._swap(storage)

    def fill(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Allocate memory again, with undefined contents."""
        if not self._swapped:
            storage.resize_(size_bytes)
            return
        # First its own pointer again: a resize frees what it points to.
        self._swap(storage)
        try:
            storage.resize_(size_bytes)
        except RuntimeError:  # no memory: views that a script has kept still show NaN
            self._swap(storage)
            raise

    def _swap(self, storage: torch.UntypedStorage) -> None:
        # Filled again, it has its own memory, and says of itself what it says without all this.
        if self._nothing is not None:
            storage._swap_data_ptr_(self._nothing)  # type: ignore[attr-defined]
            self._swapped = not self._swapped


def _nan_storage(size_bytes: int) -> torch.UntypedStorage | None:
    """A storage of size 0 that points to `size_bytes` of NaN; None if there can be none."""
    # Neither is public API of torch: without one of them nothing is shown.
    construct = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if construct is None or not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        return None
    if size_bytes > _MOST_BYTES:
        return None
    # Storages that are freed already point to the ranges before, which stay.
    if not _range or _range[-1][1] < size_bytes:
        with suppress(OSError, AttributeError):  # too many mappings; no such calls here
            _range.append(_map(-(-size_bytes // _TILE_BYTES) * _TILE_BYTES))
    if not _range or _range[-1][1] < size_bytes:
        return None
    return cast("torch.UntypedStorage", construct(_range[-1][0], torch.device("cpu"), 0))


def _map(size_bytes: int) -> tuple[int, int]:
    """The address of a range of bytes 0xFF, and its size. Raises OSError."""
    # The same few pages over and over, read only: NaN in every floating dtype, -1 in whole numbers.
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
    # Python's own mmap maps nothing at a given address.
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    found = call(address, size_bytes, PROT_READ, flags, file, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)
