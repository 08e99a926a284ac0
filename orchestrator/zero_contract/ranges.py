"""The numbers that a config key allows, and the error for a number outside of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_contract.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The numbers from `least` to `most`, both included; `whole`: integers only."""

    least: float = 0
    most: float = math.inf
    whole: bool = True

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value as written in the config, or None; a quoted number is one."""
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or (self.whole and number != int(number)):
            return f"{value!r} is not {'an integer' if self.whole else 'a number'}"
        if number < self.least:
            return f"{value} is less than {self.least:g}"
        return f"{value} is more than {self.most:g}" if number > self.most else None


def check_range(where: str, value: Any, allowed: Range) -> None:
    """Raises ConfigError, naming the key `where`, if the value is out of its range."""
    problem = allowed.problem(value)
    if problem is not None:
        raise ConfigError(f"{where}: {problem}")


def check_least(section: str, values: object, least: Mapping[str, float]) -> None:
    """Raises ConfigError if a field of a section is below its minimum; None is allowed."""
    for name, limit in least.items():
        value = getattr(values, name)
        if isinstance(value, int | float) and not value >= limit:
            raise ConfigError(f"{section}.{name}: {value:g} is less than {limit:g}")
