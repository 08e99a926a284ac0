"""Is every byte of a checkpoint the byte that was saved? All blocks of all files, in threads.

Unlike a load, which verifies what it touches, this reads everything, finds all the damage there is
and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from zero_checkpoint.files.place import open_source
from zero_checkpoint.files.source import Source
from zero_checkpoint.format.manifest import MANIFEST, FileRecord, Manifest
from zero_checkpoint.format.plan import READ_BYTES
from zero_checkpoint.loading.candidates import Candidate, Rejected
from zero_checkpoint.loading.reader import contents, span

Progress = Callable[[int], None]
"""Called with the number of further bytes that are done."""

_JOB_BYTES = 64 << 20
"""Bytes that a thread checks as one job; a source may fetch all of them at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One run of bytes that is not what was saved."""

    file: str
    begin: int
    """First byte, counted from the start of the file."""
    end: int
    problem: str
    tensors: tuple[str, ...]
    """The damaged parts of tensors: `kind/fqn[start:end]`, in elements."""


def verify(
    checkpoint: Candidate, *, threads: int | None = None, progress: Progress = lambda _: None
) -> list[Damage]:
    """All damage of a checkpoint, in the order of files and bytes; empty if it is whole.

    `progress` is called from this thread; by default one thread per core reads, at most 8.

    Raises:
        OSError: A file could not be read for a reason of this machine's, such as permissions.
    """
    damages: list[Damage] = []
    manifest = checkpoint.manifest
    # Threads are enough: reading and hashing release the interpreter's lock.
    with ThreadPoolExecutor(threads or min(os.cpu_count() or 1, 8)) as pool:
        futures: list[Future[tuple[int, list[Damage]]]] = [
            pool.submit(_check, checkpoint, number, blocks)
            for number, file in enumerate(manifest.files)
            for blocks in _cut(range(len(file.digests)), _JOB_BYTES // manifest.block_bytes)
        ]
        try:
            for future in as_completed(futures):
                count, found = future.result()
                damages += found
                progress(count)
        except BaseException:  # Ctrl-C too: jobs that have not begun must not begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    present = present_bytes(checkpoint)
    for file in manifest.files:
        size = present.get(file.name, 0)
        # No load would notice a file that has grown, but a process has written to it.
        if size > file.size_bytes:
            problem = f"the file is {size - file.size_bytes} bytes too long"
            damages.append(
                Damage(file=file.name, begin=file.size_bytes, end=size, problem=problem, tensors=())
            )
    return sorted(damages, key=lambda damage: (damage.file, damage.begin))


def total_bytes(manifest: Manifest) -> int:
    """Bytes of all files: the sum of what `progress` is called with."""
    return sum(file.size_bytes for file in manifest.files)


def _cut(blocks: range, most: int) -> Iterator[range]:
    """The same blocks in runs of at most `most`, and of at least one."""
    # One block may be longer than a job.
    step = max(most, 1)
    return (blocks[at : at + step] for at in range(0, len(blocks), step))


def _check(checkpoint: Candidate, number: int, blocks: range) -> tuple[int, list[Damage]]:
    """The bytes of consecutive blocks of one file, and the damage in them."""
    manifest = checkpoint.manifest
    file = manifest.files[number]
    begin, size = span(manifest, file, blocks)
    reads = list(_cut(blocks, READ_BYTES // manifest.block_bytes))
    damages = []
    try:
        with open_source(checkpoint.path / file.name) as source:
            source.expect([span(manifest, file, read) for read in reads])
            buffer = memoryview(bytearray(max(span(manifest, file, read)[1] for read in reads)))
            for read in reads:
                for block, problem in _problems(source, manifest, file, read, buffer):
                    at, length = span(manifest, file, range(block, block + 1))
                    damages.append(_damage(manifest, number, at, at + length, problem))
    except FileNotFoundError:
        return size, [_damage(manifest, number, begin, begin + size, "the file is missing")]
    return size, damages


def _problems(
    source: Source, manifest: Manifest, file: FileRecord, blocks: range, buffer: memoryview
) -> Iterator[tuple[int, str]]:
    """Each damaged block of one read, and what is wrong with it."""
    start, length = span(manifest, file, blocks)
    try:
        present = length - source.read_into([buffer[:length]], start)
    except OSError as error:
        if len(blocks) == 1:
            yield blocks[0], f"cannot be read: {error.strerror}"
            return
        for block in blocks:  # block by block, to find the unreadable one
            yield from _problems(source, manifest, file, range(block, block + 1), buffer)
        return
    for block, at in zip(blocks, range(0, length, manifest.block_bytes), strict=True):
        end = min(at + manifest.block_bytes, length)
        if end > present:
            yield block, f"the file ends {end - max(at, present)} bytes too early"
        elif xxhash.xxh3_64_intdigest(buffer[at:end]) != file.digests[block]:
            yield block, "XXH3-64 differs"


def _damage(manifest: Manifest, file: int, begin: int, end: int, problem: str) -> Damage:
    return Damage(
        file=manifest.files[file].name,
        begin=begin,
        end=end,
        problem=problem,
        tensors=tuple(contents(manifest, file, begin, end)),
    )


def of_manifest(entry: Rejected) -> Damage:
    """The damage of a checkpoint whose manifest cannot be used."""
    manifest = entry.path / MANIFEST
    return Damage(
        file=MANIFEST,
        begin=0,
        end=manifest.stat().st_size,
        problem=entry.reason.removeprefix(f"{manifest}: "),
        tensors=(),
    )


def misfit(checkpoint: Candidate) -> tuple[FileRecord, int] | None:
    """The first file that does not have the size that was saved, and its size: 0 without one."""
    present = present_bytes(checkpoint)
    files = ((file, present.get(file.name, 0)) for file in checkpoint.manifest.files)
    return next(((file, size) for file, size in files if size != file.size_bytes), None)


def present_bytes(checkpoint: Candidate) -> dict[str, int]:
    """Name -> size of the files that are there now."""
    sizes = {}
    for path in checkpoint.path.iterdir():
        # A running training may delete it meanwhile.
        with suppress(FileNotFoundError):
            sizes[path.name] = path.stat().st_size
    return sizes
