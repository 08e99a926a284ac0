"""Is every byte of a checkpoint the byte that was saved? All blocks of all files, in threads.

Unlike a load, which verifies what it touches, this reads everything, finds all the damage there
is and changes nothing. Reading and hashing leave the interpreter's lock, so threads are enough.

Called by `cli` and `upkeep`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

import xxhash

from zero_engine.checkpoint.candidates import Candidate
from zero_engine.checkpoint.manifest import FileRecord, Manifest
from zero_engine.checkpoint.reader import contents
from zero_engine.checkpoint.source import Source, Span, open_source

Progress = Callable[[int], None]
"""Told how many more bytes are done."""

_JOB_BLOCKS = 64
"""Blocks that a thread checks before it looks for more work; a source may fetch all of them."""


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
    """Blocks [first, last) of one file."""

    file: int
    first: int
    last: int


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
        for first in range(0, len(file.digests), _JOB_BLOCKS):
            yield _Job(number, first, min(first + _JOB_BLOCKS, len(file.digests)))


def _check(checkpoint: Candidate, job: _Job) -> tuple[int, list[Damage]]:
    """The bytes of a job and the damage in them."""
    manifest = checkpoint.manifest
    file = manifest.files[job.file]
    begin, end = job.first * manifest.block_bytes, job.last * manifest.block_bytes
    size = min(end, file.size_bytes) - begin
    try:
        with open_source(checkpoint.path / file.name) as source:
            source.expect([_span(manifest, file, block) for block in range(job.first, job.last)])
            return size, _check_blocks(source, manifest, job)
    except FileNotFoundError:
        return size, [_damage(manifest, job.file, begin, begin + size, "the file is missing")]


def _span(manifest: Manifest, file: FileRecord, block: int) -> Span:
    begin = block * manifest.block_bytes
    return begin, min(manifest.block_bytes, file.size_bytes - begin)


def _check_blocks(source: Source, manifest: Manifest, job: _Job) -> list[Damage]:
    file = manifest.files[job.file]
    buffer = memoryview(bytearray(min(manifest.block_bytes, file.size_bytes)))
    found: list[Damage] = []
    for block in range(job.first, job.last):
        begin, length = _span(manifest, file, block)
        view = buffer[:length]
        problem = _problem(source, view, begin, file.digests[block])
        if problem:
            found.append(_damage(manifest, job.file, begin, begin + len(view), problem))
    return found


def _problem(source: Source, view: memoryview, begin: int, digest: int) -> str:
    try:
        missing = source.read_into([view], begin)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if missing:
        return f"the file ends {missing} bytes too early"
    return "" if xxhash.xxh3_64_intdigest(view) == digest else "XXH3-64 differs"


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


def present_bytes(checkpoint: Candidate) -> dict[str, int]:
    """The sizes of the files that are there now."""
    return {path.name: path.stat().st_size for path in checkpoint.path.iterdir()}
