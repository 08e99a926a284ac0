"""What the commands have in common about flags: kinds of values, and what a flag is called.

A kind is an argparse `type`: it returns the value, or raises an ArgumentTypeError that names the
text and the right form. Who calls it: `cli.py` here, `zero_agent.command.flags` and `command_line`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator, Mapping

from zero_orchestrator.errors import SpecError

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_FLAG = re.compile(r"--([a-z][a-z-]*)")
_LENGTH = re.compile(r"(\d+\.?\d*|\.\d+)([smhd]?)")


def seconds(text: str) -> float:
    """`30`, `30s`, `10m`, `2h` or `7d` as seconds."""
    match = _LENGTH.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text} is no length of time; write seconds, such as 30, or 10m, or 2h, or 7d"
        )
    return float(match[1]) * _UNITS_S[match[2]]


def in_words(length_s: float) -> str:
    """A length of time for people: `40 s`, `31 minutes`, `3 days`."""
    for unit, unit_s in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if length_s >= 2 * unit_s:
            return f"{length_s / unit_s:.0f} {unit}"
    return f"{max(length_s, 0):.0f} s"


def with_dashes(argument: str) -> str:
    """`--rdzv_endpoint` as `--rdzv-endpoint`, as torchrun reads its flags; else unchanged."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def variable_of(flag: str) -> str:
    """`rdzv-endpoint` -> `PET_RDZV_ENDPOINT`, as torchrun calls the variable that sets a flag."""
    return f"PET_{flag.replace('-', '_').upper()}"


@contextlib.contextmanager
def named_as_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Errors within call a flag that was set in the environment by the name of its variable.

    Args:
        variables: Flag, without its dashes -> the variable that set it.
    """
    try:
        yield
    except SpecError as error:
        text = _FLAG.sub(lambda flag: variables.get(flag[1], flag[0]), str(error))
        raise type(error)(text) from error
