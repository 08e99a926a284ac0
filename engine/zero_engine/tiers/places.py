"""The protocol of a tier, and the tiers that are memory: the device's, the host's.

A tensor that *rests* in a tier keeps its place there for the whole run, and can be read and written
there like any other between steps; a *lease* is the part of it that is in memory for the step of
one sub-group.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from zero_contract.errors import ZeroError

T = TypeVar("T")


class TierError(ZeroError):
    """State could not be moved to or from the place where it rests between uses."""


_DEADLINE_S = 600.0
"""A disk that has not answered for this long counts as broken."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The parts of the rows of one sub-group that are in memory, by the name of the row."""

    rows: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """The buffers of the tier that rows are views of, if they do not rest in memory."""


class Tier(Protocol):
    """A place where tensors rest."""

    far: bool
    """Whether tensors must be fetched before kernels of the device can read them."""

    def hold(self, contents: Tensor) -> Tensor:
        """A copy of `contents` that rests here. Raises TierError if there is no room left."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros that rest here. Raises as `hold`."""

    def fetch(self, held: Tensor, into: Tensor) -> None:
        """Copy a resting tensor to the place where it is used."""

    def put(self, held: Tensor, values: Tensor) -> None:
        """Begin to replace a resting tensor; `values` may change when this returns."""

    def settle(self) -> None:
        """Wait for every `put`. Raises TierError if one has failed."""

    def changed(self) -> None:
        """Note that resting tensors were written to directly, without `put`."""

    def open(self, rows: Mapping[str, Tensor]) -> Future[Lease]:
        """Begin to bring parts of resting tensors into memory."""

    def close(self, rows: Mapping[str, Tensor], lease: Lease) -> Future[None]:
        """Begin to write a lease back; the lease must not be used afterwards."""


class Memory:
    """The tier on a device or in host memory, pinned if a GPU is to copy from there."""

    def __init__(self, device: torch.device, *, used_on: torch.device, pin: bool = False) -> None:
        """A tier on a device; `pin`: page-locked, if tensors are used on another one."""
        self.far = device.type != used_on.type
        self._device = device
        self._pin = pin and self.far

    def hold(self, contents: Tensor) -> Tensor:
        """A copy of `contents` that rests here."""
        # Copied on the same device as well: the contents are a part of something that is freed.
        return self.zeros(contents.numel(), contents.dtype).copy_(contents)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros that rest here."""
        return torch.zeros(numel, dtype=dtype, device=self._device, pin_memory=self._pin)

    def fetch(self, held: Tensor, into: Tensor) -> None:
        """Copy; from pinned memory without waiting: a step ends all copies before it writes."""
        if into.data_ptr() != held.data_ptr():
            into.copy_(held, non_blocking=self._pin)

    def put(self, held: Tensor, values: Tensor) -> None:
        """Copy; to a GPU by way of pinned memory, which torch keeps until the copy has ended."""
        if held.device.type != values.device.type and held.is_cuda:
            values = torch.empty_like(values, dtype=held.dtype, pin_memory=True).copy_(values)
        held.copy_(values, non_blocking=held.is_cuda)

    def settle(self) -> None:
        """Do nothing: copies need no wait."""

    def changed(self) -> None:
        """Do nothing: nothing is cached."""

    def open(self, rows: Mapping[str, Tensor]) -> Future[Lease]:
        """The tensors themselves."""
        return done(Lease(dict(rows)))

    def close(self, rows: Mapping[str, Tensor], lease: Lease) -> Future[None]:
        """Copy the rows that the step has made anew; the others are in place."""
        for name, held in rows.items():
            if lease.rows[name].data_ptr() != held.data_ptr():
                held.copy_(lease.rows[name])
        return done(None)


def done(result: T) -> Future[T]:
    """A future that has its result already."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


def wait(future: Future[T]) -> T:
    """The result of an operation that has begun.

    Raises:
        TierError: The operation failed, or has no result within 600 s.
    """
    try:
        return future.result(_DEADLINE_S)
    except Late:
        raise TierError(
            f"no answer within {_DEADLINE_S:g} s from the disk with the offloaded state; name "
            "another directory as nvme_path and resume from the newest checkpoint"
        ) from None
