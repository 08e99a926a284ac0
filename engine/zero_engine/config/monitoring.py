"""What is written about a run: "csv_monitor", "tensorboard", "wandb", and "comms_logger".

`monitors` and `comms_log` read them.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_engine.errors import ConfigError

OPERATIONS = ("leaves", "gather", "broadcast")
"""Of an engine: gradients to the owners of their sums; shards, norms and notes to everybody; what
one rank has to everybody."""


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
