"""The sections of what is written about a run: curves, counts of exchanges, operations.

`monitors`, `comms_log` and `flops_profiler` read them.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_contract.errors import ConfigError
from zero_engine.config.ranges import check_least

OPERATIONS = ("leaves", "gather", "pieces", "broadcast")
"""Of an engine: gradients to the owners of their sums; shards, norms and notes to everybody; pieces
of whole parameters to one rank and back; what one rank has to everybody."""


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
class CommsLogger:
    """Counts of the engine's exchanges, for `comm.log_summary`."""

    enabled: bool = False
    verbose: bool = False
    """A line for each exchange when it has ended,"""
    debug: bool = False
    """and in it the name of what was exchanged."""
    prof_all: bool = True
    """Every kind,"""
    prof_ops: tuple[str, ...] = ()
    """or these alone."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.prof_ops if name not in OPERATIONS]
        if unknown and not self.prof_all:
            raise ConfigError(
                f"comms_logger.prof_ops: {unknown[0]!r} is not one of {', '.join(OPERATIONS)}"
            )


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
