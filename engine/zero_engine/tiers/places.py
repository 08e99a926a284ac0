"""The protocol of a tier, and the tiers that are memory: the device's, the host's.

A tensor that *rests* in a tier keeps its place there for the whole run; a *lease* is what of it
is in memory for the step of one sub-group. Must always hold: a resting tensor can be read and
written like any other (checkpoints and scripts do so between steps), and after a `put`, a `close`
or a `settle` it holds what was put.

Called by `flat_unit`, which lets weights rest, and by `steps`, which steps.
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
"""After which a disk that does not answer is taken for broken."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What is in memory of the rows of one sub-group, by the name of the row."""

    rows: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Of the tier: what the rows are views of, where that is not where they rest."""


class Tier(Protocol):
    """A place where tensors rest."""

    far: bool
    """Kernels of the device cannot read what rests here: it has to be fetched first."""

    def hold(self, contents: Tensor) -> Tensor:
        """A copy of `contents` that rests here.

        Raises:
            TierError: There is no room.
        """

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros that rest here. Raises as `hold`."""

    def fetch(self, held: Tensor, into: Tensor) -> None:
        """Copy what rests here to where it is used."""

    def put(self, held: Tensor, values: Tensor) -> None:
        """Begin to replace what rests here; `values` may change when this returns."""

    def settle(self) -> None:
        """Wait for what was put; raises TierError if it failed."""

    def changed(self) -> None:
        """Somebody has written to what rests here, not by `put`."""

    def open(self, rows: Mapping[str, Tensor]) -> Future[Lease]:
        """Begin to bring parts of resting tensors into memory."""

    def close(self, rows: Mapping[str, Tensor], lease: Lease) -> Future[None]:
        """Begin to bring a lease back to where it rests; it must not be used any more."""


class Memory:
    """Rests on a device, or in the host's memory, pinned if a GPU is to copy from there."""

    def __init__(self, device: torch.device, *, used_on: torch.device, pin: bool = False) -> None:
        """A tier for tensors that are used on another device or on this one.

        Args:
            device: Where they rest.
            used_on: Where the model computes.
            pin: Page-locked memory, if it rests on the host and is used elsewhere.
        """
        self.far = device.type != used_on.type
        self._device = device
        self._pin = pin and self.far

    def hold(self, contents: Tensor) -> Tensor:
        """A copy of `contents` that rests here."""
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
        """There is nothing to wait for."""

    def changed(self) -> None:
        """There is no other copy of it."""

    def open(self, rows: Mapping[str, Tensor]) -> Future[Lease]:
        """The tensors themselves."""
        return done(Lease(dict(rows)))

    def close(self, rows: Mapping[str, Tensor], lease: Lease) -> Future[None]:
        """They are where they belong, but for rows that the step has made."""
        for name, held in rows.items():
            if lease.rows[name].data_ptr() != held.data_ptr():
                held.copy_(lease.rows[name])
        return done(None)


def done(result: T) -> Future[T]:
    """A future of what is there already."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


def wait(future: Future[T]) -> T:
    """The result of an operation that has begun.

    Raises:
        TierError: It failed, or there is no result in time.
    """
    try:
        return future.result(_DEADLINE_S)
    except Late:
        raise TierError(
            f"no answer within {_DEADLINE_S:g} s from the disk with the offloaded state; name "
            "another directory as nvme_path and go on from the newest checkpoint"
        ) from None
