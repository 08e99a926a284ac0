"""The transport of each kind of device: chosen by the backend that connects such devices."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from zero_comm.exchange.cpu.transport import CpuTransport, HostTransport
from zero_comm.exchange.staged import StagedTransport
from zero_comm.exchange.transport import Parts, Transport
from zero_comm.worker.distributed import GROUP_TIMEOUT_S

_log = logging.getLogger(__name__)

_CONTROL: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)
"""By group, the one of the same ranks that reaches host memory, where the group does not."""


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """The backend of a group for each kind of device that it connects."""
    pairs = (each.partition(":") for each in dist.get_backend_config(group).split(","))
    return {kind: backend for kind, _, backend in pairs}


def way(kind: str, backends: Mapping[str, str]) -> tuple[type[Transport], str]:
    """The transport of a kind of device, and why.

    Args:
        kind: Of the device: cpu, cuda, ...
        backends: See `backends_of`.
    """
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
    """This rank's of some groups. Collective of all ranks of the job.

    Every rank creates all of them, so that all name them alike: torch names a group that its own
    ranks alone create by how many this rank is in, and that differs if a script has made groups of
    some ranks.

    Args:
        groups: The ranks of each, by their numbers in the default group; this rank is in one.
        timeout_s: Seconds that a rank waits for an exchange.
        backend: Of the groups; None: that of the default group.
    """
    timeout = timedelta(seconds=timeout_s)
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
        """Exchange within a group.

        Args:
            group: The group; None: the default one.
            rank: This rank's number in it.
            world: Its ranks.
            division: Of a group of some ranks: the ranks of each group that the job is divided
                into, this one among them; see `own_group`.
        """
        self._group = group
        self._division = division
        self._rank = rank
        self._world = world
        self._by_kind: dict[str, Transport] = {}

    def of(self, device: torch.device) -> Transport:
        """That of tensors on `device`. Collective of the job when asked for the first time."""
        if device.type not in self._by_kind:
            backends = backends_of(self._group)
            kind, reason = way(device.type, backends)
            if kind is StagedTransport and self._rank == 0 and self._world > 1:
                _log.warning("%s", reason)
            # What is not gloo's own goes over the group itself.
            over_gloo = issubclass(kind, CpuTransport | StagedTransport)
            group = self._control(backends) if over_gloo else self._group
            self._by_kind[device.type] = kind(group, self._rank, self._world, device)
        return self._by_kind[device.type]

    def divide(self, device: torch.device, nodes: Sequence[range], *, equal: bool) -> None:
        """Let tensors on `device` travel between nodes first and then inside of them. Collective.

        What has names needs no groups of its own for that.

        Args:
            device: Where they are.
            nodes: The ranks of each.
            equal: Connect the ranks of the same number on all nodes, too.
        """
        transport = self.of(device)
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

    def _control(self, backends: Mapping[str, str]) -> dist.ProcessGroup | None:
        """The group itself if gloo connects its CPUs, else one of the same ranks where it does."""
        if backends.get("cpu") == "gloo":
            return self._group
        group = self._group or dist.group.WORLD
        assert group is not None
        if group not in _CONTROL:
            division = self._division or [dist.get_process_group_ranks(group)]
            _CONTROL[group] = own_group(division, timeout_of(group), "gloo")
        return _CONTROL[group]
