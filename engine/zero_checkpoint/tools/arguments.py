"""Numbers, sizes, durations and pairs as people type them on the command line.

Each parser raises argparse's own error, with the remedy. Called by `cli` and `convert`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero_checkpoint.retention import Best

_SIZES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20}
_SIZES["GIB"] = 1 << 30
_DURATIONS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _parse_size(text: str) -> int:
    """`5GB`, `200MiB` or bytes."""
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    if match is None or match[2].upper() not in _SIZES or int(match[1]) < 1:
        raise ValueError(f"{text!r}: write a size such as 5GB or 200MiB")
    return int(match[1]) * _SIZES[match[2].upper()]


def _parse_duration_s(text: str) -> int:
    """`90s`, `30m`, `1h`, `2d` or seconds."""
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip())
    if match is None or match[2] not in _DURATIONS_S:
        raise ValueError(f"{text!r}: write a duration such as 90s, 30m, 1h or 2d")
    return int(match[1]) * _DURATIONS_S[match[2]]


def _checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type whose own message is shown."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _whole_number(at_least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < at_least:
            raise ValueError(f"{text!r}: write a whole number from {at_least}")
        return int(text)

    return _checked(parse)


positive, not_negative = _whole_number(1), _whole_number(0)


def _parse_pair(text: str) -> tuple[str, str]:
    other, sign, name = text.partition("=")
    if not (other and sign and name):
        raise ValueError(f"{text!r}: write OTHER=NAME, such as lm_head.weight=embed.weight")
    return other, name


def _parse_best(text: str) -> Best:
    """`eval_loss:min` or `accuracy:max:3`."""
    match = re.fullmatch(r"(?P<metric>.+?):(?P<mode>min|max)(:(?P<count>[1-9]\d*))?", text)
    if match is None:
        raise ValueError(f"{text!r}: write METRIC:min or METRIC:max, then :N for more than one")
    return Best(metric=match["metric"], mode=match["mode"], count=int(match["count"] or 1))


def _parse_local(text: str) -> Path:
    """A path of this machine, for what is not kept in a store."""
    if "://" in text:
        raise ValueError(f"{text}: only checkpoints can be in a store; copy it, give a local path")
    return Path(text)


local_path = _checked(_parse_local)
pair, best = _checked(_parse_pair), _checked(_parse_best)
size, duration_s = _checked(_parse_size), _checked(_parse_duration_s)
