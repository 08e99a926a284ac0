"""The tiers themselves: the file without a name, its buffers, and what is in memory."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_contract.errors import ConfigError
from zero_engine.config import load_config
from zero_engine.layout import UnitFacts, kept_in_cpu, offloaded
from zero_engine.sharding.flat_unit import GRAIN
from zero_engine.tiers.nvme import Buffers, Nvme, ReadAhead
from zero_engine.tiers.places import TierError, done, wait
from zero_engine.tiers.scratch import PAGE_BYTES, ScratchFile, aligned

# ---- the scratch file ----


@pytest.mark.parametrize("directory", [None, Path("/dev/shm")], ids=["disk", "tmpfs"])
def test_what_is_streamed_is_what_is_seen_through_the_mapping(
    tmp_path: Path, directory: Path | None
) -> None:
    file = ScratchFile(directory or tmp_path)
    first, second = (file.reserve(n, torch.float32) for n in (5000, 3 * GRAIN))
    assert not first.any()
    assert second.data_ptr() % PAGE_BYTES == 0
    for step in range(3):
        second.copy_(torch.arange(second.numel()) + step)
        part, buffer = second[GRAIN : 2 * GRAIN], aligned(4 * GRAIN)
        file.read(part, buffer)
        assert torch.equal(buffer.view(torch.float32), part)
        buffer.view(torch.float32).mul_(2)
        file.write(part, buffer)
        assert torch.equal(buffer.view(torch.float32), part)
        file.forget_pages()
        assert torch.equal(buffer.view(torch.float32), part)
    assert file.holds(part)
    assert not file.holds(buffer)
    assert not first.any()


def test_many_tensors_take_few_descriptors_and_no_more_room_than_they_need(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    tensors = [file.reserve(n % 7 + 1, torch.int32).fill_(n) for n in range(500)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(t.eq(n).all() for n, t in enumerate(tensors))
    assert file.size_bytes == 501 * PAGE_BYTES
    assert os.fstat(file._cached).st_blocks * 512 < 4 * file.size_bytes


@pytest.mark.corners(end=["kill"])
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_nothing_is_left_over_whatever_ends_the_process(tmp_path: Path, end: str) -> None:
    source = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from zero_engine.tiers.scratch import ScratchFile\n"
        "file = ScratchFile(Path(sys.argv[1]))\n"
        "file.reserve(1 << 20, torch.float32).fill_(1)\n"
        "print(len(os.listdir(sys.argv[1])), flush=True)\n"
        "if sys.argv[2] == 'kill': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", source, str(tmp_path), end]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == (-signal.SIGKILL if end == "kill" else 0), ended.stderr
    assert ended.stdout == "0\n"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"gone \(not accessible\): no scratch file: No such file"):
        ScratchFile(tmp_path / "gone")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts a small disk")
def test_a_full_disk_is_an_error_by_name_before_anything_is_written(tmp_path: Path) -> None:
    source = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from zero_engine.tiers.places import TierError\n"
        "from zero_engine.tiers.scratch import ScratchFile\n"
        "file = ScratchFile(Path(sys.argv[1]))\n"
        "kept = file.reserve(1000, torch.float32).fill_(3)\n"
        "try: file.reserve(1 << 20, torch.float32)\n"
        "except TierError as error: print(error, float(kept.sum()))\n"
    )
    small = f"mount -t tmpfs -o size=1m small '{tmp_path}' && exec \"$@\""
    command = ["unshare", "-m", "sh", "-c", small, "sh", sys.executable, "-c", source]
    ended = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout == (
        f"{tmp_path} (1 MiB free): no room for 4.0 MiB of state: No space left on device; free "
        "room there, or name another directory as nvme_path 3000.0\n"
    ), ended.stderr


class Failing(ScratchFile):
    """A disk that fails after some reads and writes."""

    good = 10**9

    def _count(self) -> None:
        self.good -= 1
        if self.good < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _read_at(self, data: memoryview, position: int) -> int:
        self._count()
        return super()._read_at(data, position)

    def _write_at(self, data: memoryview, position: int) -> int:
        self._count()
        return super()._write_at(data, position)


def test_a_failing_disk_is_an_error_by_name(tmp_path: Path) -> None:
    tier = Nvme(file := Failing(tmp_path), ReadAhead(0, 0))
    held = tier.hold(torch.ones(GRAIN))
    file.good = 0
    named = "Input/output error; the disk is failing: name another one as nvme_path"
    with pytest.raises(TierError, match=f"reading .*{named}"):
        tier.fetch(held, torch.empty(GRAIN))
    tier.put(held, torch.ones(GRAIN))
    with pytest.raises(TierError, match=f"writing .*{named}"):
        tier.settle()


class Stuttering(ScratchFile):
    """A disk that moves half of what it is asked for, as a signal makes it do."""

    def _read_at(self, data: memoryview, position: int) -> int:
        half = max(len(data) // 2 // PAGE_BYTES, 1) * PAGE_BYTES
        return super()._read_at(data[:half], position)


def test_a_short_read_is_gone_on_with(tmp_path: Path) -> None:
    tier = Nvme(Stuttering(tmp_path), ReadAhead(0, 0))
    values = torch.arange(3.0 * GRAIN)
    into = torch.empty_like(values)
    tier.fetch(tier.hold(values), into)
    assert torch.equal(into, values)


def test_a_file_system_without_direct_access_is_used_through_the_cache_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(ScratchFile):
        def _probe(self, direct: int) -> str:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    tier = Nvme(Refusing(tmp_path), ReadAhead(0, 0))
    held, into = tier.hold(torch.ones(GRAIN)), torch.empty(GRAIN)
    tier.put(held, torch.full((GRAIN,), 7.0))
    tier.settle()
    tier.fetch(held, into)
    assert into.eq(7).all()
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: state goes through the page cache: Invalid argument"
    ]


# ---- the tier on it ----


def test_what_was_read_ahead_is_thrown_away_when_it_changes(tmp_path: Path) -> None:
    tier = Nvme(ScratchFile(tmp_path), ReadAhead(2, 1 << 20))
    held = [tier.hold(torch.full((GRAIN,), float(n))) for n in range(3)]
    into = torch.empty(GRAIN)
    for change in range(4):
        for number, each in enumerate(held):
            tier.fetch(each, into)
            assert into.eq(number + 10 * change).all()
        for number, each in enumerate(held):  # the first ones are being read ahead
            values = torch.full((GRAIN,), float(number + 10 * (change + 1)))
            if change % 2:
                each.copy_(values)
                tier.changed()
            else:
                tier.put(each, values)
                values.zero_()
        tier.settle()


def learnt(reads: int, room_bytes: int) -> tuple[ReadAhead, list[Tensor]]:
    """What was asked for in the order a, b, c, a; each is of 1024 bytes."""
    tensors = [torch.empty(256) for _ in range(3)]
    ahead = ReadAhead(reads, room_bytes)
    for each in (*tensors, tensors[0]):
        assert ahead.take(each) is None
    return ahead, tensors


@pytest.mark.parametrize(
    ("reads", "room_bytes", "wanted"), [(2, 2048, 2), (9, 2047, 1), (1, 9999, 1), (9, 1023, 0)]
)
def test_reading_ahead_follows_the_order_of_the_last_time_within_its_room(
    reads: int, room_bytes: int, wanted: int
) -> None:
    ahead, (a, b, c) = learnt(reads, room_bytes)
    assert [id(each) for each in ahead.wanted(a)] == [id(b), id(c)][:wanted]


def test_what_is_being_read_is_not_read_twice() -> None:
    ahead, (a, b, c) = learnt(2, 2048)
    ahead.add(b, done(torch.empty(1)))
    assert [each is c for each in ahead.wanted(a)] == [True]
    ahead.add(c, done(torch.empty(1)))
    assert ahead.wanted(a) == []
    assert ahead.take(b) is not None
    assert ahead.take(b) is None
    assert len(ahead.clear()) == 1


def test_buffers_are_as_many_as_were_in_use_and_as_large_as_the_largest() -> None:
    buffers = Buffers(pin=False)
    for size in (PAGE_BYTES, 3 * PAGE_BYTES, 2 * PAGE_BYTES) * 4:
        held = [buffers.take(size) for _ in range(2)]
        assert all(b.data_ptr() % PAGE_BYTES == 0 and b.numel() >= size for b in held)
        assert held[0].data_ptr() != held[1].data_ptr()
        for buffer in held:
            buffers.give(buffer)
    assert buffers.size_bytes == buffers.peak_bytes == 2 * 3 * PAGE_BYTES


def test_a_lease_is_the_working_set_and_goes_back_whole(tmp_path: Path) -> None:
    tier = Nvme(ScratchFile(tmp_path), ReadAhead(0, 0))
    rows = {name: tier.hold(torch.rand(4 * GRAIN)) for name in ("a", "b")}
    rows["near"] = torch.rand(4 * GRAIN)
    expected = {name: row * 2 for name, row in rows.items()}
    for start in range(0, 4 * GRAIN, GRAIN):
        parts = {name: row[start : start + GRAIN] for name, row in rows.items()}
        lease = wait(tier.open(parts))
        for each in lease.rows.values():
            each.mul_(2)
        wait(tier.close(parts, lease))
    assert all(torch.equal(rows[name], expected[name]) for name in rows)
    assert tier.buffers.peak_bytes == 2 * 4 * GRAIN


# ---- what is decided ----


def test_the_first_units_are_offloaded_until_there_is_the_wanted_part() -> None:
    sizes = [
        UnitFacts(shard=shard, trained=trained)
        for shard, trained in [(40, True), (50, False), (40, True), (20, True)]
    ]
    assert offloaded(sizes, 1.0) == [True, False, True, True]
    assert offloaded(sizes, 0.5) == [True, False, True, False]
    assert offloaded(sizes, 0.4) == [True, False, False, False]
    assert offloaded(sizes, 0.0) == [False] * 4
    assert kept_in_cpu(sizes, 130) == [True, True, True, False]
    assert kept_in_cpu(sizes, 0) == [False] * 4


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, "set stage to 1, 2 or 3"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "0.5 needs stage 3"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 2}}, "is more than 1"),
        (
            {"stage": 3, "offload_param": {"device": "nvme"}},
            "needs zero_optimization.offload_param",
        ),
        (
            {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "here"}},
            "'here' is not an absolute path",
        ),
        ({"stage": 3, "zero_hpz_partition_size": 0}, "0 is less than 1"),
        ({"stage": 1, "zero_hpz_partition_size": 8}, "only stage 3 divides the weights"),
        ({"stage": 2, "zero_quantized_weights": True}, "set stage to 3, or remove it"),
        ({"stage": 3, "offload_optimizer": {"super_offload": True}}, "sub-groups are read"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_remedy(
    zero: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"zero_optimization": zero})
    assert message in str(caught.value)


def test_deepspeeds_older_spelling_means_the_cpu() -> None:
    zero = load_config(
        {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}}
    ).zero_optimization
    assert zero.offload_optimizer.device == zero.offload_param.device == "cpu"
