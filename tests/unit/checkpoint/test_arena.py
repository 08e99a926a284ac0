"""Memory for a copy of the state: the bytes of the file, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.saving import full_container
from tests.unit.checkpoint.support import adam_state, every_dtype, random_bits, share
from zero_engine.checkpoint import own_layout
from zero_engine.checkpoint.arena import Arena
from zero_engine.checkpoint.pieces import PARAM, TensorId
from zero_engine.checkpoint.room import NoArena, PrivateRoom, SharedRoom, sweep
from zero_engine.checkpoint.storage import Disk
from zero_engine.checkpoint.writer import LiveImage, write_file


def arenas(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(params=["private", "shared"])
def room(request, tmp_path):
    directory = tmp_path / "memory"
    directory.mkdir()
    return PrivateRoom() if request.param == "private" else SharedRoom("job", 1, directory)


@pytest.mark.parametrize("full", [adam_state(), every_dtype()], ids=["adam", "dtypes"])
def test_the_copy_is_byte_for_byte_the_file(tmp_path, room, full):
    layout = own_layout(share(full, 1, 2), 1)
    image = Arena(room).freeze(layout)
    write_file(tmp_path / "live", LiveImage(layout), 4096, Disk())
    record = write_file(tmp_path / "frozen", image, 4096, Disk())
    assert (tmp_path / "frozen").read_bytes() == (tmp_path / "live").read_bytes()
    assert record.size_bytes == layout.size_bytes


def test_the_copy_does_not_change_when_the_tensors_do(room):
    full = {TensorId(PARAM, "w"): random_bits((5, 7), adam_state().popitem()[1].dtype, 1)}
    layout = own_layout(share(full, 0, 1), 0)
    image = Arena(room).freeze(layout)
    before = b"".join(image.slabs())
    for data in full.values():
        data.zero_()
    assert b"".join(image.slabs()) == before


def test_the_memory_is_used_again_and_grows_if_need_be(tmp_path):
    arena = Arena(SharedRoom("my job/1", 3, tmp_path))
    arena.freeze(own_layout(share(adam_state(), 0, 1), 0))
    (first,) = arenas(tmp_path)
    assert first.startswith("zero-arena.my-job-1.r00003.")
    arena.freeze(own_layout(share(adam_state(seed=5), 0, 1), 0))
    assert arenas(tmp_path) == [first]
    arena.freeze(own_layout(share(adam_state(width=40_000), 0, 1), 0))
    (second,) = arenas(tmp_path)
    assert second != first
    arena.close()
    assert arenas(tmp_path) == []


def test_an_image_stays_readable_after_its_arena_is_closed(room):
    arena = Arena(room)
    image = arena.freeze(own_layout(share(adam_state(), 0, 1), 0))
    before = b"".join(image.slabs())
    arena.close()
    assert b"".join(image.slabs()) == before


def hold_an_arena(directory, ready):
    arena = Arena(SharedRoom("job", 0, directory))
    arena.freeze(own_layout(share(adam_state(), 0, 1), 0))
    ready.send(True)
    ready.poll(60)  # nobody says anything


def test_what_a_killed_process_has_left_is_swept_and_what_a_living_one_has_is_not(tmp_path):
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe()
    process = context.Process(target=hold_an_arena, args=(tmp_path, send), daemon=True)
    process.start()
    assert receive.poll(60)
    own = Arena(SharedRoom("job", 1, tmp_path))
    own.freeze(own_layout(share(adam_state(), 0, 1), 0))
    assert len(arenas(tmp_path)) == 2
    sweep(tmp_path)
    assert len(arenas(tmp_path)) == 2
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert len(arenas(tmp_path)) == 2
    sweep(tmp_path)
    (left,) = arenas(tmp_path)
    assert left.startswith("zero-arena.job.r00001.")
    own.close()


def test_a_sweep_of_a_directory_that_is_not_there_does_nothing(tmp_path):
    sweep(tmp_path / "none")


def test_too_little_room_is_said_with_the_remedy_and_nothing_stays(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs privileges")
    try:
        layout = own_layout(share(adam_state(width=10_000), 0, 1), 0)
        says = f"{tmp_path} has room for 1 MiB, the state takes 2 MiB; enlarge it"
        with pytest.raises(NoArena, match=says):
            Arena(SharedRoom("job", 0, tmp_path)).freeze(layout)
        assert arenas(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_private_memory_is_not_copied_for_a_child_process(tmp_path):
    arena = Arena(PrivateRoom())
    arena.freeze(own_layout(share(adam_state(), 0, 1), 0))
    child = os.fork()
    if not child:
        os.execv("/bin/cp", ["cp", f"/proc/{os.getppid()}/smaps", str(tmp_path / "smaps")])
    assert os.waitpid(child, 0)[1] == 0
    flags = [line.split() for line in (tmp_path / "smaps").read_text().splitlines()]
    assert any("dc" in words and "hg" in words for words in flags if words[0] == "VmFlags:")


def test_more_than_the_machine_has_left_is_said_and_not_taken():
    with pytest.raises(NoArena, match=f"MiB of memory left, the state takes {1 << 30} MiB"):
        PrivateRoom().reserve(1 << 50)


def test_more_than_the_container_has_left_is_said_and_not_taken(tmp_path):
    with (
        full_container(tmp_path),
        pytest.raises(NoArena, match="has 0 MiB of memory left, the state takes 8 MiB"),
    ):
        PrivateRoom().reserve(8 << 20)
