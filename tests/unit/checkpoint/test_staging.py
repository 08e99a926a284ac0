"""Memory for a copy of the state: the bytes of the file, and nothing left behind."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import resource
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.saving import full_container
from tests.unit.checkpoint.support import (
    SMALL,
    adam_state,
    every_dtype,
    names,
    on_ranks,
    random_bits,
    share,
)
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.chunks import CHUNK_BYTES
from zero_checkpoint.files.storage import Disk
from zero_checkpoint.files.writer import LiveImage, write_file
from zero_checkpoint.format.pieces import PARAM, Piece, State, TensorId, TensorInfo
from zero_checkpoint.saving.commit import own_layout, save
from zero_checkpoint.saving.staging import Background, StagingBuffer
from zero_checkpoint.saving.staging_memory import (
    NoStagingMemory,
    PrivateStaging,
    SharedStaging,
    sweep,
)


def stagings(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(params=["private", "shared"])
def room(request, tmp_path):
    directory = tmp_path / "memory"
    directory.mkdir()
    return PrivateStaging() if request.param == "private" else SharedStaging("job", 1, directory)


@pytest.mark.parametrize("full", [adam_state(), every_dtype()], ids=["adam", "dtypes"])
def test_the_copy_is_byte_for_byte_the_file(tmp_path, room, full):
    layout = own_layout(share(full, 1, 2), 1)
    image = StagingBuffer(room).snapshot(layout)
    write_file(tmp_path / "live", LiveImage(layout), 4096, Disk())
    record = write_file(tmp_path / "frozen", image, 4096, Disk())
    assert (tmp_path / "frozen").read_bytes() == (tmp_path / "live").read_bytes()
    assert record.size_bytes == layout.size_bytes


def test_the_copy_does_not_change_when_the_tensors_do(room):
    full = {TensorId(PARAM, "w"): random_bits((5, 7), adam_state().popitem()[1].dtype, 1)}
    layout = own_layout(share(full, 0, 1), 0)
    image = StagingBuffer(room).snapshot(layout)
    before = b"".join(image.chunks())
    for data in full.values():
        data.zero_()
    assert b"".join(image.chunks()) == before


def large() -> State:
    """A state of three chunks."""
    return share({TensorId(PARAM, "w"): random_bits((5 << 19, 4), torch.float32, 2)}, 0, 1)


def unreadable() -> State:
    """A state whose last tensor cannot be copied, after more than two chunks that can."""
    first, last = TensorId(PARAM, "a"), TensorId(PARAM, "b")
    data = {first: torch.ones(10 << 20), last: torch.ones(4, device="meta")}
    info = {tensor: TensorInfo(tuple(d.shape), d.dtype) for tensor, d in data.items()}
    return State(info, tuple(Piece(tensor, 0, d) for tensor, d in data.items()))


def test_an_image_is_read_from_when_its_copy_begins(room):
    layout = own_layout(large(), 0)
    with ThreadPoolExecutor(1) as reader:
        begun = []

        def begin(image):
            assert not any(part.done() for part in image.copied)
            begun.append(reader.submit(lambda: [bytes(chunk) for chunk in image.chunks()]))

        image = StagingBuffer(room).snapshot(layout, begin)
        assert b"".join(begun[0].result(60)) == b"".join(map(bytes, LiveImage(layout).chunks()))
    assert [len(chunk) for chunk in image.chunks()] == [
        CHUNK_BYTES,
        CHUNK_BYTES,
        len(layout.head) + (8 << 20),
    ]


def test_who_reads_an_image_hears_that_its_copy_was_broken_off(room):
    with ThreadPoolExecutor(1) as reader:
        seen, begun = [], []

        def read(image):
            seen.extend(map(len, image.chunks()))

        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            StagingBuffer(room).snapshot(
                own_layout(unreadable(), 0), lambda image: begun.append(reader.submit(read, image))
            )
        with pytest.raises(CheckpointError, match="the copy of the state was broken off"):
            begun[0].result(60)
    assert seen == [CHUNK_BYTES]


def test_who_is_interrupted_before_the_copy_leaves_nobody_waiting_for_it(room):
    images = []

    def interrupted(image):
        images.append(image)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        StagingBuffer(room).snapshot(own_layout(large(), 0), interrupted)
    with pytest.raises(CheckpointError, match="the copy of the state was broken off"):
        next(images[0].chunks())


def test_a_copy_that_is_broken_off_on_one_rank_fails_the_save_on_all(tmp_path):
    full = adam_state()

    def work(consensus):
        state, images = share(full, consensus.rank, 2), []

        def interrupted(image):
            images.append(image)
            raise KeyboardInterrupt

        staging = StagingBuffer(PrivateStaging())
        if consensus.rank == 1:
            with pytest.raises(KeyboardInterrupt):
                staging.snapshot(own_layout(state, 1), interrupted)
        else:
            staging.snapshot(own_layout(state, 0), images.append)
        settings = {"step": 1, "tag": "t", "round": 0, "fence": None, "disk": SMALL}
        return save(tmp_path, state, consensus, image=images[0], **settings)

    errors = on_ranks(2, work)
    says = r"rank 1: .*r00001.safetensors: the copy of the state was broken off"
    for error in errors:
        with pytest.raises(CheckpointError, match=says):
            raise error
    assert names(tmp_path) == []


def test_the_memory_is_used_again_and_grows_if_need_be(tmp_path):
    staging = StagingBuffer(SharedStaging("my job/1", 3, tmp_path))
    staging.snapshot(own_layout(share(adam_state(), 0, 1), 0))
    (first,) = stagings(tmp_path)
    assert first.startswith("zero-staging.my-job-1.r00003.")
    staging.snapshot(own_layout(share(adam_state(seed=5), 0, 1), 0))
    assert stagings(tmp_path) == [first]
    staging.snapshot(own_layout(share(adam_state(width=40_000), 0, 1), 0))
    (second,) = stagings(tmp_path)
    assert second != first
    staging.close()
    assert stagings(tmp_path) == []


def test_an_image_stays_readable_after_its_arena_is_closed(room):
    staging = StagingBuffer(room)
    image = staging.snapshot(own_layout(share(adam_state(), 0, 1), 0))
    before = b"".join(image.chunks())
    staging.close()
    assert b"".join(image.chunks()) == before


def hold_a_staging_buffer(directory, ready):
    staging = StagingBuffer(SharedStaging("job", 0, directory))
    staging.snapshot(own_layout(share(adam_state(), 0, 1), 0))
    ready.send(True)
    ready.poll(60)  # nobody says anything


def test_what_a_killed_process_has_left_is_swept_and_what_a_living_one_has_is_not(tmp_path):
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe()
    process = context.Process(target=hold_a_staging_buffer, args=(tmp_path, send), daemon=True)
    process.start()
    assert receive.poll(60)
    own = StagingBuffer(SharedStaging("job", 1, tmp_path))
    own.snapshot(own_layout(share(adam_state(), 0, 1), 0))
    assert len(stagings(tmp_path)) == 2
    sweep(tmp_path)
    assert len(stagings(tmp_path)) == 2
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert len(stagings(tmp_path)) == 2
    sweep(tmp_path)
    (left,) = stagings(tmp_path)
    assert left.startswith("zero-staging.job.r00001.")
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
        with pytest.raises(NoStagingMemory, match=says):
            StagingBuffer(SharedStaging("job", 0, tmp_path)).snapshot(layout)
        assert stagings(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_private_memory_is_not_copied_for_a_child_process(tmp_path):
    staging = StagingBuffer(PrivateStaging())
    staging.snapshot(own_layout(share(adam_state(), 0, 1), 0))
    child = os.fork()
    if not child:
        os.execv("/bin/cp", ["cp", f"/proc/{os.getppid()}/smaps", str(tmp_path / "smaps")])
    assert os.waitpid(child, 0)[1] == 0
    flags = [line.split() for line in (tmp_path / "smaps").read_text().splitlines()]
    assert any("dc" in words and "hg" in words for words in flags if words[0] == "VmFlags:")


def test_more_than_the_machine_has_left_is_said_and_not_taken():
    with pytest.raises(NoStagingMemory, match=f"MiB of memory left, the state takes {1 << 30} MiB"):
        PrivateStaging().reserve(1 << 50)


def test_more_than_the_container_has_left_is_said_and_not_taken(tmp_path):
    with (
        full_container(tmp_path),
        pytest.raises(NoStagingMemory, match="has 0 MiB of memory left, the state takes 8 MiB"),
    ):
        PrivateStaging().reserve(8 << 20)


def test_where_the_process_may_have_no_more_memory_training_waits_for_the_save():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))
    try:
        with pytest.raises(NoStagingMemory, match="no memory for a copy of the state, 256 MiB"):
            PrivateStaging().reserve(256 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_what_the_kernel_drops_when_memory_is_needed_is_left(tmp_path):
    """Training data that were read twice are active pages of the cache."""
    with full_container(tmp_path):
        facts = f"anon 4096\nactive_file {16 << 20}\ninactive_file 4096\n"
        (tmp_path / "memory.stat").write_text(facts)
        with PrivateStaging().reserve(8 << 20) as memory:
            assert len(memory) == 8 << 20


class Preempted(Exception):
    """What a script raises in its handler of a signal."""


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "not begun"])
def test_a_save_whose_begin_is_interrupted_is_in_flight_or_never_runs(monkeypatch, begun):
    written, runs, may_write = [], threading.Event(), threading.Event()
    starts = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if begun:
            starts(thread)
            assert runs.wait(60)
        raise Preempted

    def save(_: object) -> str:
        runs.set()
        assert may_write.wait(60)
        written.append("step 1")
        return "step 1"

    background = Background()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(Preempted):
            background.start(1, save)
    interrupted = background._thread
    assert background.busy is begun
    may_write.set()
    if begun:
        assert background.wait().path == "step 1"
    else:
        interrupted.start()
        interrupted.join(60)
    assert written == ["step 1"] * begun
