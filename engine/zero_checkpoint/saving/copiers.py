"""Copies of the state into a staging buffer: by the CPU at once, or by a device beside training.

A device copies into memory that is registered with its driver (pinned), on a stream of its own,
which first waits for the current one. The host does not wait: forward and backward run meanwhile,
and whoever changes the state next waits for the copy by its stream (`hold`). A copy that fails is
an error of the save that reads it, and never of training.
"""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.chunks import Copy
from zero_checkpoint.format.layout import FileLayout

_log = logging.getLogger(__name__)

LIMIT_S = 120.0
"""The time that a device has for a copy. It has at most the rest of one step to do first."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of this process."""

BeforeChange = list[Callable[[], object]]
"""Functions that are called before weights or optimizer state change."""


class Begun(Protocol):
    """A copy that has begun."""

    @property
    def memory(self) -> memoryview:
        """Its target, complete once it is no longer under way."""

    @property
    def failure(self) -> str:
        """Why it has failed; empty if it has not."""

    def under_way(self) -> bool:
        """Whether it may still read its sources, or write to its target."""


class Copier(Protocol):
    """Makes the copies of one staging buffer."""

    def prepare(self, copy: Copy, changing: Container[int]) -> Callable[[], Begun]:
        """Returns what begins the copy, as often as it is called.

        What lies where `FileLayout.changing` says is not copied beside training.
        """

    def hold(self) -> None:
        """Let what the caller does to the sources from now on come after the copies."""

    def settle(self) -> bool:
        """Wait until no copy is under way; False: one has not ended in time."""

    def close(self) -> None:
        """Release the memory, for which it was made."""


Choose = Callable[[torch.device, mmap.mmap, bool], Copier]
"""From device, memory, and whether copies may run beside training, to the copier."""


def copier_of(device: torch.device, memory: mmap.mmap, beside: bool) -> Copier:
    """The copier from a device to a staging buffer; see `Choose`."""
    if device.type != "cuda":
        return AtOnce()
    try:
        return OnStream(device, memory, beside=beside)
    except RuntimeError as error:
        _warn_once(f"training waits while the state is copied, as memory is not pinned: {error}")
        return AtOnce()


def device_of(layout: FileLayout) -> torch.device:
    """The device of a state: that of its first tensor which is not in host memory."""
    here = torch.device("cpu")
    return next((each.device for each in layout.data if each.device != here), here)


def await_copy(copy: Begun, on_wait: Callable[[], object]) -> memoryview:
    """The target of a copy, once it is made; `on_wait` is called meanwhile, and may raise.

    Raises:
        CheckpointError: The copy has failed, or has not ended in time.
    """
    if not _has_ended(copy, on_wait):
        raise CheckpointError(f"the device has not copied the state within {LIMIT_S:g} s")
    if copy.failure:
        raise CheckpointError(f"the state could not be copied: {copy.failure}")
    return copy.memory


def _has_ended(copy: Begun, on_wait: Callable[[], object]) -> bool:
    """Wait for the end of a copy, whatever it is; False: it has not ended in time."""
    begin_s = time.monotonic()
    while copy.under_way():
        waited_s = time.monotonic() - begin_s
        if waited_s >= LIMIT_S:
            return False
        on_wait()
        # The end of a short copy is seen at once; a long one is rarely asked about.
        time.sleep(min(max(_FIRST_PAUSE_S, waited_s / 20), _LONGEST_PAUSE_S))
    return True


def divide(copy: Copy, is_first: Callable[[Tensor], bool]) -> tuple[Copy, Copy]:
    """The copy as two: from the sources that have to be read first, and from the others."""

    def part(first: bool) -> Copy:
        pairs = zip(copy.targets, copy.sources, strict=True)
        chosen = [(target, source) for target, source in pairs if is_first(source) == first]
        return Copy(copy.memory, tuple(t for t, _ in chosen), [s for _, s in chosen])

    return part(True), part(False)


def address_of(source: Tensor) -> int:
    """The address of the memory that a tensor is a view of, as in `FileLayout.changing`."""
    return source.untyped_storage().data_ptr()


# ---- the CPU ----


@dataclass(frozen=True, slots=True)
class Made:
    """A copy that is made."""

    memory: memoryview
    failure: str = ""

    def under_way(self) -> bool:
        """No."""
        return False


class AtOnce:
    """Copies while its caller waits; errors are raised to the caller."""

    def prepare(self, copy: Copy, changing: Container[int]) -> Callable[[], Begun]:
        """See `Copier`."""
        del changing
        return lambda: Made(copy.make())

    def hold(self) -> None:
        """Nothing is under way."""

    def settle(self) -> bool:
        """Nothing is under way."""
        return True

    def close(self) -> None:
        """There is nothing to release."""


