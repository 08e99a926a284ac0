"""The collectives: gradients to their owners, all-gather of shards, pieces, a broadcast.

Owns the names, the counts and the waits of everything that ranks send to each other. All ranks
issue the same exchanges in the same order; if they do not, nothing is mixed up (`IssueOrder`,
`DeadlockDetector`).

A `Transport` sends the bytes; `transports` chooses one for each kind of device. Nothing here asks
for the device.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.errors import Diverged, LeavingNow
from zero_comm.exchange.comms_log import LOG
from zero_comm.exchange.deadlock import DeadlockDetector
from zero_comm.exchange.issue_order import IssueOrder, difference
from zero_comm.exchange.objects import gather_objects
from zero_comm.exchange.transport import Transport
from zero_comm.exchange.transports import Transports, own_group, timeout_of
from zero_comm.topology import Topology, alone, concluded, place_of, rail_order, relay
from zero_comm.waiting import LOOK_S, Interrupt, Waiter, Work, transport_failures
from zero_comm.worker.distributed import group_store, local_device
from zero_comm.worker.rank_times import WAITS
from zero_contract.errors import PeerLost


@dataclass(frozen=True, slots=True)
class Pending:
    """Exchanges under way; `buffers` must stay alive until they have ended."""

    what: str
    works: tuple[Work, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    arriving: tuple[Tensor, ...] = ()
    """What is received, of the buffers."""
    turn: int = 0
    """The number of earlier exchanges of this name."""
    group: Collectives | None = None
    transport: Transport | None = None
    """It has begun them; None: nothing travels."""
    kind: str = ""
    """The kind of exchange, a name in `comms_log.OPERATIONS`."""
    sent_bytes: int = 0


def wait(pending: Pending) -> None:
    """Block until the exchange has ended.

    Raises:
        PeerLost: A peer is lost, or has not answered within the group's timeout.
        LeavingNow: This rank was asked to leave.
        Diverged: The ranks wait for each other: a deadlock.
    """
    if pending.group is not None:
        device = pending.buffers[0].device if pending.buffers else None
        with (
            LOG.waiting(pending.kind, pending.what, pending.sent_bytes),
            WAITS.waiting(pending.what, pending.turn, device),
        ):
            pending.group.finish(pending)


def has_ended(pending: Pending) -> bool:
    """Whether a `wait` would return at once.

    False for what goes over sockets from rank to rank, unless the group is `watched`; true where a
    device's stream waits.
    """
    return pending.transport is None or pending.transport.have_ended(pending.works)


class Collectives:
    """The exchanges within one process group. At world 1 nothing is sent."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        interrupt: Interrupt | None = None,
        name: str = "deadlock",
        *,
        beside: Collectives | None = None,
        watched: bool = False,
        order: IssueOrder | None = None,
        division: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Use a process group.

        Args:
            group: The process group; None: the default group.
            interrupt: Ends every wait.
            name: The name of the group among those of one run.
            beside: The exchanges in another group of the same ranks; ranks that wait for each
                other in two groups are then found, too, and orders are compared together.
            watched: Whether `has_ended` tells the end of every exchange, also over sockets; they
                then end in the order in which they have begun.
            order: Of a group of some ranks: compared by all ranks, whose groups exchange the same.
            division: Of a group of some ranks; see `Transports`.
        """
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.bytes_sent: Counter[str] = Counter()
        self.lay_out(alone(self.world))
        self.transports = Transports(group, self.rank, self.world, division)
        group = group or dist.group.WORLD
        self.timeout_s = timeout_of(group)
        self._watched = watched
        self._waiter = Waiter(group, interrupt, self.timeout_s)
        self.order: IssueOrder = beside.order if beside is not None else order or IssueOrder()
        self._lane = self.order.lane()
        self._ordered = False
        """Whether exchanges are matched by their order alone; known after `meet`."""
        self.detector: DeadlockDetector = (
            beside.detector
            if beside is not None
            else DeadlockDetector(group_store(name), self.rank, self.world)
        )

    def lay_out(self, topology: Topology, owners: Sequence[int] | None = None) -> None:
        """Divide what is divided from now on by nodes; every rank with the same topology.

        `owners`: by shard, the rank that has it, where a framework decides that.
        """
        self.topology = topology
        # Where sums begin inside of nodes, the slice that a rank adds up is whole shards.
        self.owners = tuple(owners) if owners is not None else rail_order(topology.nodes)
        """By shard, the rank that has it."""
        self.shards = tuple(self.owners.index(rank) for rank in range(self.world))
        """By rank, its shard."""
        self._route = relay(topology, self.owners, self.rank)

    def find_nodes(self, environ: Mapping[str, str]) -> Topology:
        """Which ranks share a node, from the environments of all. Collective.

        Raises:
            ConfigError: This rank's ZERO_NODE_RANKS does not describe this world.
        """
        own = torch.tensor(place_of(environ, self.rank, self.world), device="cpu")
        places = self.everybodys(own, "which ranks share a node").tolist()
        return concluded([(node, local) for node, local in places])

    def meet(self, device: torch.device) -> None:
        """Find the fastest transport between ranks that compute on `device`. Collective.

        Raises:
            PeerLost: A peer is lost.
        """
        self._ordered = not self.any_order(device)
        if self.world > 1:
            try:
                with transport_failures("meeting the other ranks"):
                    self.transports.of(device).meet(self.everybodys, self._waiter.interrupt.changed)
            except OSError as error:
                raise PeerLost(f"meeting the ranks of this host: {error}") from error

    def divide(self, device: torch.device) -> None:
        """Send what all ranks get to each other node once, and then inside of it. Collective.

        After `lay_out`, and only for a group in which shards are gathered.

        Raises:
            PeerLost: A peer is lost.
        """
        if not self.topology.divides:
            return
        sizes = self.topology.nodes
        nodes = [self.topology.ranks(node) for node in range(len(sizes))]
        equal = len(set(sizes)) == 1 and self.owners == rail_order(sizes)
        with transport_failures("meeting the ranks of this node"):
            self.transports.divide(device, nodes, equal=equal)

    def any_order(self, device: torch.device) -> bool:
        """Whether ranks may begin exchanges of tensors on `device` in different orders."""
        return self.transports.of(device).any_order

    def to_host(self, tensor: Tensor, what: str) -> Tensor:
        """A small tensor in host memory: the one wait of a step in which the host waits.

        It is the result of an exchange, or computed from one.

        Raises:
            PeerLost: A peer is lost, or has not answered within the group's timeout.
            LeavingNow: This rank was asked to leave.
            Diverged: The ranks wait for each other.
        """
        # What the copy waits for is the newest exchange of this name.
        pending = Pending(what, turn=self.detector.begun[what] - 1)
        if self._waiter.interrupt.reason:
            self._leave(pending)
        with transport_failures(what):
            copied = self.transports.of(tensor.device).to_host(
                tensor, self._waiter, lambda: self._look(pending)
            )
        if copied is None:
            self._leave(pending)
        self.detector.end_wait()
        return copied

    def numbers(self, values: Sequence[float], device: torch.device) -> Tensor:
        """Numbers as an fp32 tensor on `device`, without a wait for the device."""
        return self.transports.of(device).from_host(values)

    def call(self, what: str) -> Callable[[], None]:
        """Note that this rank makes a call that all ranks have to make.

        Returns:
            A look at the others, for the waits of that call. It raises Diverged if one that has not
            made the call waits for something else, which this rank has not begun.
        """
        turn, due_s = self.detector.begin(what), time.monotonic() + LOOK_S

        def look() -> None:
            nonlocal due_s
            # Its waits ask far more often than the store of all ranks should be asked.
            if self.world > 1 and time.monotonic() >= due_s:
                self._look(Pending(what, turn=turn))
                due_s = time.monotonic() + LOOK_S

        return look

    def check_order(self, checksums: Sequence[float]) -> None:
        """Compare the orders in which the ranks have begun exchanges since the last comparison.

        `checksums` are `order.checksum()` of every rank, by rank, before any later exchange.

        Raises:
            Diverged: They are not the same. Every rank raises it.
        """
        names = self.order.names()
        self.order.clear()  # first: to gather the names is an exchange itself
        if all(each == checksums[0] for each in checksums):
            return
        by_rank = gather_objects(names, "what was exchanged", self.everybodys)
        raise Diverged(
            "the ranks did not exchange the same in the same order, and may have mixed up weights "
            f"or gradients: {difference(by_rank)}. Run the same modules in the same order on every "
            "rank; the weights have not been changed"
        )

    def everybodys(self, own: Tensor, what: str) -> Tensor:
        """The rows [n] of all ranks: [world, n]. Collective."""
        rows = own.new_empty(self.world * own.numel())
        by_rank = rows.view(self.world, -1)
        by_rank[self.rank].copy_(own.flatten())
        wait(self._gather(rows, list(by_rank), what))
        return by_rank

    def finish(self, pending: Pending) -> None:
        """See `wait`."""
        interrupt = self._waiter.interrupt
        try:
            if interrupt.reason:
                self._leave(pending)
            if pending.transport is not None:
                with transport_failures(pending.what):
                    ended = pending.transport.finish(
                        pending.works, self._waiter, lambda: self._look(pending)
                    )
                if not ended:
                    self._leave(pending)
            # A wait that was given up stays posted: the rank never begins what others wait for.
            self.detector.end_wait()
        except PeerLost as error:
            # A step that will have no effect ends without its peer.
            if not interrupt.covers(error):
                raise
            _fill(pending.arriving)

    def _look(self, pending: Pending) -> None:
        if circle := self.detector.look(pending.what, pending.turn):
            raise Diverged(circle)

    def _leave(self, pending: Pending) -> NoReturn:
        raise LeavingNow(f"{pending.what}: asked to leave: {self._waiter.interrupt.reason}")

    def _begin(
        self,
        kind: str,
        what: str,
        sent: Iterable[Tensor],
        arriving: Iterable[Tensor],
        sent_bytes: int,
        start: Callable[[Transport, int], list[Work]],
    ) -> Pending:
        """Begin an exchange of these buffers, on one device; without any, nothing travels.

        `sent`: what arrives may be a part of it. `start`: from the transport, and how many of this
        name came before, to what is under way.
        """
        interrupt, arriving = self._waiter.interrupt, tuple(arriving)
        # The step will have no effect: nothing travels any more, and zeros come.
        if interrupt.lost is not None and interrupt.fills:
            _fill(arriving)
            return Pending(what)
        buffers = (*sent, *arriving)
        transport = self.transports.of(buffers[0].device) if buffers else None
        works: list[Work] = []
        # Where exchanges are matched by their order alone, the ranks compare it.
        if self._ordered and (transport is None or not transport.any_order):
            self._lane.note(what)
        if transport is not None:
            try:
                with transport_failures(what):
                    works = start(transport, self.detector.begun[what])
            except PeerLost as error:
                if not interrupt.covers(error):
                    raise
            if self._watched:
                works = transport.watch(works, self._waiter)
        turn = self.detector.begin(what)
        WAITS.begin(what)
        return Pending(
            what, tuple(works), buffers, arriving, turn, self, transport, kind, sent_bytes
        )

    def own(self, full: Tensor) -> Tensor:
        """This rank's shard of `full` [world * n]: a view [n]."""
        start, stop = self.interval(full.numel(), self.rank)
        return full[start:stop]

    def interval(self, numel: int, rank: int) -> tuple[int, int]:
        """Where a rank's shard lies in [world * n] elements: [start, stop)."""
        size = numel // self.world
        start = self.shards[rank] * size
        return start, start + size

    def _by_rank(self, full: Tensor) -> list[Tensor]:
        """The shards of all ranks."""
        rows = full.view(self.world, -1)
        return [rows[shard] for shard in self.shards]

    def exchange_gradients(self, microbatches: Tensor, received: Tensor, what: str) -> Pending:
        """Send every other rank its shard of `microbatches` [world * n].

        `received` [(world - 1) * n] gets this rank's shard of the micro-batches of the other ranks;
        `in_microbatch_order` sorts these and its own. Only for shards in the order of ranks.
        """
        # Unreduced: the owner adds them in an order that the backend does not know (`ordered_sum`).
        sent_bytes = self._count("gradients", microbatches)
        out, into = microbatches.view(self.world, -1), received.view(self.world - 1, -1)

        def start(transport: Transport, turn: int) -> list[Work]:
            return transport.scatter(out, into, what, turn)

        return self._begin("gradients", what, [microbatches], [received], sent_bytes, start)

    def in_microbatch_order(self, microbatches: Tensor, received: Tensor) -> list[Tensor]:
        """This rank's shard of the gradients of rank 0, rank 1, ...: views [n]."""
        # In a micro-step rank r has run the r-th micro-batch: ranks are in the order of these.
        others = list(received.view(self.world - 1, -1).unbind(0)) if self.world > 1 else []
        others.insert(self.rank, self.own(microbatches))
        return others

    def all_gather(self, full: Tensor, what: str) -> Pending:
        """Fill `full` [world * n] in place; `own(full)` holds this rank's shard already."""
        if not self.topology.divides:
            return self._gather(full, self._by_rank(full), what)
        transport = self.transports.of(full.device)
        if transport.gathers_in_parts:

            def start(transport: Transport, _turn: int) -> list[Work]:
                return transport.gather_in_parts(full, self._waiter)

            start_own, stop_own = self.interval(full.numel(), self.rank)
            others = full[:start_own], full[stop_own:]
            return self._begin("gather", what, [full], others, self._count("gather", full), start)
        if transport.crosses_once:
            return self._gather(full, self._by_rank(full), what)
        # In pairs, a shard would go to every rank of another node: one gets it, and passes it on.
        rows = full.view(self.world, -1)
        inside = {
            rank: [rows[start:stop].view(-1) for start, stop in runs]
            for rank, runs in self._route.passes_on
        }
        wanted = {source: rows[shard] for source, shard in self._route.wanted}
        return self._relay(self.own(full), wanted, inside, what)

    def share(self, rows: Mapping[int, Tensor], what: str) -> Pending:
        """Give every rank what some have: by rank, contiguous tensors of any sizes.

        A rank's own holds it already; the others, of the same sizes everywhere, are filled.
        """
        rows = {rank: row for rank, row in rows.items() if row.numel()}
        own = rows.get(self.rank)
        some = next(iter(rows.values()), None)
        divides = self.topology.divides
        if some is None or not divides or not self.transports.of(some.device).passes_on:
            held = {} if own is None else dict.fromkeys(range(self.world), own)
            return self.exchange_pieces(held, rows, what)
        inside = {}
        for rank, runs in self._route.passes_on:
            sources = [self.owners[shard] for run in runs for shard in range(*run)]
            inside[rank] = [rows[source] for source in sources if source in rows]
        wanted = {source: rows[source] for source, _ in self._route.wanted if source in rows}
        return self._relay(own, wanted, inside, what)

    def _relay(
        self,
        own: Tensor | None,
        wanted: Mapping[int, Tensor],
        inside: Mapping[int, Sequence[Tensor]],
        what: str,
    ) -> Pending:
        """Send this rank's own to one rank of each other node, and then inside of nodes.

        `wanted`: by rank, what this rank receives of other nodes. `inside`: by rank of the node,
        what it then sends to the others.
        """
        held = {} if own is None else dict.fromkeys(self._route.to, own)
        mine, others = inside[self.rank], [rank for rank in inside if rank != self.rank]
        sent_bytes = sum(each.nbytes for each in held.values())
        sent_bytes += sum(each.nbytes for each in mine) * len(others)
        self.bytes_sent["gather"] += sent_bytes

        def start(transport: Transport, turn: int) -> list[Work]:
            def pass_on() -> list[Work]:
                works: list[Work] = []
                # As many exchanges as the most of a rank: all ranks must begin the same ones.
                for number in range(max(map(len, inside.values()))):
                    gives = dict.fromkeys(others, mine[number]) if number < len(mine) else {}
                    takes = {r: inside[r][number] for r in others if number < len(inside[r])}
                    name = f"{what}, inside the node, {number}"
                    works += transport.exchange_inside(gives, takes, name, turn)
                return works

            def begin() -> list[Work]:
                return transport.exchange(held, wanted, what, turn)

            used = (*mine, *arriving, *held.values())
            return transport.then(begin, pass_on, self._waiter, used)

        arriving = [*wanted.values(), *itertools.chain.from_iterable(inside[r] for r in others)]
        return self._begin("gather", what, mine, arriving, sent_bytes, start)

    def _gather(self, full: Tensor, rows: Sequence[Tensor], what: str) -> Pending:
        """Fill `rows`, by rank, the views that `full` is divided into."""

        def start(transport: Transport, turn: int) -> list[Work]:
            return transport.gather(full, rows, what, turn)

        if self.world == 1:
            return self._begin("", what, (), (), 0, start)
        others = [row for rank, row in enumerate(rows) if rank != self.rank]
        return self._begin("gather", what, [full], others, self._count("gather", full), start)

    def exchange_pieces(
        self, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor], what: str
    ) -> Pending:
        """Send tensors of any sizes to some ranks, and receive from some; by rank, contiguous.

        What one rank holds for another has the size that the other wants. Empty tensors, and those
        under this rank's own number, are not sent.
        """

        def to_others(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
            return {r: each for r, each in tensors.items() if r != self.rank and each.numel()}

        held, wanted = to_others(held), to_others(wanted)
        sent_bytes = sum(each.nbytes for each in held.values())
        self.bytes_sent["pieces"] += sent_bytes

        def start(transport: Transport, turn: int) -> list[Work]:
            return transport.exchange(held, wanted, what, turn)

        return self._begin("pieces", what, held.values(), wanted.values(), sent_bytes, start)

    def reduce_scatter(self, full: Tensor, own: Tensor, what: str) -> Pending:
        """Sum `full` [world * n] over all ranks in the backend's order; `own` [n] gets the shard.

        Only for shards in the order of ranks, and in a group in which nothing else is exchanged:
        a backend matches these by the order in which they begin.
        """
        sent_bytes = self._count("reduce", full)  # what a ring would send; nobody else knows

        def start(transport: Transport, _turn: int) -> list[Work]:
            return transport.reduce_scatter(full, own)

        return self._begin("reduce", what, [full], [own], sent_bytes, start)

    def all_reduce(self, full: Tensor, what: str) -> Pending:
        """Sum `full` over all ranks in place; like `reduce_scatter`, but every rank gets it all."""
        # As a ring sends: a reduce-scatter, then an all-gather.
        sent_bytes = self._count("reduce", full) + self._count("reduce", full)

        def start(transport: Transport, _turn: int) -> list[Work]:
            return transport.all_reduce(full)

        return self._begin("reduce", what, (), [full], sent_bytes, start)

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """Copy `tensor` from rank `source` to all ranks, and wait for it."""
        if self.world == 1:
            # Counted all the same: that a script exchanges of its own is to show at any world size.
            WAITS.begin(what)
            return
        sent_bytes = tensor.nbytes if self.rank == source else 0

        def start(transport: Transport, _turn: int) -> list[Work]:
            return transport.broadcast(tensor, source)

        sent, arriving = ([tensor], []) if self.rank == source else ([], [tensor])
        wait(self._begin("broadcast", what, sent, arriving, sent_bytes, start))

    def barrier(self, what: str) -> None:
        """Return when every rank has called this."""
        # An exchange as any other: it can be interrupted, and a deadlock in it is found.
        wait(self.all_gather(torch.zeros(self.world, device="cpu"), what))

    def _count(self, kind: str, full: Tensor) -> int:
        sent_bytes = full.nbytes // self.world * (self.world - 1)
        self.bytes_sent[kind] += sent_bytes
        return sent_bytes


def _fill(arriving: Iterable[Tensor]) -> None:
    # What is sent stays: it may be weights, of which a copy is under way to a checkpoint.
    for buffer in arriving:
        buffer.zero_()


def node_exchanges(
    size: int, interrupt: Interrupt | None = None, order: IssueOrder | None = None
) -> Collectives:
    """The exchanges within this rank's group of `size` consecutive ranks, a divisor of the world.

    Collective. `order` is compared by all ranks: all groups do the same, each with its own ranks.

    Raises:
        PeerLost: A peer is lost.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    division = [range(first, first + size) for first in range(0, world, size)]
    node = Collectives(
        own_group(division, timeout_of(None)),
        interrupt,
        name=f"deadlock/{rank // size}",
        order=order,
        division=division,
    )
    node.meet(local_device())
    return node
