"""The transport of each kind of device: chosen by the backend that connects such devices."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.exchange.cpu.transport import CpuTransport, HostTransport
from zero_comm.exchange.transport import Parts, Transport
from zero_comm.waiting import Waiter, Work
from zero_comm.worker.distributed import GROUP_TIMEOUT_S

_log = logging.getLogger(__name__)

_HOST = torch.device("cpu")
_CONTROL: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)
"""By group, the one of the same ranks that reaches host memory, where the group does not."""


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """The backend of a group for each kind of device that it connects."""
    pairs = (each.partition(":") for each in dist.get_backend_config(group).split(","))
    return {kind: backend for kind, _, backend in pairs}


def way(kind: str, backends: Mapping[str, str]) -> tuple[type[Transport], str]:
    """The transport of a kind of device (cpu, cuda, ...), and why; `backends` as `backends_of`."""
    backend = backends.get(kind)
    if kind == "cpu":
        if backend in (None, "gloo"):
            return CpuTransport, "over gloo"
        return HostTransport, f"over {backend}"
    if backend in (None, "gloo"):
        return StagedTransport, (
            f"tensors on {kind} travel through host memory, which is slow: the process group has "
            f"no other backend for them; initialize it with cpu:gloo,{kind}:nccl, or let "
            "initialize() do it"
        )
    return Transport, f"over {backend}"


def timeout_of(group: dist.ProcessGroup | None) -> float:
    """Seconds that a group waits for an exchange."""
    group = group or dist.group.WORLD
    assert group is not None
    for kind in backends_of(group):
        options = getattr(group._get_backend(torch.device(kind)), "options", None)
        if options is not None:
            return float(options._timeout.total_seconds())
    return GROUP_TIMEOUT_S


def own_group(
    groups: Sequence[Sequence[int]], timeout_s: float, backend: str | None = None
) -> dist.ProcessGroup:
    """This rank's of some groups of ranks, in the numbers of the default group.

    Collective of the job.
    """
    timeout = timedelta(seconds=timeout_s)
    # Every rank creates all of them: torch names a group that its own ranks alone create by how
    # many this rank is in, which differs among ranks if a script has made groups of some.
    made: list[dist.ProcessGroup] = [
        dist.new_group(list(ranks), backend=backend, timeout=timeout) for ranks in groups
    ]
    own = dist.get_rank()
    return next(group for group, ranks in zip(made, groups, strict=True) if own in ranks)


class Transports:
    """The ways of one rank within one process group."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        world: int,
        division: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Exchange within a group; None: the default one.

        `division`, of a group of some ranks: the ranks of each group that the job is divided into,
        this one among them; see `own_group`.
        """
        self._group = group
        self._division = division
        self._rank = rank
        self._world = world
        self._by_kind: dict[str, Transport] = {}

    def of(self, device: torch.device) -> Transport:
        """The transport of tensors on `device`. Collective of the job the first time."""
        if device.type not in self._by_kind:
            backends = backends_of(self._group)
            kind, reason = way(device.type, backends)
            if kind is StagedTransport and self._rank == 0 and self._world > 1:
                _log.warning("%s", reason)
            group = self._group
            # gloo's own needs a group whose CPUs gloo connects; others go over the group itself.
            over_gloo = issubclass(kind, CpuTransport | StagedTransport)
            if over_gloo and backends.get("cpu") != "gloo":
                whole = group or dist.group.WORLD
                assert whole is not None
                if whole not in _CONTROL:
                    division = self._division or [dist.get_process_group_ranks(whole)]
                    _CONTROL[whole] = own_group(division, timeout_of(whole), "gloo")
                group = _CONTROL[whole]
            self._by_kind[device.type] = kind(group, self._rank, self._world, device)
        return self._by_kind[device.type]

    def divide(self, device: torch.device, nodes: Sequence[range], *, equal: bool) -> None:
        """Let tensors on `device` travel between nodes first and then inside of them. Collective.

        `equal`: connect the ranks of the same number on all nodes, too.
        """
        transport = self.of(device)
        # What has names needs no groups of its own.
        if transport.any_order:
            return
        everybody = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        backend, timeout_s = backends_of(self._group)[device.type], timeout_of(self._group)

        def found(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
            named = [[everybody[rank] for rank in ranks] for ranks in groups]
            return own_group(named, timeout_s, backend)

        transport.divide(
            Parts(
                inside=found(nodes),
                node=next(ranks for ranks in nodes if self._rank in ranks),
                between=found(list(zip(*nodes, strict=True))) if equal else None,
            )
        )


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
    """A transport of tensors on a device that only gloo connects: through host memory.

    It is slow, and there for ranks that share one device, which NCCL refuses: tests on a machine
    with one GPU run through it.
    """

    any_order = True

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, world: int, device: torch.device
    ) -> None:
        super().__init__(group, rank, world, device)
        self._by_host = CpuTransport(group, rank, world, _HOST)

    def meet(
        self, everybodys: Callable[[Tensor, str], Tensor], changed: threading.Condition
    ) -> None:
        """See `CpuTransport.meet`."""
        self._by_host.meet(everybodys, changed)

    def have_ended(self, works: Sequence[Work]) -> bool:
        """See `CpuTransport.have_ended`."""
        return self._by_host.have_ended(works)

    def finish(self, works: Sequence[Work], waiter: Waiter, look: Callable[[], None]) -> bool:
        """See `CpuTransport.finish`; then what was received is on the device."""
        staged = [work for work in works if isinstance(work, _Staged)]
        if not self._by_host.finish([each for work in staged for each in work.works], waiter, look):
            return False
        # Here and not by a thread: the copy goes through the stream of the thread that uses the
        # tensor.
        for work in staged:
            for tensor, copy in work.arriving:
                tensor.copy_(copy)
        return True

    def watch(self, works: list[Work], waiter: Waiter) -> list[Work]:
        """See `Transport`."""
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
        """See `Transport`."""
        copy = _room(into)
        return [_Staged(self._by_host.scatter(out.cpu(), copy, what, turn), ((into, copy),))]

    def gather(self, full: Tensor, rows: Sequence[Tensor], what: str, turn: int) -> list[Work]:
        """See `Transport`."""
        copies = [row.cpu() if rank == self._rank else _room(row) for rank, row in enumerate(rows)]
        works = self._by_host.gather(full, copies, what, turn)
        pairs = zip(rows, copies, strict=True)
        arriving = tuple(pair for rank, pair in enumerate(pairs) if rank != self._rank)
        return [_Staged(works, arriving)]

    def exchange(
        self, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor], what: str, turn: int
    ) -> list[Work]:
        """See `Transport`."""
        copies = {rank: _room(tensor) for rank, tensor in wanted.items()}
        given = {rank: tensor.cpu() for rank, tensor in held.items()}
        works = self._by_host.exchange(given, copies, what, turn)
        return [_Staged(works, tuple((wanted[rank], copies[rank]) for rank in wanted))]

    def reduce_scatter(self, full: Tensor, own: Tensor) -> list[Work]:
        """See `Transport`."""
        copy = _room(own)
        return [_Staged(self._by_host.reduce_scatter(full.cpu(), copy), ((own, copy),))]

    def all_reduce(self, full: Tensor) -> list[Work]:
        """See `Transport`."""
        copy = full.cpu()
        return [_Staged(self._by_host.all_reduce(copy), ((full, copy),))]

    def broadcast(self, tensor: Tensor, source: int) -> list[Work]:
        """See `Transport`."""
        copy = tensor.cpu()
        return [_Staged(self._by_host.broadcast(copy, source), ((tensor, copy),))]


def _room(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device=_HOST)
