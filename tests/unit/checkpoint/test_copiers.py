"""Copies of the state that a device makes: in which order, for how long, and what if one fails.

There is no device here. What a driver would do is recorded, in the order in which it is asked.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests.unit.checkpoint.support import adam_state, share
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.chunks import Copy, zeros
from zero_checkpoint.files.writer import LiveImage
from zero_checkpoint.format.pieces import BUFFER
from zero_checkpoint.saving import copiers
from zero_checkpoint.saving.commit import own_layout
from zero_checkpoint.saving.copiers import (
    AtOnce,
    Made,
    OnStream,
    address_of,
    await_copy,
    copier_of,
    device_of,
)
from zero_checkpoint.saving.staging import FrozenImage, StagingBuffer
from zero_checkpoint.saving.staging_memory import NoStagingMemory, PrivateStaging
from zero_contract.errors import PeerLost

DEVICE = torch.device("cuda", 0)


class Driver:
    """Stands in for the functions of `torch.cuda`, and writes down what it is asked."""

    def __init__(self, monkeypatch) -> None:
        self.asked: list[str] = []
        self.code, self.busy, self.lost = 0, False, False
        for name in ("current_stream", "stream", "Stream", "Event", "cudart", "CudaError"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(copiers, "_drop_error", lambda _: self.asked.append("drop error"))

    def cudart(self):
        return SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        self.asked.append(f"pin {size_bytes >> 20} MiB")
        return self.code

    def unregister(self, address: int) -> int:
        self.asked.append("unpin")
        return 0

    def CudaError(self, code: int) -> RuntimeError:  # noqa: N802
        return RuntimeError(f"out of memory ({code})")

    def make(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.asked.append(f"{name} waits for {other.name}"),
            wait_event=lambda _: self.asked.append(f"{name} waits for the copy"),
        )

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return self.make("current")

    def Stream(self, device: torch.device) -> SimpleNamespace:  # noqa: N802
        return self.make("side")

    @contextmanager
    def stream(self, stream: SimpleNamespace):
        self.asked.append(f"on {stream.name}")
        yield

    def Event(self) -> SimpleNamespace:  # noqa: N802
        def query() -> bool:
            if self.lost:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return not self.busy

        return SimpleNamespace(
            record=lambda stream: self.asked.append(f"record on {stream.name}"), query=query
        )


@pytest.fixture
def driver(monkeypatch) -> Driver:
    return Driver(monkeypatch)


def on_device(device: torch.device, memory, beside: bool) -> OnStream:
    """The state of a test is in host memory; its copier believes that it is on a device."""
    return OnStream(DEVICE, memory, beside=beside)


def layout():
    return own_layout(share(adam_state(), 0, 1), 0)


def snapshot(staging: StagingBuffer) -> FrozenImage:
    return staging.snapshot(layout())


def test_the_bytes_are_those_of_the_state_and_the_next_writer_waits_by_its_stream(driver):
    before_change = []
    staging = StagingBuffer(PrivateStaging(), before_change=before_change, choose=on_device)
    driver.busy = True
    state = layout()
    image = staging.snapshot(state)
    assert driver.asked == [
        "pin 2 MiB",
        "side waits for current",
        "on side",
        "side waits for current",
        "record on side",
    ]
    for hold in before_change:
        hold()
    assert driver.asked[5:] == ["current waits for the copy"]
    driver.busy = False
    assert b"".join(image.chunks()) == b"".join(map(bytes, LiveImage(state).chunks()))
    for hold in before_change:
        hold()
    staging.close()
    assert driver.asked[6:] == ["unpin"]


def test_memory_is_pinned_once_for_all_saves(driver):
    staging = StagingBuffer(PrivateStaging(), choose=on_device)
    for _ in range(3):
        snapshot(staging)
    assert [each for each in driver.asked if "pin" in each] == ["pin 2 MiB"]


def test_memory_that_nobody_closes_is_unpinned_before_it_is_unmapped(driver):
    staging = StagingBuffer(PrivateStaging(), choose=on_device)
    snapshot(staging)
    del staging
    assert driver.asked[-1] == "unpin"


def test_memory_that_cannot_be_pinned_is_copied_to_at_once_and_one_warning_says_why(driver, caplog):
    copiers._warn_once.cache_clear()
    driver.code = 2
    with caplog.at_level(logging.WARNING):
        found = [copier_of(DEVICE, zeros(1 << 20), True) for _ in range(2)]
    assert all(isinstance(each, AtOnce) for each in found)
    assert driver.asked == ["pin 1 MiB", "drop error"] * 2
    assert caplog.messages == [
        "training waits while the state is copied, as memory is not pinned: out of memory (2)"
    ]


def test_a_state_in_host_memory_is_copied_at_once():
    assert isinstance(copier_of(device_of(layout()), zeros(1 << 20), True), AtOnce)


def test_what_a_forward_may_change_is_known_to_the_layout():
    full = adam_state()
    buffers = [data for key, data in full.items() if key.kind == BUFFER]
    assert own_layout(share(full, 0, 1), 0).changing == {*map(address_of, buffers)}


class Stuck(Made):
    """A copy that does not end."""

    def under_way(self) -> bool:
        return True


def test_a_copy_that_does_not_end_is_an_error_of_its_reader_after_a_limit(monkeypatch):
    monkeypatch.setattr(copiers, "LIMIT_S", 0.02)
    with pytest.raises(CheckpointError, match=r"the device has not copied the state within 0.02 s"):
        await_copy(Stuck(memoryview(b"")), lambda: None)


def test_who_waits_for_a_copy_hears_that_the_group_is_lost():
    def on_wait() -> None:
        raise PeerLost("the group broke")

    with pytest.raises(PeerLost, match="the group broke"):
        await_copy(Stuck(memoryview(b"")), on_wait)


def test_memory_that_a_device_may_still_write_to_is_neither_used_again_nor_unpinned(
    driver, monkeypatch, caplog
):
    staging = StagingBuffer(PrivateStaging(), choose=on_device)
    snapshot(staging)
    driver.busy = True
    monkeypatch.setattr(copiers, "LIMIT_S", 0.02)
    with pytest.raises(NoStagingMemory, match="a device still copies the state"):
        snapshot(staging)
    staging.close()
    assert "unpin" not in driver.asked
    assert caplog.messages == [
        "cuda:0 has not ended a copy of the state within 0.02 s; 2 MiB of memory are not freed"
    ]
    copiers._kept.clear()


def test_a_lost_device_fails_the_save(driver):
    staging = StagingBuffer(PrivateStaging(), choose=on_device)
    image = snapshot(staging)
    driver.lost = True
    says = "the state could not be copied: CUDA error: an illegal memory access"
    with pytest.raises(CheckpointError, match=says):
        next(image.chunks())


def test_a_copy_that_cannot_begin_fails_its_save_and_not_its_caller(driver, monkeypatch):
    def refuse(copy: Copy) -> None:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(Copy, "begin", refuse)
    staging = StagingBuffer(PrivateStaging(), choose=on_device)
    image = snapshot(staging)
    assert driver.asked[-1] == "record on side"
    with pytest.raises(CheckpointError, match="could not be copied: CUDA error: invalid argument"):
        next(image.chunks())


def test_an_error_of_the_program_is_raised_where_the_copy_begins(driver, monkeypatch):
    """It would fail every save, and its traceback says where it was made."""

    def wrong(_: Copy) -> None:
        raise RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")

    staging = StagingBuffer(PrivateStaging(), choose=on_device)
    monkeypatch.setattr(Copy, "begin", wrong)
    with pytest.raises(RuntimeError, match="must match"):
        snapshot(staging)
    assert driver.asked[-1] == "record on side"