# ---- a device ----


@dataclass(slots=True, eq=False)
class _Streamed:
    """A copy of a device; it keeps its tensors alive, so that nobody else gets their memory."""

    copy: Copy
    event: torch.cuda.Event
    failure: str = ""

    @property
    def memory(self) -> memoryview:
        return self.copy.memory

    def under_way(self) -> bool:
        try:
            return not self.event.query()
        except RuntimeError as error:  # the device is lost, and training ends by its own error
            self.failure = str(error)
            return False


class OnStream:
    """Copies from a device on a stream of its own, to memory that is pinned meanwhile."""

    def __init__(self, device: torch.device, memory: mmap.mmap, *, beside: bool) -> None:
        """Pin the memory, which takes as long as its pages have to be allocated.

        Args:
            device: The device of the state.
            memory: A staging buffer.
            beside: Copy beside what the current stream does next, which then must not change the
                state before `hold`. If not, that comes after the copy; only the host does not wait.

        Raises:
            RuntimeError: The driver refuses to pin the memory; the message says why.
        """
        self._device = device
        self._beside = beside
        self._begun: list[_Streamed] = []
        # Python's mmap does not say where it is.
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        code = int(torch.cuda.cudart().cudaHostRegister(address, len(memory), _PORTABLE))
        if code:
            _drop_error(device)
            raise torch.cuda.CudaError(code)
        self._stream = torch.cuda.Stream(device)
        self._release = weakref.finalize(self, _unpin, device, memory, address, self._begun)
        self._release.atexit = False  # the process takes the memory with it

    def prepare(self, copy: Copy, changing: Container[int]) -> Callable[[], Begun]:
        """See `Copier`. Tensors in host memory are copied at once."""

        def is_first(source: Tensor) -> bool:
            return not self._beside or not source.is_cuda or address_of(source) in changing

        first, others = divide(copy, is_first)
        return lambda: self._begin(copy, first, others)

    def _begin(self, copy: Copy, first: Copy, others: Copy) -> Begun:
        begun = _Streamed(copy, torch.cuda.Event())
        self._forget_ended()
        self._begun.append(begun)  # before the copies: after an error, too, it keeps their tensors
        current = torch.cuda.current_stream(self._device)
        try:
            try:
                first.begin()
                self._stream.wait_stream(current)  # the state is what has been launched there
                with torch.cuda.stream(self._stream):
                    others.begin()
            finally:  # the event is that of all that has begun, also before an error or Ctrl-C
                self._stream.wait_stream(current)
                begun.event.record(self._stream)
        except RuntimeError as error:
            if not isinstance(error, torch.cuda.OutOfMemoryError) and "CUDA error" not in str(
                error
            ):
                raise  # not of the device, but of this program: it would fail in every save
            begun.failure = str(error)
        return begun

    def hold(self) -> None:
        """Let the current stream wait for the copies; the host does not."""
        self._forget_ended()
        for each in self._begun:
            torch.cuda.current_stream(self._device).wait_event(each.event)

    def settle(self) -> bool:
        """Wait until no copy is under way; False: one has not ended in time."""
        ended = _all_ended(self._begun)
        self._forget_ended()
        return ended

    def _forget_ended(self) -> None:
        """Drop the references to the tensors of copies that have ended."""
        self._begun[:] = filter(_Streamed.under_way, self._begun)

    def close(self) -> None:
        """Unpin the memory when nothing is written to it any more."""
        self._release()


_kept: list[object] = []
"""Memory that a device may still write to: it stays mapped."""


def _all_ended(begun: list[_Streamed]) -> bool:
    return all(_has_ended(each, lambda: None) for each in begun)


def _unpin(device: torch.device, memory: mmap.mmap, address: int, begun: list[_Streamed]) -> None:
    """Take the memory back from the driver. It is unmapped with its last reference."""
    if not _all_ended(begun):
        # The device may still write there: neither another save nor another mapping may have it.
        _kept.append((memory, begun))
        _log.warning(
            "%s has not ended a copy of the state within %g s; %d MiB of memory are not freed",
            device,
            LIMIT_S,
            len(memory) >> 20,
        )
    elif int(torch.cuda.cudart().cudaHostUnregister(address)):
        _drop_error(device)


def _drop_error(device: torch.device) -> None:
    """Take the error of a call of the runtime."""
    # The runtime keeps it for the next launch, of training, which would fail by it.
    with suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


@cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)
