"""The three exchanges of the engine: leaves to their owners, shards to everybody, a broadcast.

Owns every byte that travels between ranks, its count, and the waiting. Must always hold:

- The reduction is *ordered*: `exchange_leaves` delivers gradients unreduced, and the owner adds
  them in leaf order. A sum depends on the leaves, never on who computed them.
- All ranks issue the same exchanges in the same order.
- Every wait goes through `wait`, which ends by the group's timeout at the latest and turns a
  broken connection into `PeerLost`.

On gloo an all-to-all and pairwise sends are used because its reduce-scatter and all-gather move
more bytes and take 2.5 to 3 times as long; on NCCL its own all-gather.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zero_engine.errors import PeerLost

# torch 2.13 renamed this call; the old name warns there, the new one is missing before.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# How gloo (a plain RuntimeError) and NCCL say that a connection, not the program, is broken.
_TRANSPORT_FAILURES = (
    "application timeout caused pair closure",
    "broken pipe",
    "connection closed",
    "connection refused",
    "connection reset",
    "connect timeout",
    "network error",
    "remote process exited",
    "socket closed",
    "socket timeout",
    "timed out waiting",
)


@dataclass(frozen=True, slots=True)
class Pending:
    """Exchanges under way; `buffers` must stay alive until they have ended."""

    what: str
    works: tuple[dist.Work, ...] = ()
    buffers: tuple[Tensor, ...] = ()


def wait(pending: Pending) -> None:
    """Block until the exchange has ended.

    Raises:
        PeerLost: A peer is gone, or has not answered within the group's timeout.
    """
    with _transport_failures(pending.what):
        for work in pending.works:
            work.wait()


class Collectives:
    """The exchanges within one process group. At world 1 nothing travels."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.bytes_sent: Counter[str] = Counter()

    def own(self, full: Tensor) -> Tensor:
        """This rank's interval of `full` [world * n]: a view [n]."""
        size = full.numel() // self.world
        return full[self.rank * size : (self.rank + 1) * size]

    def exchange_leaves(self, leaves: Tensor, received: Tensor, what: str) -> Pending:
        """Send interval j of `leaves` to rank j; both [world * n].

        `received` becomes [world, n]: row j is this rank's interval of the leaf that rank j ran.
        """
        self._count("leaves", leaves)
        with _transport_failures(what):
            work = dist.all_to_all_single(received, leaves, group=self._group, async_op=True)
        return Pending(what, (work,), (leaves, received))

    def all_gather(self, full: Tensor, what: str) -> Pending:
        """Fill `full` [world * n] in place; `own(full)` holds this rank's interval already."""
        if self.world == 1:
            return Pending(what)
        self._count("gather", full)
        with _transport_failures(what):
            if full.device.type == "cpu":
                return Pending(what, self._pairwise(full), (full,))
            work = _gather_into(full, self.own(full), group=self._group, async_op=True)
            return Pending(what, (work,), (full,))

    def _pairwise(self, full: Tensor) -> tuple[dist.Work, ...]:
        rows, works = full.view(self.world, -1), []
        for distance in range(1, self.world):
            target, source = (
                (self.rank + distance) % self.world,
                (self.rank - distance) % self.world,
            )
            works.append(dist.isend(rows[self.rank], group_dst=target, group=self._group))
            works.append(dist.irecv(rows[source], group_src=source, group=self._group))
        return tuple(work for work in works if work is not None)

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """Make `tensor` what it is on rank `source`, and wait for it."""
        if self.world == 1:
            return
        with _transport_failures(what):
            work = dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
        wait(Pending(what, (work,), (tensor,)))

    def barrier(self, what: str) -> None:
        """Return when every rank has come here."""
        wait(self.all_gather(torch.zeros(self.world), what))

    def _count(self, kind: str, full: Tensor) -> None:
        self.bytes_sent[kind] += full.nbytes // self.world * (self.world - 1)


@contextmanager
def _transport_failures(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        broken = isinstance(error, dist.DistNetworkError | dist.DistBackendError)
        if not broken and not any(sign in text for sign in _TRANSPORT_FAILURES):
            raise
        raise PeerLost(f"{what}: a peer is gone: {error}") from error
