"""The transport of device tensors that only gloo connects: through host memory.

Owns the copies to the host and back. It is slow, and there for ranks that share one device, which
NCCL refuses: tests on a machine with one GPU run through it. Must always hold: what was received
reaches its tensor in `finish`, on the thread that calls it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.exchange.cpu.transport import CpuTransport
from zero_comm.exchange.transport import Transport
from zero_comm.waiting import Waiter, Work

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """Exchanges of copies, and where to put what they bring."""

    works: list[Work]
    arriving: tuple[tuple[Tensor, Tensor], ...]
    """A tensor on the device, and its copy on the host."""

    def is_completed(self) -> bool:
        """Whether the copies have been exchanged."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> object:
        """Block until they have; nothing is copied back."""
        for work in self.works:
            work.wait()
        return None


class StagedTransport(Transport):
    """A transport of tensors on a device, over the CPU's."""

    any_order = True

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, world: int, device: torch.device
    ) -> None:
        super().__init__(group, rank, world, device)
        self._by_host = CpuTransport(group, rank, world, _HOST)

    def meet(
        self, everybodys: Callable[[Tensor, str], Tensor], changed: threading.Condition
    ) -> None:
        """As `CpuTransport.meet`."""
        self._by_host.meet(everybodys, changed)

    def have_ended(self, works: Sequence[Work]) -> bool:
        """As `CpuTransport.have_ended`."""
        return self._by_host.have_ended(works)

    def finish(self, works: Sequence[Work], waiter: Waiter, look: Callable[[], None]) -> bool:
        """As `CpuTransport.finish`; then what was received is on the device."""
        staged = [work for work in works if isinstance(work, _Staged)]
        if not self._by_host.finish([each for work in staged for each in work.works], waiter, look):
            return False
        for work in staged:
            for tensor, copy in work.arriving:
                tensor.copy_(copy)
        return True

    def watch(self, works: list[Work], waiter: Waiter) -> list[Work]:
        """As in `Transport`."""
        return [
            _Staged(self._by_host.watch(work.works, waiter), work.arriving)
            for work in works
            if isinstance(work, _Staged)
        ]

    def to_host(self, tensor: Tensor, waiter: Waiter, look: Callable[[], None]) -> Tensor | None:
        """A copy; what it waits for has been exchanged, so no peer can keep it waiting."""
        del waiter, look
        return tensor.cpu()

    def from_host(self, values: Sequence[float]) -> Tensor:
        """Numbers as an fp32 tensor on the device."""
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def scatter(self, out: Tensor, into: Tensor, what: str, turn: int) -> list[Work]:
        """As in `Transport`."""
        copy = _room(into)
        return [_Staged(self._by_host.scatter(out.cpu(), copy, what, turn), ((into, copy),))]

    def gather(self, full: Tensor, rows: Sequence[Tensor], what: str, turn: int) -> list[Work]:
        """As in `Transport`."""
        copies = [row.cpu() if rank == self._rank else _room(row) for rank, row in enumerate(rows)]
        works = self._by_host.gather(full, copies, what, turn)
        pairs = zip(rows, copies, strict=True)
        arriving = tuple(pair for rank, pair in enumerate(pairs) if rank != self._rank)
        return [_Staged(works, arriving)]

    def exchange(
        self, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor], what: str, turn: int
    ) -> list[Work]:
        """As in `Transport`."""
        copies = {rank: _room(tensor) for rank, tensor in wanted.items()}
        given = {rank: tensor.cpu() for rank, tensor in held.items()}
        works = self._by_host.exchange(given, copies, what, turn)
        return [_Staged(works, tuple((wanted[rank], copies[rank]) for rank in wanted))]

    def reduce_scatter(self, full: Tensor, own: Tensor) -> list[Work]:
        """As in `Transport`."""
        copy = _room(own)
        return [_Staged(self._by_host.reduce_scatter(full.cpu(), copy), ((own, copy),))]

    def all_reduce(self, full: Tensor) -> list[Work]:
        """As in `Transport`."""
        copy = full.cpu()
        return [_Staged(self._by_host.all_reduce(copy), ((full, copy),))]

    def broadcast(self, tensor: Tensor, source: int) -> list[Work]:
        """As in `Transport`."""
        copy = tensor.cpu()
        return [_Staged(self._by_host.broadcast(copy, source), ((tensor, copy),))]


def _room(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device=_HOST)
