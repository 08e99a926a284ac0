"""Is every byte of a checkpoint the byte that was saved? All blocks of all files, in threads.

Unlike a load, which verifies what it touches, this reads everything, finds all the damage there
is and changes nothing. As in a load, blocks that follow each other are read together, so short
blocks cost no more reads. Reading and hashing leave the interpreter's lock, so threads are enough.

Called by `cli` and `upkeep`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import xxhash

from zero_checkpoint.candidates import Candidate, Rejected
from zero_checkpoint.files.source import Source
from zero_checkpoint.format.manifest import MANIFEST, FileRecord, Manifest
from zero_checkpoint.format.plan import READ_BYTES
from zero_checkpoint.place import open_source
from zero_checkpoint.reader import contents, span

Progress = Callable[[int], None]
"""Told how many more bytes are done."""

_JOB_BYTES = 64 << 20
"""What a thread checks before it looks for more work; a source may fetch all of it at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One run of bytes that is not what was saved."""

    file: str
    begin: int
    """First byte, counted from the start of the file."""
    end: int
    problem: str
    tensors: tuple[str, ...]
    """What lies there: `kind/fqn[start:end]`, in elements."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Some blocks of one file that follow each other."""

    file: int
    blocks: range


def verify(
    checkpoint: Candidate, *, threads: int | None = None, progress: Progress = lambda _: None
) -> list[Damage]:
    """All damage of a checkpoint, in the order of files and bytes; empty if it is whole.

    Args:
        checkpoint: Its manifest is verified already.
        threads: How many read at once; one per core, at most 8, by default.
        progress: Called from this thread.

    Raises:
        OSError: A file could not be read for a reason of this machine's, such as permissions.
    """
    damages: list[Damage] = []
    with ThreadPoolExecutor(threads or min(os.cpu_count() or 1, 8)) as pool:
        futures: list[Future[tuple[int, list[Damage]]]] = [
            pool.submit(partial(_check, checkpoint, job)) for job in _jobs(checkpoint.manifest)
        ]
        try:
            for future in as_completed(futures):
                count, found = future.result()
                damages += found
                progress(count)
        except BaseException:  # Ctrl-C too: what has not begun must not begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    damages += _wrong_sizes(checkpoint)
    return sorted(damages, key=lambda damage: (damage.file, damage.begin))


def total_bytes(manifest: Manifest) -> int:
    """What `progress` adds up to."""
    return sum(file.size_bytes for file in manifest.files)


def _jobs(manifest: Manifest) -> Iterator[_Job]:
    for number, file in enumerate(manifest.files):
        for blocks in _cut(range(len(file.digests)), _JOB_BYTES // manifest.block_bytes):
            yield _Job(number, blocks)


def _cut(blocks: range, most: int) -> Iterator[range]:
    """The same blocks in runs of at most so many, but one at least."""
    step = max(most, 1)
    return (blocks[at : at + step] for at in range(0, len(blocks), step))


def _check(checkpoint: Candidate, job: _Job) -> tuple[int, list[Damage]]:
    """The bytes of a job and the damage in them."""
    manifest = checkpoint.manifest
    file = manifest.files[job.file]
    begin, size = span(manifest, file, job.blocks)
    reads = list(_cut(job.blocks, READ_BYTES // manifest.block_bytes))
    try:
        with open_source(checkpoint.path / file.name) as source:
            source.expect([span(manifest, file, read) for read in reads])
            return size, list(_check_reads(source, manifest, job.file, reads))
    except FileNotFoundError:
        return size, [_damage(manifest, job.file, begin, begin + size, "the file is missing")]


def _check_reads(
    source: Source, manifest: Manifest, number: int, reads: Sequence[range]
) -> Iterator[Damage]:
    file = manifest.files[number]
    buffer = memoryview(bytearray(max(span(manifest, file, read)[1] for read in reads)))
    for read in reads:
        for block, problem in _problems(source, manifest, file, read, buffer):
            begin, size = span(manifest, file, range(block, block + 1))
            yield _damage(manifest, number, begin, begin + size, problem)


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
        for block in blocks:  # which of them is to blame?
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


def _wrong_sizes(checkpoint: Candidate) -> Iterator[Damage]:
    """Files that are longer than they were: no load would notice, but somebody wrote to them."""
    present = present_bytes(checkpoint)
    for file in checkpoint.manifest.files:
        size = present.get(file.name, 0)
        if size > file.size_bytes:
            problem = f"the file is {size - file.size_bytes} bytes too long"
            yield Damage(
                file=file.name, begin=file.size_bytes, end=size, problem=problem, tensors=()
            )


def of_manifest(entry: Rejected) -> Damage:
    """That of a checkpoint whose manifest cannot be used."""
    manifest = entry.path / MANIFEST
    return Damage(
        file=MANIFEST,
        begin=0,
        end=manifest.stat().st_size,
        problem=entry.reason.removeprefix(f"{manifest}: "),
        tensors=(),
    )


def present_bytes(checkpoint: Candidate) -> dict[str, int]:
    """The sizes of the files that are there now; a training that goes on may delete them."""
    sizes = {}
    for path in checkpoint.path.iterdir():
        with suppress(FileNotFoundError):
            sizes[path.name] = path.stat().st_size
    return sizes
