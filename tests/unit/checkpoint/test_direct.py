"""The way that is measured to be faster is the one that is used, and the bytes are the same."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random

import pytest

from zero_checkpoint.files import direct
from zero_checkpoint.files.direct import TRIAL_BYTES, DirectDisk, Trial, Way


def feed(trial, cached_s, direct_s):
    """Measure until it is over; the ways tried."""
    tried = []
    while not trial.over:
        tried.append(trial.way)
        trial.seconds[trial.way].append(cached_s if trial.way is Way.CACHED else direct_s)
    return tried


@pytest.mark.parametrize(
    ("cached_s", "direct_s", "best"), [(2.0, 1.0, Way.DIRECT), (1.0, 2.0, Way.CACHED)]
)
def test_both_ways_are_tried_in_turn_and_the_faster_stays(cached_s, direct_s, best):
    trial = Trial()
    assert feed(trial, cached_s, direct_s) == [Way.CACHED, Way.DIRECT] * 3
    assert trial.way is best


def test_slow_writes_do_not_decide():
    trial = Trial(seconds={Way.CACHED: [1.0, 1.0, 1.0], Way.DIRECT: [9.0, 9.0, 0.5]})
    assert trial.over
    assert trial.way is Way.DIRECT


def test_what_is_refused_is_never_tried_again():
    trial = Trial(refused=True)
    for _ in range(100):
        trial.use(1 << 30)
    assert trial.over
    assert trial.way is Way.CACHED


def test_a_way_that_was_found_on_a_busy_disk_is_not_kept_for_good():
    trial = Trial()
    feed(trial, cached_s=1.0, direct_s=2.0)
    used = 0
    while trial.over:
        trial.use(1 << 30)
        used += 1
    assert used == 8
    assert feed(trial, cached_s=2.0, direct_s=1.0) == [Way.CACHED, Way.DIRECT] * 3
    assert trial.way is Way.DIRECT


def test_a_trial_that_finds_the_same_again_says_nothing(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(direct, "_GOOD_FOR_BYTES", 1)
    disk = Spy(dict.fromkeys(Way, 1.0))
    with disk.create(tmp_path / "file") as file:
        for _ in range(2):
            for part in chunks(7, b"")[1]:
                disk.write(file, part)
    assert disk.ways[:6] == disk.ways[7:13]
    assert len(caplog.messages) == 1


class Spy(DirectDisk):
    """Notes in which way each chunk was written, on a clock of its own."""

    def __init__(self, cost_s):
        self.now_s = 0.0
        super().__init__(clock=lambda: self.now_s)
        self.cost_s, self.ways = cost_s, []

    def _write(self, file, data, trial):
        super()._write(file, data, trial)
        flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
        way = Way.DIRECT if flags & os.O_DIRECT else Way.CACHED
        self.ways.append(way)
        self.now_s += self.cost_s[way]


def chunks(count, tail=b"tail"):
    memory = mmap.mmap(-1, count * TRIAL_BYTES + len(tail))
    memory[:] = random.Random(1).randbytes(len(memory))
    whole = memoryview(memory)
    begins = range(0, len(memory), TRIAL_BYTES)
    return bytes(memory), [whole[begin : begin + TRIAL_BYTES] for begin in begins]


@pytest.mark.parametrize("best", list(Way))
def test_a_file_written_in_both_ways_holds_what_was_written(tmp_path, best):
    whole, parts = chunks(8)
    disk = Spy({way: 1.0 if way is best else 2.0 for way in Way})
    with disk.create(tmp_path / "file") as file:
        disk.write(file, b"")
        for part in parts:
            disk.write(file, part)
        disk.sync(file)
    assert (tmp_path / "file").read_bytes() == whole
    if Way.DIRECT in disk.ways:  # else this file system refuses, and all of it is cached
        assert disk.ways == [Way.CACHED, Way.DIRECT] * 3 + [best] * 2
    with disk.create(tmp_path / "unaligned") as file:
        disk.write(file, b"head")
        for part in parts:
            disk.write(file, part)
    assert (tmp_path / "unaligned").read_bytes() == b"head" + whole


def test_the_last_slab_of_a_file_is_written_like_the_others_but_for_its_last_bytes(tmp_path):
    whole, parts = chunks(8, tail=b"t" * (TRIAL_BYTES // 2 + 5))
    disk = Spy({way: 1.0 if way is Way.DIRECT else 2.0 for way in Way})
    with disk.create(tmp_path / "file") as file:
        for part in parts:
            disk.write(file, part)
    assert (tmp_path / "file").read_bytes() == whole
    if Way.DIRECT in disk.ways:
        assert disk.ways == [Way.CACHED, Way.DIRECT] * 3 + [Way.DIRECT] * 3


def test_a_file_system_that_refuses_gets_everything_through_the_cache(tmp_path, monkeypatch):
    def refuse(_, wanted):
        if wanted:
            raise OSError(errno.EINVAL, "no direct writing here")

    monkeypatch.setattr(direct, "_set_direct", refuse)
    whole, parts = chunks(3)
    disk = DirectDisk()
    with disk.create(tmp_path / "file") as file:
        for part in parts:
            disk.write(file, part)
        disk.sync(file)
    assert (tmp_path / "file").read_bytes() == whole
    assert [trial.refused for trial in disk._trials.values()] == [True]
