"""Numbers, sizes, durations and pairs as people type them on the command line.

Each parser raises argparse's own error, with the remedy.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from zero_contract.values import argument_type, parse_seconds, parse_size_bytes, whole

if TYPE_CHECKING:
    from zero_checkpoint.saving.retention import Best

CHECKPOINT = "one checkpoint, or a directory of checkpoints, which stands for the newest of them"
"""The help of an argument that names a checkpoint."""


@argument_type
def size(text: str) -> int:
    """Bytes, from `5GB` or `200MiB`; at least 1."""
    if (size_bytes := parse_size_bytes(text)) < 1:
        raise ValueError("is not a size above zero; write a size such as 5GB or 200MiB")
    return size_bytes


positive = whole(" is not a whole number of at least 1; write one", 1)
not_negative = whole(" is not a whole number of at least 0; write one")
duration_s = argument_type(parse_seconds)


@argument_type
def pair(text: str) -> tuple[str, str]:
    """(OTHER, NAME), from `OTHER=NAME`."""
    other, sign, name = text.partition("=")
    if not (other and sign and name) or other == name:
        raise ValueError("is not a pair; write OTHER=NAME, such as lm_head.weight=embed.weight")
    return other, name


@argument_type
def best(text: str) -> Best:
    """`eval_loss:min` or `accuracy:max:3`."""
    # Not at the top: `retention` imports torch, for which a TAB in a shell would wait.
    from zero_checkpoint.saving.retention import Best

    match = re.fullmatch(r"(?P<metric>.+?):(?P<mode>min|max)(:(?P<count>[1-9]\d*))?", text)
    if match is None:
        raise ValueError(
            "is not a metric; write METRIC:min or METRIC:max, then :N for more than one"
        )
    return Best(metric=match["metric"], mode=match["mode"], count=int(match["count"] or 1))


@argument_type
def local_path(text: str) -> Path:
    """A path of this machine: an object store can hold nothing but checkpoints."""
    if "://" in text:
        raise ValueError("is in a store, where only checkpoints can be; copy it, give a local path")
    return Path(text)
