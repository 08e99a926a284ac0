"""DeepSpeed's `deepspeed.utils.logging`: the logger of scripts, and lines from some ranks only."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch.distributed as dist

from zero_contract.errors import ConfigError
from zero_engine.observe.reporting import add_handler

__all__ = ["log_dist", "logger", "print_rank_0", "set_log_level_from_string"]

_LEVELS = ("debug", "info", "warning", "error", "critical")

logger = logging.getLogger("DeepSpeed")
# Now, and whatever the config asks the engine to report: a script reads its own lines.
logger.setLevel(logging.INFO)
add_handler(logger)


def log_dist(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; on all of them for None, [] or [-1]."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if not ranks or -1 in ranks or rank in ranks or rank == -1:
        logger.log(level, "[rank %d] %s", rank, message)


def set_log_level_from_string(
    log_level_str: str, custom_logger: logging.Logger | None = None
) -> None:
    """Set the level of a logger and of its handlers, by default of `logger`, by name: "info".

    Raises:
        ConfigError: There is no such level.
    """
    if log_level_str.lower() not in _LEVELS:
        raise ConfigError(f"log level {log_level_str!r} is none of {', '.join(_LEVELS)}")
    one = custom_logger or logger
    one.setLevel(log_level_str.upper())
    for handler in one.handlers:
        handler.setLevel(log_level_str.upper())


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    """Log on rank 0, if asked to."""
    if debug or force:
        log_dist(message, [0])
