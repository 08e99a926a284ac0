"""The exchanges of the engine: leaves to their owners, shards to everybody, pieces, a broadcast.

Owns every byte that travels between ranks, its count, and the waiting. Must always hold:

- The reduction is *ordered*: `exchange_leaves` delivers gradients unreduced, and the owner adds
  them in leaf order. A sum depends on the leaves, never on who computed them.
- All ranks issue the same exchanges in the same order. Where they do not, nothing is mixed up:
  shards travel under the name of what they belong to, and ranks that wait for each other in a
  circle get `Diverged`, which names the exchanges.
- Every wait goes through `wait`, which ends at once when this rank is asked to leave, by the
  group's timeout at the latest, and turns a broken connection into `PeerLost`.

On gloo an all-to-all and pairwise sends are used because its reduce-scatter and all-gather move
more bytes and take 2.5 to 3 times as long; on NCCL its own all-gather. Ranks of one host read from
each other's memory (`neighbours`).
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.comms_log import LOG
from zero_comm.cpu.same_host import Neighbours, key_of, meet
from zero_comm.deadlock import Standstill
from zero_comm.distributed import group_store
from zero_comm.errors import Diverged, LeavingNow
from zero_comm.waiting import Interrupt, Waiter, Work, transport_failures
from zero_contract.errors import PeerLost

# torch 2.13 renamed this call; the old name warns there, the new one is missing before.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Pending:
    """Exchanges under way; `buffers` must stay alive until they have ended."""

    what: str
    works: tuple[Work, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    turn: int = 0
    """How many of this name came before."""
    group: Collectives | None = None
    kind: str = ""
    """In the words of `comms_log`."""
    sent_bytes: int = 0


def wait(pending: Pending) -> None:
    """Block until the exchange has ended.

    Raises:
        PeerLost: A peer is gone, or has not answered within the group's timeout.
        LeavingNow: This rank was asked to leave.
        Diverged: The ranks wait for each other.
    """
    if pending.group is not None:
        with LOG.waiting(pending.kind, pending.what, pending.sent_bytes):
            pending.group.finish(pending)


def has_ended(pending: Pending) -> bool:
    """Whether a `wait` would return at once; a gather over sockets never says so."""
    return all(work.is_completed() for work in pending.works)


class Collectives:
    """The exchanges within one process group. At world 1 nothing travels."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        interrupt: Interrupt | None = None,
        name: str = "standstill",
    ) -> None:
        """Use a process group.

        Args:
            group: By default the default one.
            interrupt: What ends every wait.
            name: Of the group among those of one run.
        """
        self._group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.bytes_sent: Counter[str] = Counter()
        group = group or dist.group.WORLD
        self._waiter = Waiter(group, interrupt, _timeout_s(group))
        self._standstill = Standstill(group_store(name), self.rank, self.world)
        self._near = range(self.rank, self.rank + 1)
        """The ranks that exchange by memory, this one among them."""
        self._neighbours: Neighbours | None = None

    def meet_neighbours(self) -> None:
        """Find out who can read whose memory, and read from now on. Collective; for CPUs.

        Raises:
            PeerLost: A peer is gone.
        """
        if self.world > 1:
            changed = self._waiter.interrupt.changed
            try:
                self._near, self._neighbours = meet(self.rank, self.world, self.everybodys, changed)
            except OSError as error:
                raise PeerLost(f"meeting the ranks of this host: {error}") from error

    def everybodys(self, own: Tensor, what: str) -> Tensor:
        """The rows [n] of all ranks: [world, n]. Collective."""
        rows = own.new_empty(self.world * own.numel())
        self.own(rows).copy_(own)
        wait(self.all_gather(rows, what))
        return rows.view(self.world, -1)

    def finish(self, pending: Pending) -> None:
        """See `wait`."""
        if self._waiter.interrupt.reason:
            self._leave(pending)
        with transport_failures(pending.what):
            if pending.buffers and pending.buffers[0].device.type != "cpu":
                for work in pending.works:  # holds up the stream, not this process
                    work.wait()
                return
            ended = self._waiter.wait(pending.works, lambda: self._look(pending))
        if not ended:
            self._leave(pending)
        self._standstill.go_on()  # a wait that was given up stays posted: the rank is not coming

    def _leave(self, pending: Pending) -> None:
        raise LeavingNow(f"{pending.what}: asked to leave: {self._waiter.interrupt.reason}")

    def _look(self, pending: Pending) -> None:
        if circle := self._standstill.look(pending.what, pending.turn):
            raise Diverged(circle)

    def _pending(
        self, kind: str, what: str, works: Iterable[Work], buffers: tuple[Tensor, ...], sent: int
    ) -> Pending:
        turn = self._standstill.begin(what)
        return Pending(what, tuple(works), buffers, turn, self, kind, sent)

    def own(self, full: Tensor) -> Tensor:
        """This rank's interval of `full` [world * n]: a view [n]."""
        size = full.numel() // self.world
        return full[self.rank * size : (self.rank + 1) * size]

    def exchange_leaves(self, leaves: Tensor, received: Tensor, what: str) -> Pending:
        """Send interval j of `leaves` [world * n] to every other rank j.

        `received` [(world - 1) * n] gets this rank's interval of the leaves that the others ran;
        `in_leaf_order` puts them and its own in order. Over sockets in two exchanges, with the
        ranks below and with those above, so that a rank's own interval is neither sent nor copied.
        """
        sent_bytes = self._count("leaves", leaves)
        out, into = leaves.view(self.world, -1), received.view(self.world - 1, -1)
        lent = {rank: out[rank] for rank in self._others_near}
        wanted = {rank: into[rank - (rank > self.rank)] for rank in self._others_near}
        works = self._read(what, lent, wanted)
        if len(self._near) < self.world:
            with transport_failures(what):
                works += self._leaves_by_sockets(out, into)
        return self._pending("leaves", what, works, (leaves, received), sent_bytes)

    def _leaves_by_sockets(self, out: Tensor, into: Tensor) -> list[Work]:
        low, high = self._near.start, self._near.stop
        below, above = range(low), range(high, self.world)
        return [
            self._all_to_all(into[high - 1 :], out[:low], from_ranks=above, to_ranks=below),
            self._all_to_all(into[:low], out[high:], from_ranks=below, to_ranks=above),
        ]

    def _read(self, what: str, lent: dict[int, Tensor], wanted: dict[int, Tensor]) -> list[Work]:
        """The exchange with the ranks near by; empty if there are none."""
        if self._neighbours is None:
            return []
        key = key_of(what, self._standstill.begun[what])
        return [self._neighbours.exchange(key, lent, wanted)]

    @property
    def _others_near(self) -> list[int]:
        return [rank for rank in self._near if rank != self.rank]

    def in_leaf_order(self, leaves: Tensor, received: Tensor) -> list[Tensor]:
        """This rank's interval of what rank 0 ran, rank 1, ...: views [n]."""
        others = list(received.view(self.world - 1, -1).unbind(0)) if self.world > 1 else []
        others.insert(self.rank, self.own(leaves))
        return others

    def _all_to_all(
        self, into: Tensor, out: Tensor, *, from_ranks: range, to_ranks: range
    ) -> dist.Work:
        def counts(tensor: Tensor, ranks: range) -> list[int]:
            each = tensor.numel() // len(ranks) if ranks else 0
            return [each * (rank in ranks) for rank in range(self.world)]

        return dist.all_to_all_single(
            into.flatten(),
            out.flatten(),
            output_split_sizes=counts(into, from_ranks),
            input_split_sizes=counts(out, to_ranks),
            group=self._group,
            async_op=True,
        )

    def all_gather(self, full: Tensor, what: str) -> Pending:
        """Fill `full` [world * n] in place; `own(full)` holds this rank's interval already."""
        if self.world == 1:
            return self._pending("", what, (), (), 0)
        sent_bytes = self._count("gather", full)
        with transport_failures(what):
            if full.device.type == "cpu":
                works = self._pairwise(full, what)
                return self._pending("gather", what, works, (full,), sent_bytes)
            work = _gather_into(full, self.own(full), group=self._group, async_op=True)
            return self._pending("gather", what, (work,), (full,), sent_bytes)

    def _pairwise(self, full: Tensor, what: str) -> list[Work]:
        # Under a tag of its own: shards of different units that ranks gather at the same time, as
        # they should not, do not meet.
        tag = zlib.crc32(what.encode()) & 0x7FFFFFFF
        rows = full.view(self.world, -1)
        wanted = {rank: rows[rank] for rank in self._others_near}
        works = self._read(what, dict.fromkeys(wanted, rows[self.rank]), wanted)
        for distance in range(1, self.world):
            target, source = (
                (self.rank + distance) % self.world,
                (self.rank - distance) % self.world,
            )
            if target not in self._near:
                works.append(self._send(rows[self.rank], target, tag))
            if source not in self._near:
                works.append(self._receive(rows[source], source, tag))
        return works

    def _send(self, row: Tensor, rank: int, tag: int) -> Work:
        work = dist.isend(row, group_dst=rank, group=self._group, tag=tag)
        assert work is not None  # this rank is in the group
        return work

    def _receive(self, row: Tensor, rank: int, tag: int) -> Work:
        work = dist.irecv(row, group_src=rank, group=self._group, tag=tag)
        assert work is not None
        return work

    def exchange_pieces(
        self, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor], what: str
    ) -> Pending:
        """Send to some ranks, and get from some, tensors of any sizes; by rank, contiguous.

        What one rank holds for another is what that one wants of it. Empty ones do not travel,
        neither does what is under this rank's own number.
        """
        held, wanted = self._to_others(held), self._to_others(wanted)
        sent_bytes = sum(tensor.nbytes for tensor in held.values())
        self.bytes_sent["pieces"] += sent_bytes
        with transport_failures(what):
            works = self._pieces_near(held, wanted, what) + self._pieces_far(held, wanted, what)
        return self._pending("pieces", what, works, (*wanted.values(), *held.values()), sent_bytes)

    def _to_others(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return {r: each for r, each in tensors.items() if r != self.rank and each.numel()}

    def _pieces_near(
        self, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor], what: str
    ) -> list[Work]:
        lent = {rank: tensor for rank, tensor in held.items() if rank in self._near}
        asked = {rank: tensor for rank, tensor in wanted.items() if rank in self._near}
        return self._read(what, lent, asked) if lent or asked else []

    def _pieces_far(
        self, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor], what: str
    ) -> list[Work]:
        tag = zlib.crc32(what.encode()) & 0x7FFFFFFF
        ways = ((dist.isend, held), (dist.irecv, wanted))
        sends = [
            dist.P2POp(way, tensor, group=self._group, tag=tag, group_peer=rank)
            for way, tensors in ways
            for rank, tensor in tensors.items()
            if rank not in self._near
        ]
        return list(dist.batch_isend_irecv(sends)) if sends else []

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """Make `tensor` what it is on rank `source`, and wait for it."""
        if self.world == 1:
            return
        with transport_failures(what):
            work = dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
        sent_bytes = tensor.nbytes if self.rank == source else 0
        wait(self._pending("broadcast", what, (work,), (tensor,), sent_bytes))

    def barrier(self, what: str) -> None:
        """Return when every rank has come here."""
        wait(self.all_gather(torch.zeros(self.world), what))

    def _count(self, kind: str, full: Tensor) -> int:
        sent_bytes = full.nbytes // self.world * (self.world - 1)
        self.bytes_sent[kind] += sent_bytes
        return sent_bytes


def _timeout_s(group: Any) -> float:
    """How long an exchange of a group may take."""
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
