"""What a flag's text may be: the kinds of values that the commands have in common.

Each is an argparse `type`: it returns the value, or raises an ArgumentTypeError that names the
text and the right form. Who calls it: `cli.py` here, `zero_agent.flags`.
"""

from __future__ import annotations

import argparse
import re

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_LENGTH = re.compile(r"(\d+\.?\d*|\.\d+)([smh]?)")


def seconds(text: str) -> float:
    """`30`, `30s`, `10m` or `2h` as seconds."""
    match = _LENGTH.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text} is no length of time; write seconds, such as 30, or 10m, or 2h"
        )
    return float(match[1]) * _UNITS_S[match[2]]


def with_dashes(argument: str) -> str:
    """`--rdzv_endpoint` as `--rdzv-endpoint`, as torchrun reads its flags; else unchanged."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument
