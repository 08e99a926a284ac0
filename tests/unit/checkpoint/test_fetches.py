"""What a load expects is fetched past the page cache, and whatever hinders that changes nothing."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import weakref
from contextlib import closing

import pytest
import torch

from tests.support.waiting import wait_for
from tests.unit.checkpoint.support import blank, flip, load_all, random_bits, same_bits, saved
from zero_checkpoint.errors import DamagedCheckpoint
from zero_checkpoint.files import chunks, fetches
from zero_checkpoint.files.chunks import zeros
from zero_checkpoint.files.fetches import _CHUNKS, LEAST_BYTES, is_cached
from zero_checkpoint.files.local_file import open_file
from zero_checkpoint.format.pieces import PARAM, TensorId
from zero_checkpoint.format.plan import READ_BYTES

MIB = 1 << 20
CONTENT = random.Random(1).randbytes(9 * MIB + 123)
RUNS = [(0, MIB), (2 * MIB, 4 * MIB), (7 * MIB, MIB), (8 * MIB, MIB + 123)]
"""With gaps, and to the end of the file, which is in the middle of a page."""


@pytest.fixture(autouse=True)
def setting(tmp_path_factory, monkeypatch):
    """Of the kernel: huge pages for who asks for them."""
    path = tmp_path_factory.mktemp("sys") / "enabled"
    path.write_text("always [madvise] never\n")
    monkeypatch.setattr(chunks, "SETTING", path)
    return path


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    forget(path)
    return path


def forget(path):
    """Drop a file from the page cache."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if any(pages(path)):
        pytest.skip("this file system is the page cache")


def pages(path):
    """Whether each page of a file is in the page cache."""
    with path.open("rb") as file:
        return [is_cached(file.fileno(), at) for at in range(0, path.stat().st_size, 4096)]


@pytest.fixture
def reads(monkeypatch):
    """All that is read: past the page cache or not, from where, how many bytes at most."""
    noted, preadv = [], os.preadv

    def noting(descriptor, buffers, offset):
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        noted.append((direct, offset, sum(map(len, buffers))))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noting)
    return noted


def read(path, spans, expected):
    """The bytes of each span, scattered over two buffers and joined again."""
    with open_file(path) as source:
        source.expect(expected)
        return [read_one(source, *span) for span in spans]


