"""The transport of tensors between ranks: the calls of torch.distributed.

Every exchange that is begun here is returned, so that the caller waits for it, and no call waits by
itself. Devices with streams use this class over NCCL. `cpu.transport` has the subclasses for CPUs,
and `transports` chooses, and has the one for devices that only gloo connects.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.waiting import Waiter, Work

# torch 2.13 renamed these calls; the old names warn there, the new ones are missing before.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The groups of one rank for an exchange in two parts: between nodes, then inside of them."""

    inside: dist.ProcessGroup
    """The ranks of this node."""
    node: range
    """The same ranks, by their numbers in the group of all."""
    between: dist.ProcessGroup | None
    """One rank of each node, those of the same number, where all nodes are equal."""


class Transport:
    """The exchanges of one rank of a process group.

    Each exchange has a name, and `turn`, the number of earlier ones of that name on this rank.
    """

    any_order = False
    """Whether the ranks of a group may begin its exchanges in different orders. If not, they are
    matched by their order alone: what has the same size is mixed up without an error."""
    crosses_once = True
    """Whether `gather` by itself sends each shard to each other node once. NCCL's rings and trees
    do, in as many turns as there are ranks."""

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, world: int, device: torch.device
    ) -> None:
        """Exchange tensors of one kind of device within a group; None: the default group."""
        self._group = group
        self.device = device
        self._rank = rank
        self._world = world
        self.near = range(rank, rank + 1)
        """Consecutive ranks, this one included, that are left out here."""
        self._parts: Parts | None = None
        self._stream: torch.cuda.Stream | None = None
        """It waits for the first part of an exchange, beside the stream that computes."""

    def meet(
        self, everybodys: Callable[[Tensor, str], Tensor], changed: threading.Condition
    ) -> None:
        """Find the fastest ways between the ranks. Collective.

        Args:
            everybodys: A row [n] and a name -> the rows of all ranks, [world, n].
            changed: Notified when an exchange ends that no thread waits for.

        Raises:
            OSError: A rank of this host is gone.
        """
        del everybodys, changed
        # NCCL connects all ranks in the first exchange: one that only some of them begin would
        # never end.
        own = torch.zeros(1, device=self.device)
        _gather_into(own.new_empty(self._world), own, group=self._group)

    def divide(self, parts: Parts) -> None:
        """Exchange in two parts from now on. Collective: it connects the ranks of both."""
        self._parts = parts
        own = torch.zeros(1, device=self.device)
        for group in (parts.inside, parts.between):
            if group is not None:
                _gather_into(own.new_empty(group.size()), own, group=group)

    @property
    def passes_on(self) -> bool:
        """Whether `exchange_inside` may be called."""
        return self._parts is not None

    @property
    def gathers_in_parts(self) -> bool:
        """Whether `gather_in_parts` may be called."""
        return self._parts is not None and self._parts.between is not None

    def have_ended(self, works: Sequence[Work]) -> bool:
        """Whether `finish` would return at once; a wait of a stream costs the host no time."""
        del works
        return True

    def to_host(self, tensor: Tensor, waiter: Waiter, look: Callable[[], None]) -> Tensor | None:
        """A copy in host memory; None if the wait for it was interrupted.

        `look` is called now and then; what it raises ends the wait.
        """
        copied = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with torch.cuda.device(tensor.device):  # the script's current device may be another one
            copied.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        # Asked for, and not waited for inside the driver: exchanges of a lost peer never end, and
        # nothing reaches a thread that blocks there.
        return copied if waiter.poll(event.query, look) else None

    def from_host(self, values: Sequence[float]) -> Tensor:
        """Numbers as an fp32 tensor on the device."""
        # A copy from other memory waits in the driver for the stream, and so for every exchange
        # before it.
        pinned = torch.tensor(values, dtype=torch.float32, device="cpu", pin_memory=True)
        return pinned.to(self.device, non_blocking=True)

    def finish(self, works: Sequence[Work], waiter: Waiter, look: Callable[[], None]) -> bool:
        """Wait for what was begun here; False if an interrupt ends the wait.

        Raises what the transport raises, and what `look` raises, which is called now and then.
        """
        # A device's stream is what waits, so it can be neither interrupted nor looked at.
        del waiter, look
        for work in works:
            work.wait()
        return True

    def watch(self, works: list[Work], waiter: Waiter) -> list[Work]:
        """The same exchanges, such that each can be asked whether it has ended."""
        del waiter
        return works

    def scatter(self, out: Tensor, into: Tensor, what: str, turn: int) -> list[Work]:
        """Send row j of `out` [world, n] to every other rank j.

        Their rows are received into `into` [world - 1, n], by rank.
        """
        del what, turn
        # With the ranks below and those above, so that a rank's own row is neither sent nor copied.
        # `into` has no row of this rank: from there on, rank j's is row j - 1.
        low, high = self.near.start, self.near.stop
        below, above = range(low), range(high, self._world)
        return [
            self._all_to_all(into[high - 1 :], out[:low], from_ranks=above, to_ranks=below),
            self._all_to_all(into[:low], out[high:], from_ranks=below, to_ranks=above),
        ]

    def _all_to_all(
        self, into: Tensor, out: Tensor, *, from_ranks: range, to_ranks: range
    ) -> dist.Work:
        def counts(tensor: Tensor, ranks: range) -> list[int]:
            each = tensor.numel() // len(ranks) if ranks else 0
            return [each * (rank in ranks) for rank in range(self._world)]

        return dist.all_to_all_single(
            into.flatten(),
            out.flatten(),
            output_split_sizes=counts(into, from_ranks),
            input_split_sizes=counts(out, to_ranks),
            group=self._group,
            async_op=True,
        )

    def gather(self, full: Tensor, rows: Sequence[Tensor], what: str, turn: int) -> list[Work]:
        """Fill the rows of all ranks, of which this rank's own is there already.

        The rows are views [n] that divide `full` [world * n]; `turn` counts earlier exchanges of
        that name.
        """
        del what, turn
        own = rows[self._rank]
        if all(row.data_ptr() == full[i * own.numel() :].data_ptr() for i, row in enumerate(rows)):
            return [_gather_into(full, own, group=self._group, async_op=True)]
        work = dist.all_gather(list(rows), own, group=self._group, async_op=True)
        assert work is not None  # this rank is in the group
        return [work]

    def gather_in_parts(self, full: Tensor, waiter: Waiter) -> list[Work]:
        """See `gather`, of shards that lie in the order of `topology.rail_order` on equal nodes."""
        parts = self._parts
        assert parts is not None
        assert parts.between is not None
        # First a rank gets its slice of `full`, which is the shards of the ranks of its own number;
        # then the ranks of a node exchange their slices. Both are contiguous: nothing is copied.
        between, inside = parts.between, parts.inside
        own_slice = full.view(len(parts.node), -1)[self._rank - parts.node.start]
        own = own_slice.view(between.size(), -1)[between.rank()]
        return self.then(
            lambda: [_gather_into(own_slice, own, group=between, async_op=True)],
            lambda: [_gather_into(full, own_slice, group=inside, async_op=True)],
            waiter,
            [full],
        )

    def then(
        self,
        begin: Callable[[], list[Work]],
        begin_next: Callable[[], list[Work]],
        waiter: Waiter,
        buffers: Iterable[Tensor],
    ) -> list[Work]:
        """Begin exchanges, and further ones when those have ended.

        All ranks begin all of them in the order of these calls. `waiter` is for those that this
        process has to wait for; `buffers` are all that they read and write.
        """
        del waiter
        # A stream of its own waits in between: neither the host nor the stream that computes does.
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        # Their memory is not given to others before this stream has got there, also if nobody waits
        # for the exchanges, as after an error.
        for buffer in buffers:
            buffer.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            first = begin()
            for work in first:
                work.wait()
            return [*first, *begin_next()]

    def exchange(
        self, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor], what: str, turn: int
    ) -> list[Work]:
        """Send tensors of any sizes to some ranks, and receive from some; by rank, contiguous."""
        del turn
        return _batch(self._group, self._far(held), self._far(wanted), what)

    def exchange_inside(
        self, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor], what: str, turn: int
    ) -> list[Work]:
        """See `exchange`, with ranks of this node alone."""
        del turn
        parts = self._parts
        assert parts is not None
        first = parts.node.start

        def by_local(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
            return {rank - first: tensor for rank, tensor in self._far(tensors).items()}

        return _batch(parts.inside, by_local(held), by_local(wanted), what)

    def _far(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return {rank: tensor for rank, tensor in tensors.items() if rank not in self.near}

    def reduce_scatter(self, full: Tensor, own: Tensor) -> list[Work]:
        """Sum `full` [world * n] over all ranks, in the backend's order; `own` [n] is the result.

        Rank r gets the r-th part. All ranks begin these in the same order.
        """
        return [_reduce_scatter(own, full, group=self._group, async_op=True)]

    def all_reduce(self, full: Tensor) -> list[Work]:
        """Sum `full` over all ranks in place, in the backend's order, with the same bits on all.

        All ranks begin these in the same order.
        """
        work = dist.all_reduce(full, group=self._group, async_op=True)
        assert work is not None  # this rank is in the group
        return [work]

    def broadcast(self, tensor: Tensor, source: int) -> list[Work]:
        """Make `tensor` what it is on rank `source`."""
        work = dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
        assert work is not None  # this rank is in the group
        return [work]


def _batch(
    group: dist.ProcessGroup | None,
    held: Mapping[int, Tensor],
    wanted: Mapping[int, Tensor],
    what: str,
) -> list[Work]:
    """Sends and receives that run together, by the ranks of the group."""
    # Receives come first. Over gloo a peer sends when it has been told that it may, on the same
    # connection: behind what is sent to it there, it would be told when that has arrived, and the
    # two directions of a link would be used one after the other.
    ways = ((dist.irecv, wanted), (dist.isend, held))
    tag = zlib.crc32(what.encode()) & 0x7FFFFFFF  # of no exchange that runs at the same time
    calls = [
        dist.P2POp(way, tensor, group=group, tag=tag, group_peer=rank)
        for way, tensors in ways
        for rank, tensor in tensors.items()
    ]
    return list(dist.batch_isend_irecv(calls)) if calls else []
