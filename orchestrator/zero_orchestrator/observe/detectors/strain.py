"""The cause of a slow rank, as far as the kernel of its node shows it.

Pure. A node publishes its strain with its progress: a number for each of `CAUSES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One strain."""

    name: str
    is_cause: Callable[[float], bool]
    """Whether a strain of this size can make a rank slow."""
    describe: Callable[[float], str]


CAUSES: Sequence[Cause] = (
    Cause(
        name="throttled",
        is_cause=lambda part: part >= 0.05,
        describe=lambda part: (
            f"its CPU quota stops it in {part:.0%} of the scheduling periods "
            "(cpu.stat of its cgroup)"
        ),
    ),
    Cause(
        name="swap_bytes_per_s",
        is_cause=lambda rate: rate >= 1e6,
        describe=lambda rate: f"its node swaps {rate / 1e6:,.0f} MB/s",
    ),
    Cause(
        name="hot_events",
        is_cause=lambda count: count >= 1,
        describe=lambda count: f"its CPUs were slowed down {count:,.0f} times for their heat",
    ),
    Cause(
        name="clock",
        is_cause=lambda part: part <= 0.6,
        describe=lambda part: f"its CPUs run at {part:.0%} of their highest clock",
    ),
    Cause(
        name="temperature_c",
        is_cause=lambda degrees: degrees >= 90,
        describe=lambda degrees: f"its node is {degrees:.0f} °C hot",
    ),
    Cause(
        name="steal",
        is_cause=lambda part: part >= 0.05,
        describe=lambda part: f"other virtual machines take {part:.0%} of its CPU time",
    ),
    Cause(
        name="cpu_pressure",
        is_cause=lambda part: part >= 0.25,
        describe=lambda part: f"its processes wait for a free CPU {part:.0%} of the time",
    ),
)
"""The causes, the most certain ones first."""


def cause(strain: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> str:
    """The causes of a slow rank, in words, without what `others` all have."""

    def strained(each: Cause, one: Mapping[str, float]) -> bool:
        return each.name in one and each.is_cause(one[each.name])

    found = [
        each.describe(strain[each.name])
        for each in CAUSES
        if strained(each, strain) and not all(strained(each, other) for other in others)
    ]
    return "; ".join(found)
