"""How fast a job trains: its speed, and the quantiles of the durations of its steps.

Each agent counts the steps of its workers in buckets, and the counts of all agents add up.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from zero_contract.decoding import MalformedError, decode

PER_OCTAVE = 16
"""Buckets between a duration and its double: 4.4 % apart, so a quantile is exact to 2.2 %."""
SHORTEST_S = 1e-6
STALL_S = 15.0
"""No step takes unusually long that takes at most this long."""
STALL_FACTOR = 5.0
"""The same, where steps are long: so many times the usual time of a long one."""

Counts = Mapping[int, int]
"""Bucket -> the number of durations in it."""


HISTOGRAM_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds of the buckets of a `Histogram`; one more bucket has what is longer."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Durations in few buckets, which only grow: for Prometheus."""

    counts: tuple[int, ...] = (0,) * (len(HISTOGRAM_S) + 1)
    """The number in each bucket, not cumulative."""
    sum_s: float = 0.0

    def add(self, duration_s: float) -> Histogram:
        """The histogram with one more duration."""
        place = bisect_left(HISTOGRAM_S, duration_s)
        counts = (*self.counts[:place], self.counts[place] + 1, *self.counts[place + 1 :])
        return Histogram(counts=counts, sum_s=self.sum_s + duration_s)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What is trained in a second."""

    steps: float
    samples: float | None = None
    """None: the workers do not say."""
    tokens: float | None = None
    """None: the script does not count them."""


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """How long steps take, saves left out."""

    count: int
    """The number of steps."""
    p50_s: float
    """Half of them took at most this long."""
    p90_s: float
    p99_s: float


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What an agent publishes of the steps of its workers in this round."""

    speed: Speed | None = None
    """Over the last minute."""
    counts: Counts = field(default_factory=dict)
    """The durations of the steps of all workers."""
    ranks: Mapping[str, Quantiles] = field(default_factory=dict)
    """Rank -> the durations of its steps."""


def to_record(pace: Pace) -> dict[str, Any]:
    """A pace as JSON."""
    return asdict(pace)


def from_record(record: Any) -> Pace:
    """The pace in a record; an empty one if there is none, or it is of another version."""
    with contextlib.suppress(MalformedError):
        return decode(Pace, record, "a pace")
    return Pace()


def stall_s(usual_s: float) -> float:
    """The time after which a step takes unusually long, given the usual time of a long one."""
    return max(STALL_S, STALL_FACTOR * usual_s)


def stalls(took_s: float, usual_s: float) -> bool:
    """Whether a step takes unusually long."""
    return took_s > stall_s(usual_s)


def bucket(duration_s: float) -> int:
    """The bucket of a duration."""
    # A clock may not have advanced between two steps, and 0 has no logarithm.
    return round(math.log2(max(duration_s, SHORTEST_S)) * PER_OCTAVE)


def add_up(parts: Iterable[Counts]) -> dict[int, int]:
    """The counts of several processes together."""
    total: Counter[int] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def quantiles(counts: Counts) -> Quantiles | None:
    """The quantiles of the durations in some buckets; None without one."""
    count = sum(counts.values())
    if not count:
        return None
    return Quantiles(
        count=count,
        p50_s=_quantile(counts, count, 0.5),
        p90_s=_quantile(counts, count, 0.9),
        p99_s=_quantile(counts, count, 0.99),
    )


def _quantile(counts: Counts, count: int, part: float) -> float:
    """The least duration that so large a part of the durations does not exceed."""
    needed = math.ceil(part * count)
    for place in sorted(counts):
        needed -= counts[place]
        if needed <= 0:
            # No more digits than a bucket is exact to.
            return float(f"{2 ** (place / PER_OCTAVE):.3g}")
    raise AssertionError("fewer durations than were counted")
