"""Damaged bytes are found, named, marked, and never trained on; all ranks fall back together."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from pathlib import Path

import pytest

from tests.unit.checkpoint.support import (
    adam_state,
    blank,
    flip,
    load_all,
    on_ranks,
    same_bits,
    saved,
    share,
)
from zero_checkpoint import find
from zero_checkpoint.errors import CheckpointError, DamagedCheckpoint
from zero_checkpoint.files.local_file import MAY_PASS, TRIES
from zero_checkpoint.files.storage import Disk
from zero_checkpoint.loading.candidates import Why, quarantine
from zero_checkpoint.loading.restore import load
from zero_checkpoint.saving.housekeeping import Keep, tidy

OLD, NEW = adam_state(seed=1, width=600), adam_state(seed=2, width=600)


@pytest.fixture
def root(tmp_path):
    saved(tmp_path, OLD, 3, step=1)
    saved(tmp_path, NEW, 3, step=2)
    return tmp_path


def newest(root):
    return find(root).candidates[0]


def flip_first_data_byte(path, file):
    flip(path / file.name, file.data_offset)


def flip_in_the_middle(path, file):
    flip(path / file.name, (file.data_offset + file.size_bytes) // 2)


def flip_last_byte(path, file):
    flip(path / file.name, file.size_bytes - 1)


def truncate_by_a_byte(path, file):
    truncate(path / file.name, 1)


def truncate_by_a_page(path, file):
    truncate(path / file.name, 4096)


def truncate(path, count):
    path.write_bytes(path.read_bytes()[:-count])


def delete(path, file):
    (path / file.name).unlink()


def put_a_pipe_in_its_place(path, file):
    delete(path, file)
    os.mkfifo(path / file.name)


def swap_with_the_next(path, file):
    ours, other = path / file.name, path / "r00002.safetensors"
    ours.rename(path / "spare")
    other.rename(ours)
    (path / "spare").rename(other)


def quarantined(root, bad):
    """The mark of a checkpoint, after a run that has found it damaged has saved."""
    assert not (bad.path / "QUARANTINE").exists()  # who only reads marks nothing
    tidy(root, saved(root, OLD, step=3), Keep())
    return (bad.path / "QUARANTINE").read_text()


HARMS = [
    flip_first_data_byte,
    flip_in_the_middle,
    flip_last_byte,
    truncate_by_a_byte,
    truncate_by_a_page,
    delete,
    put_a_pipe_in_its_place,
    swap_with_the_next,
]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("harm", HARMS)
def test_all_ranks_fall_back_together_and_the_damage_is_named_and_marked(root, caplog, harm, world):
    bad = newest(root)
    harm(bad.path, bad.manifest.files[1])

    target = blank(OLD)
    results = load_all(root, target, world)

    assert [result.manifest.step for result in results] == [1] * world
    assert same_bits(target, OLD)
    reason = quarantined(root, bad)
    assert re.search(rf"{bad.path}/r0000[12].safetensors: block \d+ \(bytes \d+:\d+\)", reason)
    assert re.search(r"it holds (param|exp_avg|exp_avg_sq)/[\w.]+\[\d+:\d+\]", reason)
    assert f"falling back to the checkpoint before: {bad.path}" in caplog.text
    assert [r.why for r in find(root).rejected] == [Why.QUARANTINED]


def test_the_named_range_holds_the_damaged_element(root):
    bad = newest(root)
    rows, ids = bad.manifest.fragments, list(bad.manifest.tensors)
    row = int(rows.length.argmax())
    element = int(rows.length[row]) // 2
    name, file = ids[rows.tensor[row]], bad.manifest.files[rows.file[row]]
    flip(bad.path / file.name, int(rows.offset[row]) + 4 * element)

    load_all(root, blank(OLD), 2)

    reason = quarantined(root, bad)
    assert file.name in reason
    found = re.search(rf"{name.kind}/{re.escape(name.fqn)}\[(\d+):(\d+)\]", reason)
    low, high = map(int, found.groups())
    assert low <= int(rows.start[row]) + element < high
    assert high - low <= 1024  # a block of 4 KiB


class Failing:
    """Reads of one file fail from a byte on: so many times, or always."""

    def __init__(self, monkeypatch, file, number, *, begin=0, times=None):
        self.tried = 0
        self._file, self._number, self._begin, self._times = str(file), number, begin, times
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, descriptor, buffers, offset):
        reaches = offset + sum(map(len, buffers)) > self._begin
        if reaches and os.readlink(f"/proc/self/fd/{descriptor}") == self._file:
            self.tried += 1
            if self._times is None or self.tried <= self._times:
                raise OSError(self._number, os.strerror(self._number))
        return self._preadv(descriptor, buffers, offset)


def test_blocks_that_the_disk_cannot_read_any_more_are_damage(root, monkeypatch):
    bad = newest(root)
    Failing(monkeypatch, bad.path / "r00001.safetensors", errno.EIO, begin=8192)
    target = blank(OLD)
    assert {result.manifest.step for result in load_all(root, target, 3)} == {1}
    assert same_bits(target, OLD)
    reason = quarantined(root, bad)
    said = "cannot be read: Input/output error; it holds"
    assert re.search(rf"r00001.safetensors: block 2 \(bytes 8192:12288\) {said}", reason)


@pytest.mark.parametrize("number", sorted(MAY_PASS))
def test_what_can_be_read_the_next_time_is_no_damage(root, monkeypatch, number):
    best, target = newest(root), blank(NEW)
    failing = Failing(monkeypatch, best.path / "r00001.safetensors", number, times=TRIES)
    assert load_all(root, target)[0].manifest.step == 2
    assert same_bits(target, NEW)
    assert failing.tried > TRIES
    assert find(root).rejected == ()


def test_a_file_that_cannot_be_read_at_all_is_waited_for_only_once(root, monkeypatch):
    bad = newest(root)
    failing = Failing(monkeypatch, bad.path / "r00001.safetensors", errno.EIO)
    load_all(root, blank(OLD), 1)
    assert failing.tried == 1 + TRIES + 1 + 2  # the read, the tries, its first block; both anew


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT])
def test_a_server_that_stays_away_is_an_error_that_blames_no_checkpoint(root, monkeypatch, number):
    best = newest(root)
    file = best.path / "r00001.safetensors"
    Failing(monkeypatch, file, number)
    (error,) = load_all(root, blank(NEW), 1)
    assert isinstance(error, CheckpointError)
    assert str(error).endswith(f"{os.strerror(number)}: '{file}'")
    assert find(root).rejected == ()


def test_a_manifest_that_can_be_read_the_next_time_is_still_the_newest(root, monkeypatch):
    manifest, read, tried = newest(root).path / "MANIFEST.json", Path.read_bytes, []

    def failing(path):
        if path == manifest and (tried.append(path) or len(tried) < TRIES):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    assert load_all(root, blank(NEW))[0].manifest.step == 2
    assert len(tried) >= TRIES


def test_a_flipped_bit_of_a_moment_is_named_by_parameter_and_range(root):
    bad = newest(root)
    ids, rows = list(bad.manifest.tensors), bad.manifest.fragments
    (row, *_) = [n for n, t in enumerate(rows.tensor) if ids[t].kind == "exp_avg"]
    flip(bad.path / bad.manifest.files[rows.file[row]].name, int(rows.offset[row]))
    load_all(root, blank(OLD), 2)
    reason = quarantined(root, bad)
    assert f"exp_avg/{ids[rows.tensor[row]].fqn}[{rows.start[row]}:" in reason


class LongBlocks(Disk):
    block_bytes = 32 << 10


def test_a_flipped_header_is_found_too_where_it_shares_a_block_with_data(tmp_path):
    saved(tmp_path, OLD, 2, step=1, disk=LongBlocks())
    saved(tmp_path, NEW, 2, step=2, disk=LongBlocks())
    flip(newest(tmp_path).path / "r00001.safetensors", 20)
    target = blank(OLD)
    assert {r.manifest.step for r in load_all(tmp_path, target, 3)} == {1}
    assert same_bits(target, OLD)


def test_a_quarantined_checkpoint_is_not_looked_at_again_until_its_marker_is_deleted(root):
    bad = newest(root)
    data = (bad.path / "r00001.safetensors").read_bytes()
    delete(bad.path, bad.manifest.files[1])
    load_all(root, blank(OLD))
    quarantined(root, bad)
    (bad.path / "r00001.safetensors").write_bytes(data)

    assert load_all(root, blank(OLD), tag="t")[0].manifest.step == 3
    (root / newest(root).path / "MANIFEST.json").unlink()
    assert load_all(root, blank(OLD))[0].manifest.step == 1
    (bad.path / "QUARANTINE").unlink()
    target = blank(NEW)
    assert load_all(root, target)[0].manifest.step == 2
    assert same_bits(target, NEW)


def test_a_quarantined_checkpoint_is_verified_once_more_when_nothing_else_is_left(root, caplog):
    for candidate in find(root).candidates:
        quarantine(candidate.path, "a disk that has been replaced")
    older, target = find(root).rejected[-1], blank(NEW)
    assert [result.manifest.step for result in load_all(root, target)] == [2, 2]
    assert same_bits(target, NEW)
    assert "nothing else is left, verified once more" in caplog.text

    flip(root / find(root).rejected[0].path / "r00001.safetensors", 5000)
    target = blank(OLD)
    assert load_all(root, target)[0].path == older.path
    assert same_bits(target, OLD)


class WrongInMemory:
    """A host on which a file reads wrong from the page cache, or in every way."""

    def __init__(self, monkeypatch, file, *, always=False):
        self._file, self._always, self._preadv = str(file), always, os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, descriptor, buffers, offset):
        count = self._preadv(descriptor, buffers, offset)
        cached = not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        if (cached or self._always) and os.readlink(f"/proc/self/fd/{descriptor}") == self._file:
            buffers[0][0] ^= 0xFF
        return count


def test_what_a_second_read_past_the_cache_finds_whole_is_loaded(root, monkeypatch, caplog):
    best, target = newest(root), blank(NEW)
    WrongInMemory(monkeypatch, best.path / "r00001.safetensors")
    assert load_all(root, target)[0].manifest.step == 2
    assert same_bits(target, NEW)
    assert f"{socket.gethostname()} has read what was not saved" in caplog.text


@pytest.mark.parametrize("refused_at", ["open", "read"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_a_direct_read_is_read_through_its_cache(
    root, monkeypatch, number, refused_at
):
    best, target = newest(root), blank(NEW)
    file, is_wrong = best.path / "r00001.safetensors", iter([True])
    real_open, real_read = os.open, os.preadv

    def opened(path, flags, *more, **others):
        if flags & os.O_DIRECT and refused_at == "open":
            raise OSError(number, os.strerror(number), path)
        return real_open(path, flags, *more, **others)

    def read(descriptor, buffers, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        count = real_read(descriptor, buffers, offset)
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(file) and next(is_wrong, False):
            buffers[0][0] ^= 0xFF
        return count

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "preadv", read)
    assert load_all(root, target, 1)[0].manifest.step == 2
    assert same_bits(target, NEW)


def test_a_host_that_reads_wrong_marks_no_checkpoint_that_others_read_well(
    root, monkeypatch, caplog
):
    best = newest(root)
    with monkeypatch.context() as on_that_host:
        WrongInMemory(on_that_host, best.path / "r00001.safetensors", always=True)
        assert load_all(root, blank(OLD))[0].manifest.step == 1
    tidy(root, saved(root, OLD, step=3), Keep())  # on a host that reads well
    assert find(root).rejected == ()
    assert f"{best.path} is not quarantined" in caplog.text


def test_if_every_checkpoint_is_damaged_all_are_named_now_and_at_the_next_try(root):
    paths = [candidate.path for candidate in find(root).candidates]
    for path in paths:
        flip(path / "r00001.safetensors", 5000)

    for _ in range(2):  # the second time, both are quarantined
        errors = load_all(root, blank(OLD), 3)
        assert [type(error) for error in errors] == [DamagedCheckpoint] * 3
        for path in paths:
            assert str(path) in str(errors[0])
        assert "r00001.safetensors" in str(errors[0])


def test_damage_under_a_tag_falls_back_within_the_tag_or_fails(root):
    saved(root, OLD, 2, step=3, tag="best")
    flip(newest(root).path / "r00001.safetensors", 5000)
    for error in load_all(root, blank(OLD), tag="best"):
        assert isinstance(error, DamagedCheckpoint)
    assert load_all(root, blank(OLD), tag="t")[0].manifest.step == 2


def test_a_file_that_cannot_be_read_for_another_reason_is_not_called_damaged(root):
    bad = newest(root)
    file = bad.path / "r00001.safetensors"
    file.unlink()
    file.symlink_to(file)  # ELOOP: works for root too, unlike a missing permission
    for error in load_all(root, blank(OLD), 2):
        assert type(error) is CheckpointError
        assert "could not load" in str(error)
        assert "symbolic links" in str(error)
    assert not (bad.path / "QUARANTINE").exists()


def test_a_rank_that_cannot_see_the_root_is_not_taken_for_damage(root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("other-node")

    def work(consensus):
        place = root if consensus.rank == 0 else elsewhere
        return load(place, consensus, lambda _: share(blank(OLD), consensus.rank, consensus.world))

    for error in on_ranks(2, work):
        assert type(error) is CheckpointError
        assert "rank 1 could not load" in str(error)
        assert "on storage that all nodes share" in str(error)
    assert len(find(root).candidates) == 2


def test_an_error_of_a_load_without_words_is_told_by_its_name(root):
    def work(consensus):
        def wanted(_):
            raise MemoryError

        return load(root, consensus, wanted)

    for error in on_ranks(2, work):
        assert str(error) == f"rank 0 could not load {newest(root).path}: MemoryError"


def test_a_rank_that_dies_while_loading_is_named(root):
    def work(consensus):
        if consensus.rank == 1:
            return consensus.announce(dict)
        return load(root, consensus, lambda _: share(blank(OLD), consensus.rank, consensus.world))

    error, _ = on_ranks(2, work, timeout_s=2.0)
    assert type(error) is CheckpointError
    assert "rank 1 did not report on" in str(error)
    assert len(find(root).candidates) == 2
