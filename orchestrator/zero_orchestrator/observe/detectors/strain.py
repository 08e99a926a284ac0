"""The cause of a slow rank, as far as the kernel of its node shows it.

Pure. A node publishes its strain with its progress: a number for each of `CAUSES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StrainCause:
    """One strain."""

    name: str
    least: float
    """From this size on it can make a rank slow; `below`: up to it."""
    text: str
    unit: float = 1.0
    """What the text counts in."""
    below: bool = False

    def applies(self, strain: Mapping[str, float]) -> bool:
        """Whether a node is strained so."""
        size = strain.get(self.name)
        return size is not None and (size <= self.least if self.below else size >= self.least)


CAUSES: Sequence[StrainCause] = (
    StrainCause(
        "throttled",
        0.05,
        "its CPU quota stops it in {:.0%} of the scheduling periods (cpu.stat of its cgroup)",
    ),
    StrainCause("swap_bytes_per_s", 1e6, "its node swaps {:,.0f} MB/s", unit=1e6),
    StrainCause("hot_events", 1, "its CPUs were slowed down {:,.0f} times for their heat"),
    StrainCause("clock", 0.6, "its CPUs run at {:.0%} of their highest clock", below=True),
    StrainCause("temperature_c", 90, "its node is {:.0f} °C hot"),
    StrainCause("steal", 0.05, "other virtual machines take {:.0%} of its CPU time"),
    StrainCause("cpu_pressure", 0.25, "its processes wait for a free CPU {:.0%} of the time"),
)
"""The causes, the most certain ones first."""


def cause(strain: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> str:
    """The causes of a slow rank, in words, without what `others` all have."""
    found = [
        each.text.format(strain[each.name] / each.unit)
        for each in CAUSES
        if each.applies(strain) and not all(map(each.applies, others))
    ]
    return "; ".join(found)
