"""Numbers, sizes, durations and pairs as people type them on the command line.

Each parser raises argparse's own error, with the remedy. Called by `cli` and `convert`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from zero_checkpoint.retention import Best
from zero_contract.values import argument_type, parse_seconds, parse_size_bytes

CHECKPOINT = "one checkpoint, or a directory of them, which stands for its newest"
"""The help of what is a checkpoint."""


def _parse_size(text: str) -> int:
    if (size_bytes := parse_size_bytes(text)) < 1:
        raise ValueError("is no size of something; write a size such as 5GB or 200MiB")
    return size_bytes


def _whole_number(at_least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < at_least:
            raise ValueError(f"is no whole number from {at_least}; write one")
        return int(text)

    return argument_type(parse)


positive, not_negative = _whole_number(1), _whole_number(0)


def _parse_pair(text: str) -> tuple[str, str]:
    other, sign, name = text.partition("=")
    if not (other and sign and name):
        raise ValueError("is no pair; write OTHER=NAME, such as lm_head.weight=embed.weight")
    return other, name


def _parse_best(text: str) -> Best:
    """`eval_loss:min` or `accuracy:max:3`."""
    match = re.fullmatch(r"(?P<metric>.+?):(?P<mode>min|max)(:(?P<count>[1-9]\d*))?", text)
    if match is None:
        raise ValueError("is no metric; write METRIC:min or METRIC:max, then :N for more than one")
    return Best(metric=match["metric"], mode=match["mode"], count=int(match["count"] or 1))


def _parse_local(text: str) -> Path:
    """A path of this machine, for what is not kept in a store."""
    if "://" in text:
        raise ValueError("is in a store, where only checkpoints can be; copy it, give a local path")
    return Path(text)


local_path = argument_type(_parse_local)
pair, best = argument_type(_parse_pair), argument_type(_parse_best)
size, duration_s = argument_type(_parse_size), argument_type(parse_seconds)
