"""The transport of each kind of device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zero_comm.cpu.transport import CpuTransport
from zero_comm.transport import Transport


class Transports:
    """The ways of one rank within one process group."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world: int) -> None:
        """Exchange within a group; None is the default one."""
        self._by_kind: dict[str, Transport] = {"cpu": CpuTransport(group, rank, world)}
        self._of_devices = Transport(group, rank, world)

    def of(self, device: torch.device) -> Transport:
        """That of tensors on `device`."""
        return self._by_kind.get(device.type, self._of_devices)
