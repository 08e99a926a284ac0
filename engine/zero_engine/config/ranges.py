"""Which numbers a key may have: the sections say it of theirs, a table of the keys without effect.

A number that no run could mean (a bucket of -1 elements) is a slip of the pen, also where nothing
reads it: whoever wrote it believes that it has an effect.

Called by the sections and by `parse`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_contract.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The numbers from `least` to `most`."""

    least: float = 0
    most: float = math.inf
    whole: bool = True

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value as it was written, or None; numbers may be in quotes."""
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or (self.whole and number != int(number)):
            return f"{value!r} is not {'an integer' if self.whole else 'a number'}"
        if number < self.least:
            return f"{value} is less than {self.least:g}"
        return f"{value} is more than {self.most:g}" if number > self.most else None


_SIZE, _COUNT = Range(), Range(least=1)

WITHOUT_EFFECT: Mapping[str, Range] = {
    "activation_checkpointing.number_checkpoints": _COUNT,
    **{
        f"aio.{name}": _COUNT
        for name in ("block_size", "intra_op_parallelism", "queue_depth", "thread_count")
    },
    "comet.samples_log_interval": _COUNT,
    # A divisor: at 0 it would divide by zero, and so would what rounds to it in fp32.
    "gradient_predivide_factor": Range(least=1e-30, whole=False),
    **{
        f"zero_optimization.{name}": _SIZE
        for name in (
            "allgather_bucket_size",
            "offload_optimizer.buffer_count",
            "reduce_bucket_size",
            "stage3_max_reuse_distance",
            "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold",
            "stage3_param_persistence_threshold",
        )
    },
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": Range(most=1, whole=False),
}
"""Path of a key without effect -> what it may be, beside null and "auto"."""


_SIGNED = (-(1 << 63), (1 << 63) - 1)

BITS: Mapping[str, tuple[int, int]] = {
    "int": _SIGNED,
    "Interval": _SIGNED,
    "tuple[int, ...]": _SIGNED,
    "Seed": (0, (1 << 64) - 1),
}
"""A field's annotation -> the smallest and the largest integer that it holds.

Sizes and counts become indices of tensors and records in checkpoints, of 64 bits with a sign. A
seed is hashed as 64 bits without one: -1 would be the same run as 2**64 - 1, not a random one.
"""


def check_bits(where: str, annotation: str, value: Any) -> None:
    """Raises ConfigError if an integer, or one of several, does not fit into its 64 bits."""
    if annotation not in BITS or value is None:
        return
    least, most = BITS[annotation]
    for number in value if isinstance(value, tuple) else (value,):
        if not least <= number <= most:
            raise ConfigError(f"{where}: {number} is not from {least} to {most}, as 64 bits are")


def check_range(where: str, value: Any, allowed: Range) -> None:
    """Raises ConfigError if a key has a value that is out of its range."""
    problem = allowed.problem(value)
    if problem is not None:
        raise ConfigError(f"{where}: {problem}")


def check_least(section: str, values: object, least: Mapping[str, float]) -> None:
    """Raises ConfigError if a field of a section is less than it may be; None is never."""
    for name, limit in least.items():
        value = getattr(values, name)
        if isinstance(value, int | float) and not value >= limit:
            raise ConfigError(f"{section}.{name}: {value:g} is less than {limit:g}")
