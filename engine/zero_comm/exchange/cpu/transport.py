"""The transports of tensors in host memory.

`HostTransport` is that of any backend; what it keeps waiting is this process, not a stream.
`CpuTransport` uses gloo. Ranks of one host read from each other's memory (`same_host`) after
`meet`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.exchange.cpu.same_host import SameHostPeers, key_of, meet
from zero_comm.exchange.transport import Transport
from zero_comm.waiting import Waiter, Work


class HostTransport(Transport):
    """A transport of tensors in host memory, in the order in which exchanges are begun."""

    def then(
        self,
        begin: Callable[[], list[Work]],
        begin_next: Callable[[], list[Work]],
        waiter: Waiter,
        buffers: Iterable[Tensor],
    ) -> list[Work]:
        """See `Transport`; a thread waits in between, and keeps what it needs."""
        del buffers
        return [waiter.chain(begin(), begin_next, in_order=not self.any_order)]

    def finish(self, works: Sequence[Work], waiter: Waiter, look: Callable[[], None]) -> bool:
        """See `Transport`; an interrupt ends the wait at once."""
        return waiter.wait(works, look)

    def to_host(self, tensor: Tensor, waiter: Waiter, look: Callable[[], None]) -> Tensor | None:
        """The tensor itself."""
        del waiter, look
        return tensor

    def from_host(self, values: Sequence[float]) -> Tensor:
        """Numbers as an fp32 tensor."""
        return torch.tensor(values, dtype=torch.float32, device="cpu")


class CpuTransport(HostTransport):
    """A transport that reaches the ranks `near` by memory and the others over sockets."""

    any_order = True
    crosses_once = False

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, world: int, device: torch.device
    ) -> None:
        super().__init__(group, rank, world, device)
        self._same_host: SameHostPeers | None = None

    def meet(
        self, everybodys: Callable[[Tensor, str], Tensor], changed: threading.Condition
    ) -> None:
        """Find the ranks whose memory can be read, and read it from now on.

        See `Transport.meet`.

        Raises:
            OSError: A rank of this host is lost.
        """
        self.near, self._same_host = meet(self._rank, self._world, everybodys, changed)

    def have_ended(self, works: Sequence[Work]) -> bool:
        """See `Transport`; false for what goes over sockets, unless it is watched."""
        return all(work.is_completed() for work in works)

    @property
    def passes_on(self) -> bool:
        """See `Transport`; exchanges have names, and need no groups of their own."""
        return True

    def scatter(self, out: Tensor, into: Tensor, what: str, turn: int) -> list[Work]:
        """See `Transport.scatter`; ranks may begin these, too, in different orders."""
        held = {rank: out[rank] for rank in self._others}
        wanted = {rank: into[rank - (rank > self._rank)] for rank in self._others}
        return self.exchange(held, wanted, what, turn)

    def watch(self, works: list[Work], waiter: Waiter) -> list[Work]:
        """See `Transport`; a thread waits for those over sockets."""
        return list(waiter.watch(works))

    def gather(self, full: Tensor, rows: Sequence[Tensor], what: str, turn: int) -> list[Work]:
        """See `Transport.gather`, in pairs."""
        # gloo's all-gather moves more bytes, and takes 2.5 to 3 times as long. Pairs have names:
        # if ranks wrongly gather different units at the same time, shards do not match.
        del full
        wanted = {rank: rows[rank] for rank in self._others}
        return self.exchange(dict.fromkeys(wanted, rows[self._rank]), wanted, what, turn)

    def exchange(
        self, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor], what: str, turn: int
    ) -> list[Work]:
        """See `Transport`."""
        near_held = {rank: tensor for rank, tensor in held.items() if rank in self.near}
        near_wanted = {rank: tensor for rank, tensor in wanted.items() if rank in self.near}
        works: list[Work] = []
        if self._same_host is not None and (near_held or near_wanted):
            works.append(self._same_host.exchange(key_of(what, turn), near_held, near_wanted))
        return works + super().exchange(held, wanted, what, turn)

    def exchange_inside(
        self, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor], what: str, turn: int
    ) -> list[Work]:
        """See `Transport`."""
        return self.exchange(held, wanted, what, turn)

    @property
    def _others(self) -> list[int]:
        """By distance: not all ranks send to the same one first."""
        return [*range(self._rank + 1, self._world), *range(self._rank)]
