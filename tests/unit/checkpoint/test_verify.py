"""`zero-ckpt verify`: every byte is read, and all damage is named."""

from __future__ import annotations

import errno
import os

import pytest

from tests.unit.checkpoint.support import adam_state, flip, saved
from zero_checkpoint.tools import locate
from zero_checkpoint.tools.verify import verify


@pytest.fixture
def checkpoint(tmp_path):
    """One of two ranks, in blocks of a page."""
    saved(tmp_path, adam_state(seed=2, width=400))
    return locate.one(str(tmp_path))


def test_a_whole_checkpoint_has_no_damage_and_all_bytes_are_counted(checkpoint):
    counted = []
    assert verify(checkpoint, progress=counted.append) == []
    assert sum(counted) == sum(file.stat().st_size for file in checkpoint.path.glob("r*"))


def test_all_damage_is_found_and_named_with_file_bytes_and_tensors(checkpoint):
    first, second = sorted(checkpoint.path.glob("r*"))
    flip(first, 4096 + 17)
    flip(first, 3 * 4096)
    os.truncate(second, second.stat().st_size - 1)

    damages = verify(checkpoint, threads=3)

    assert [(d.file, d.begin, d.problem) for d in damages] == [
        ("r00000.safetensors", 4096, "XXH3-64 differs"),
        ("r00000.safetensors", 3 * 4096, "XXH3-64 differs"),
        ("r00001.safetensors", damages[2].begin, "the file ends 1 bytes too early"),
    ]
    assert damages[0].tensors == ("param/wte.weight[0:1022]", "buffer/count[0:1]")
    assert damages[2].end == second.stat().st_size + 1


def test_missing_and_grown_files_are_damage(checkpoint):
    first, second = sorted(checkpoint.path.glob("r*"))
    first.unlink()
    with second.open("ab") as file:
        file.write(b"more")
    assert [d.problem for d in verify(checkpoint)] == [
        "the file is missing",
        "the file is 4 bytes too long",
    ]


def test_each_block_that_a_file_lacks_is_named_with_the_bytes_that_it_lacks(checkpoint):
    path = checkpoint.path / "r00001.safetensors"
    size = path.stat().st_size
    last = (size - 1) // 4096 * 4096
    os.truncate(path, last - 5000)
    assert [(d.begin, d.end, d.problem) for d in verify(checkpoint)] == [
        (last - 8192, last - 4096, "the file ends 904 bytes too early"),
        (last - 4096, last, "the file ends 4096 bytes too early"),
        (last, size, f"the file ends {size - last} bytes too early"),
    ]


def test_a_block_that_the_disk_cannot_read_is_the_only_damage_of_its_read(checkpoint, monkeypatch):
    preadv = os.preadv

    def failing(descriptor, buffers, offset):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith("r00001.safetensors") and 0 <= 4096 - offset < sum(map(len, buffers)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    assert [(d.file, d.begin, d.end, d.problem) for d in verify(checkpoint)] == [
        ("r00001.safetensors", 4096, 8192, "cannot be read: Input/output error")
    ]
