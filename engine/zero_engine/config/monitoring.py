"""The sections of what is written about a run: curves, operations.

`monitors` and `flops_profiler` read them.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_contract.ranges import check_least


@dataclass(frozen=True, kw_only=True)
class FileMonitor:
    """Curves in files below `output_path`/`job_name`."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclass(frozen=True, kw_only=True)
class WandbMonitor:
    """Curves at Weights & Biases."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


@dataclass(frozen=True, kw_only=True)
class FlopsProfiler:
    """Floating-point operations of one step."""

    enabled: bool = False
    profile_step: int = 1
    """How many steps come before it."""
    module_depth: int = -1
    """Of the modules shown; -1: all."""
    detailed: bool = True
    """Show modules."""
    output_file: str | None = None
    """Besides the log."""
    recompute_fwd_factor: float = 0.0
    """Without effect: what is recomputed in backward is counted there."""
    top_modules: int = 1
    """Without effect: all modules are shown, the largest first."""

    def __post_init__(self) -> None:
        check_least("flops_profiler", self, _AT_LEAST)


_AT_LEAST = {"profile_step": 0, "module_depth": -1, "recompute_fwd_factor": 0, "top_modules": 1}
