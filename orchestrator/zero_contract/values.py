"""Sizes and durations as people write them, and the known name nearest to an unknown one.

A parser raises a ValueError whose text continues after the value as written: `5XB is not a size`.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Collection
from functools import total_ordering
from typing import TypeVar

_Value = TypeVar("_Value")

_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)([smhd]?)")
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_UNITS_BYTES = {"": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGTP", start=1)
    for suffix, base in (("B", 1000), ("I", 1024), ("IB", 1024))
}
_KUBERNETES_SIZE = re.compile(r"\d+(\.\d+)?([KMGTP]i)?")


def parse_seconds(text: str) -> float:
    """`30`, `30s`, `10m`, `2h` or `7d` as seconds. Raises ValueError."""
    match = _DURATION.fullmatch(text)
    if match is None or math.isinf(duration_s := float(match[1]) * _UNITS_S[match[2]]):
        raise ValueError("is not a length of time; write seconds, such as 30, or 10m, or 2h, or 7d")
    return duration_s


def in_words(duration_s: float) -> str:
    """A duration for people: `40 s`, `31 minutes`, `3 days`."""
    # A unit is used from two of it on: 90 minutes are not 2 hours.
    for unit, unit_s in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if duration_s >= 2 * unit_s:
            return f"{duration_s / unit_s:.0f} {unit}"
    return f"{max(duration_s, 0):.0f} s"


def parse_size_bytes(text: str) -> int:
    """`5GB`, `200MiB`, `1.5Gi` or bytes. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    unit_bytes = _UNITS_BYTES.get(match[2].upper()) if match else None
    if match is None or unit_bytes is None or math.isinf(number := float(match[1]) * unit_bytes):
        raise ValueError("is not a size; write a size such as 5GB or 200MiB")
    size_bytes: int = round(number)
    return size_bytes


@total_ordering
class Size:
    """A number of bytes in Kubernetes' notation, such as `16Gi`. Raises ValueError for others."""

    def __init__(self, text: str) -> None:
        if _KUBERNETES_SIZE.fullmatch(text) is None:
            raise ValueError("is not a size; write 512Mi, 16Gi or 2Ti")
        self.text = text
        self.size_bytes = parse_size_bytes(text)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Size({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.size_bytes == other.size_bytes

    def __lt__(self, other: Size) -> bool:
        return self.size_bytes < other.size_bytes

    def __hash__(self) -> int:
        return hash(self.size_bytes)


def argument_type(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """A `type` for argparse whose error shows the value as written and the parser's message."""

    def convert(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text} {error}") from None

    return convert


def whole(problem: str, least: int = 0, most: float = math.inf) -> Callable[[str], int]:
    """A `type` for argparse: a whole number; of any other text the error is it and `problem`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}{problem}")
        return int(text)

    return parse


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that is similar to `name`, if any is."""
    near = difflib.get_close_matches(name, known, n=1)
    return near[0] if near else None
