"""A file without a name that holds tensors: the bytes of the NVMe tier.

There are two ways to the same bytes. `read` and `write` go past the page cache, in pages, from
aligned buffers. The tensors that `reserve` returns are views of the mapped file, for occasional
readers (a checkpoint, a hash, a script).

Source of the idea: ZeRO-Infinity (arXiv 2104.07857), section 5.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import tempfile
import weakref
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from zero_checkpoint.format.dtypes import host_bytes
from zero_engine.tiers.places import TierError

_log = logging.getLogger(__name__)

PAGE_BYTES = 4096
_EXTENT_BYTES = 4 << 30
"""The part of the file that is mapped at a time: each mapping takes a file descriptor."""
_MIB = 1 << 20


class ScratchFile:
    """An unlinked file of tensors; for one process and any number of its threads."""

    def __init__(self, directory: Path) -> None:
        """Make the file. Raises TierError if there can be no file in this directory."""
        self.directory = directory
        self.size_bytes = 0
        """The bytes that are reserved."""
        self._end = self._mapped_end = 0
        self._starts: list[int] = []
        self._maps: list[tuple[int, int, mmap.mmap]] = []
        try:
            # Without a name from the beginning: the kernel frees its space with the process,
            # whatever ends it.
            try:
                self._cached = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                    raise
                # A file system, or a kernel, that knows no O_TMPFILE.
                self._cached, name = tempfile.mkstemp(prefix=".zero-scratch.", dir=directory)
                os.unlink(name)
            # Closed with this object, also if what follows fails.
            weakref.finalize(self, os.close, self._cached)
            # A step streams through all of its state: cached pages would only push out others.
            try:
                direct = os.open(
                    f"/proc/self/fd/{self._cached}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
                )
                weakref.finalize(self, os.close, direct)
                why = self._probe(direct)
            except OSError as error:
                why = error.strerror or "refused"
            if why:
                _log.warning("%s: state goes through the page cache: %s", directory, why)
            self._direct = self._cached if why else direct
        except OSError as error:
            raise self._failure("no scratch file", error) from error

    # ---- space ----

    def reserve(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor [numel] of zeros that lies in the file, from the beginning of a page.

        Raises:
            TierError: There is no room.
        """
        size = max(-(-numel * dtype.itemsize // PAGE_BYTES), 1) * PAGE_BYTES
        try:
            if self._end + size > self._mapped_end:
                # Map the next part of the file; what is not reserved in it takes no room.
                extent_bytes = max(size, _EXTENT_BYTES)
                os.ftruncate(self._cached, self._mapped_end + extent_bytes)
                mapped = mmap.mmap(self._cached, extent_bytes, offset=self._mapped_end)
                self._extent = torch.frombuffer(mapped, dtype=torch.uint8)
                address = self._extent.data_ptr()
                at = bisect_right(self._starts, address)
                self._starts.insert(at, address)
                self._maps.insert(at, (address, self._mapped_end, mapped))
                self._end, self._mapped_end = self._mapped_end, self._mapped_end + extent_bytes
            # A full disk is an error with its cause now, not a SIGBUS in the middle of a step.
            os.posix_fallocate(self._cached, self._end, size)
        except OSError as error:
            raise self._failure(f"no room for {size / _MIB:.1f} MiB of state", error) from error
        begin = self._end - (self._mapped_end - self._extent.numel())
        self._end += size
        self.size_bytes += size
        return self._extent[begin : begin + size].view(dtype)[:numel]

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this file."""
        return self._find(tensor) is not None

    def _find(self, tensor: Tensor) -> int | None:
        """The position in the file of a tensor's first byte."""
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start, offset, mapped = self._maps[at]
        return offset + address - start if address < start + len(mapped) else None

    def forget_pages(self) -> None:
        """Free the pages of the mapping that are in memory."""
        # Nothing is lost: the mapping is shared, so the kernel writes pages before it drops them.
        for _, _, mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)
        with suppress(OSError):  # not every file system takes the advice
            os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_DONTNEED)

    # ---- streaming ----

    def read(self, held: Tensor, buffer: Tensor) -> None:
        """Read the bytes of `held`, which begins on a page, into an aligned buffer of whole pages.

        Raises:
            TierError: The disk failed.
        """
        self._transfer("reading", held, buffer)

    def write(self, held: Tensor, buffer: Tensor) -> None:
        """Write a buffer to where `held` lies; see `read`."""
        self._transfer("writing", held, buffer)

    def _transfer(self, verb: str, held: Tensor, buffer: Tensor) -> None:
        position = self._find(held)
        assert position is not None
        assert position % PAGE_BYTES == buffer.data_ptr() % PAGE_BYTES == 0
        move = self._read_at if verb == "reading" else self._write_at
        data, done = host_bytes(buffer), 0
        try:
            # One call moves 2 GiB at most, and may move less.
            while done < len(data):
                moved = move(data[done:], position + done)
                if not moved:
                    raise OSError(errno.EIO, "the file is shorter than it was")
                done += moved
        except OSError as error:
            raise self._failure(f"{verb} {len(data) / _MIB:.1f} MiB of state", error) from error

    def _read_at(self, data: memoryview, position: int) -> int:
        return os.preadv(self._direct, [data], position)

    def _write_at(self, data: memoryview, position: int) -> int:
        return os.pwritev(self._direct, [data], position)

    def _probe(self, direct: int) -> str:
        """Try both ways on the first page; returns why they cannot be combined, or nothing."""
        # The kernel keeps both the same: a direct read first writes dirty pages back, a direct
        # write drops the pages that it makes stale. Not every file system does.
        self._direct = direct  # for `_read_at` and `_write_at`, until the answer is known
        mapped = self.reserve(PAGE_BYTES, torch.uint8)
        buffer = aligned(PAGE_BYTES)
        mapped.fill_(1)
        self._read_at(host_bytes(buffer), 0)
        seen = bool((buffer == 1).all())
        self._write_at(host_bytes(buffer.fill_(2)), 0)
        return "" if seen and bool((mapped == 2).all()) else "direct and mapped access disagree"

    def _failure(self, what: str, error: OSError) -> TierError:
        try:
            free = f"{shutil.disk_usage(self.directory).free / _MIB:.0f} MiB free"
        except OSError:
            free = "not accessible"
        remedy = _REMEDIES.get(error.errno or 0, "name another directory as nvme_path")
        return TierError(f"{self.directory} ({free}): {what}: {error.strerror}; {remedy}")


_REMEDIES = {
    errno.EIO: "the disk is failing: name another one as nvme_path and resume from the newest "
    "checkpoint",
    errno.ENOSPC: "free room there, or name another directory as nvme_path",
    errno.ENOENT: "create the directory on every node, or name another one as nvme_path",
}


def aligned(size_bytes: int, *, pin: bool = False) -> Tensor:
    """Undefined bytes [size rounded up to pages] that begin on a page."""
    size = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    raw = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pin)
    begin = -raw.data_ptr() % PAGE_BYTES
    return raw[begin : begin + size]