def read_one(source, offset, length):
    buffer = memoryview(bytearray(length))
    missing = source.read_into([buffer[: length // 3], buffer[length // 3 :]], offset)
    return bytes(buffer[: length - missing])


def contents(spans, content=CONTENT):
    return [content[offset : offset + length] for offset, length in spans]


def plain(spans):
    return [(False, *span) for span in spans]


def test_exactly_what_is_expected_is_read_and_none_of_it_stays_in_the_page_cache(file, reads):
    assert read(file, RUNS, RUNS) == contents(RUNS)
    whole_pages = [(True, offset, -(-length // 4096) * 4096) for offset, length in RUNS]
    assert sorted(reads) == whole_pages
    assert not any(pages(file))


def test_what_is_in_the_page_cache_is_read_from_there(file, reads):
    file.read_bytes()
    assert read(file, RUNS, RUNS) == contents(RUNS)
    assert reads == plain(RUNS)


def test_short_runs_and_what_nobody_expected_are_read_plainly(file, reads):
    short = [(0, LEAST_BYTES - 4096), (4096, 4096)]
    assert read(file, [*short, *RUNS[2:]], short) == contents([*short, *RUNS[2:]])
    assert reads == plain([*short, *RUNS[2:]])


def test_of_short_runs_the_kernel_is_told_and_reads_nothing_else(file):
    short = [(4096 * at, 4096) for at in (1, 2, 100, 1000)]
    with open_file(file) as source:
        source.expect([*short, (9 * MIB, 123)])
        due = {1, 2, 100, 1000, 9 * MIB // 4096}
        wait_for(
            lambda: {at for at, is_there in enumerate(pages(file)) if is_there} == due, 60, "them"
        )
        assert [read_one(source, *span) for span in short] == contents(short)


def test_something_unexpected_in_between_disturbs_nothing(file, reads):
    spans = [RUNS[0], (MIB, 5), *RUNS[1:]]
    assert read(file, spans, RUNS) == contents(spans)
    assert [one for one in reads if not one[0]] == plain([(MIB, 5)])


@pytest.mark.parametrize("size", [0, 1, 3 * MIB, 9 * MIB + 122])
def test_a_file_that_is_too_short_lacks_as_many_bytes_as_it_does(file, size):
    os.truncate(file, size)
    assert read(file, RUNS, RUNS) == contents(RUNS, CONTENT[:size])


def test_however_much_is_expected_no_more_is_fetched_than_there_are_slabs_for(file, reads):
    with open_file(file) as source:
        source.expect([(at, MIB) for at in range(0, 9 * MIB, MIB)])
    assert len(reads) <= _CHUNKS < 9


def test_the_slabs_go_with_the_file_and_not_only_when_garbage_is_collected(file, monkeypatch):
    taken = []

    def noting(size):
        memory = chunks.zeros(size)
        taken.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(fetches, "zeros", noting)
    gc.disable()
    try:
        assert read(file, RUNS[:2], RUNS) == contents(RUNS[:2])
        assert [chunks() for chunks in taken] == [None]
    finally:
        gc.enable()


def test_a_file_system_that_refuses_is_read_plainly(file, reads, monkeypatch):
    opening = os.open

    def refuse(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reading here")
        return opening(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    assert read(file, RUNS, RUNS) == contents(RUNS)
    assert reads == plain(RUNS)


@pytest.mark.parametrize("text", ["always madvise [never]\n", None])
def test_where_there_are_no_huge_pages_all_is_read_plainly(file, reads, setting, text):
    setting.write_text(text) if text else setting.unlink()
    assert read(file, RUNS, RUNS) == contents(RUNS)
    assert reads == plain(RUNS)


@pytest.mark.parametrize("is_cached", [False, True])
def test_files_of_which_nothing_is_fetched_are_not_held_open(tmp_path, is_cached):
    paths = [tmp_path / f"file{number}" for number in range(200)]
    for path in paths:
        path.write_bytes(CONTENT[: MIB if is_cached else 5000])
        if not is_cached:
            forget(path)
    before = len(os.listdir("/proc/self/fd"))
    with closing(fetches.Fetches()) as ahead:
        ahead.expect((path, (0, path.stat().st_size)) for path in paths)
        assert len(os.listdir("/proc/self/fd")) <= before + 1


@pytest.mark.parametrize("count", [None, 0, 4096])
def test_what_cannot_be_fetched_whole_is_read_plainly(file, monkeypatch, count):
    preadv = os.preadv

    def failing(descriptor, buffers, offset):
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            return preadv(descriptor, buffers, offset)
        if count is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return count

    monkeypatch.setattr(os, "preadv", failing)
    assert read(file, RUNS, RUNS) == contents(RUNS)


FULL = {
    TensorId(kind, fqn): random_bits((MIB,), torch.float32, seed)
    for seed, (kind, fqn) in enumerate([(PARAM, "a"), (PARAM, "b"), ("exp_avg", "a")])
}


def files(directory):
    return sorted(directory.glob("*.safetensors"))


def test_a_load_at_another_world_size_fetches_no_more_than_the_checkpoint(tmp_path, reads):
    directory, target = saved(tmp_path, FULL, 2), blank(FULL)
    for file in files(directory):
        forget(file)
    load_all(tmp_path, target, 3)
    assert same_bits(target, FULL)
    assert all(direct for direct, _, _ in reads)
    assert sum(length for *_, length in reads) <= 1.01 * sum(d.nbytes for d in FULL.values())
    assert not any(any(pages(file)) for file in files(directory))


def test_the_next_file_is_on_its_way_before_this_one_is_at_its_end(tmp_path, reads):
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(CONTENT)
        forget(path)
    with closing(fetches.Fetches()) as ahead:
        ahead.expect((path, span) for path in paths for span in RUNS[:2])
        wait_for(lambda: len(reads) == _CHUNKS, 60, "as many ranges as there are chunks")
        for path in paths:
            with open_file(path, ahead) as source:
                assert [read_one(source, *span) for span in RUNS[:2]] == contents(RUNS[:2])
    assert all(direct for direct, *_ in reads)


def test_a_load_of_many_files_holds_few_of_them_open_and_the_slabs_of_one(tmp_path, monkeypatch):
    directory, target, held, taken = saved(tmp_path, FULL, 24), blank(FULL), [], []
    for file in files(directory):
        forget(file)
    preadv = os.preadv

    def noting(descriptor, buffers, offset):
        held.append(len(os.listdir("/proc/self/fd")))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noting)
    monkeypatch.setattr(fetches, "zeros", lambda size: taken.append(size) or zeros(size))
    before = len(os.listdir("/proc/self/fd"))
    load_all(tmp_path, target, 1)
    assert same_bits(target, FULL)
    assert taken == [_CHUNKS * READ_BYTES]
    assert max(held) - before <= _CHUNKS + 5
    assert len(os.listdir("/proc/self/fd")) == before


def test_damage_in_what_was_fetched_is_found_and_named(tmp_path):
    file = files(saved(tmp_path, FULL, 2))[1]
    flip(file, 3 * MIB)
    forget(file)
    errors = load_all(tmp_path, blank(FULL), 2)
    assert {type(error) for error in errors} == {DamagedCheckpoint}
    assert f"{file}: block {3 * MIB // 4096} " in str(errors[0])
