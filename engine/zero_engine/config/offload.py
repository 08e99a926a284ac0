"""The sections "offload_optimizer" and "offload_param": where state rests between uses.

Source: DeepSpeed 0.19.8, for names and defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zero_contract.errors import ConfigError
from zero_contract.ranges import check_least

NONE, CPU, NVME = "none", "cpu", "nvme"
DEVICES = (NONE, CPU, NVME)


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer:
    """Where master weights and optimizer state rest; the optimizer then steps on the CPU."""

    device: str = NONE
    """Where they rest: "none", "cpu" (host memory) or "nvme" (a disk)."""
    nvme_path: str | None = None
    """With device "nvme": a directory on a local disk, the same path on every node."""
    pin_memory: bool = True
    """Allocate page-locked host memory, which makes copies from and to a GPU fast."""
    ratio: float = 1.0
    """At stage 3: the part of the state, from 0 to 1, that does not stay on the device."""

    def __post_init__(self) -> None:
        _check_device("offload_optimizer", self.device, self.nvme_path)
        if not 0 <= self.ratio <= 1:
            raise ConfigError(
                f"zero_optimization.offload_optimizer.ratio: {self.ratio} is not in [0, 1]"
            )


@dataclass(frozen=True, kw_only=True)
class OffloadParam:
    """Where the weights rest that modules are gathered from, at stage 3."""

    device: str = NONE
    """Where they rest: "none", "cpu" (host memory) or "nvme" (a disk)."""
    nvme_path: str | None = None
    """With device "nvme": a directory on a local disk, the same path on every node."""
    pin_memory: bool = True
    """Allocate page-locked host memory, which makes copies from and to a GPU fast."""
    max_in_cpu: int = 1_000_000_000
    """With device "nvme": elements of each rank that stay in the host's memory."""

    def __post_init__(self) -> None:
        _check_device("offload_param", self.device, self.nvme_path)
        check_least("zero_optimization.offload_param", self, {"max_in_cpu": 0})


def _check_device(section: str, device: str, nvme_path: str | None) -> None:
    where = f"zero_optimization.{section}"
    if device not in DEVICES:
        raise ConfigError(f'{where}.device: {device!r} is not "none", "cpu" or "nvme"')
    if device == NVME and nvme_path is None:
        raise ConfigError(f'{where}.device "nvme" needs {where}.nvme_path, a directory on a disk')
    if device == NVME and nvme_path is not None and not Path(nvme_path).is_absolute():
        raise ConfigError(f"{where}.nvme_path: {nvme_path!r} is not an absolute path")
