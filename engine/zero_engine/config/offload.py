"""The sections "offload_optimizer" and "offload_param": where state rests between uses.

Source: DeepSpeed 0.19.8, for names and defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from zero_contract.errors import ConfigError
from zero_contract.sections import Share, Spelled, Whole

NONE, CPU, NVME = "none", "cpu", "nvme"
Device = Annotated[
    str, Meta(pattern=f"^({NONE}|{CPU}|{NVME})$", description='"none", "cpu" or "nvme"')
]
FROM_BOOL = Spelled(lambda on: {"device": CPU if on else NONE} if isinstance(on, bool) else on)
"""DeepSpeed's older "cpu_offload"."""


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer:
    """Where master weights and optimizer state rest; the optimizer then steps on the CPU."""

    device: Device = NONE
    """Where they rest: "none", "cpu" (host memory) or "nvme" (a disk)."""
    nvme_path: str | None = None
    """With device "nvme": a directory on a local disk, the same path on every node."""
    pin_memory: bool = True
    """Allocate page-locked host memory, which makes copies from and to a GPU fast."""
    ratio: Share = 1.0
    """At stage 3: the part of the state, from 0 to 1, that does not stay on the device."""

    def __post_init__(self) -> None:
        _check_path("offload_optimizer", self.device, self.nvme_path)


@dataclass(frozen=True, kw_only=True)
class OffloadParam:
    """Where the weights rest that modules are gathered from, at stage 3."""

    device: Device = NONE
    """Where they rest: "none", "cpu" (host memory) or "nvme" (a disk)."""
    nvme_path: str | None = None
    """With device "nvme": a directory on a local disk, the same path on every node."""
    pin_memory: bool = True
    """Allocate page-locked host memory, which makes copies from and to a GPU fast."""
    max_in_cpu: Whole = 1_000_000_000
    """With device "nvme": elements of each rank that stay in the host's memory."""

    def __post_init__(self) -> None:
        _check_path("offload_param", self.device, self.nvme_path)


def _check_path(section: str, device: str, nvme_path: str | None) -> None:
    where = f"zero_optimization.{section}"
    if device == NVME and nvme_path is None:
        raise ConfigError(f'{where}.device "nvme" needs {where}.nvme_path, a directory on a disk')
    if device == NVME and nvme_path is not None and not Path(nvme_path).is_absolute():
        raise ConfigError(f"{where}.nvme_path: {nvme_path!r} is not an absolute path")
