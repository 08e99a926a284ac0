"""`zero-ckpt verify`: every byte is read, and all damage is named."""

from __future__ import annotations

import os

import pytest

from tests.unit.checkpoint.support import adam_state, flip, saved
from zero_engine.checkpoint.tools import locate
from zero_engine.checkpoint.tools.verify import verify


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
