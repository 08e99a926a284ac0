"""Flags of the commands: their spellings, and the environment variables that set them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from zero_contract.values import argument_type, parse_seconds, whole
from zero_orchestrator.errors import SpecError


def _host(text: str) -> str:
    try:
        text.encode("idna")  # as `socket` does, which fails with a bare UnicodeError
    except UnicodeError:
        raise ValueError("is no name of a host; write a name, or a numeric address") from None
    return text


host = argument_type(_host)
seconds = argument_type(parse_seconds)
port = whole(": write a port, 1 to 65535, or 0 for a free one", most=65535)
_FLAG = re.compile(r"--([a-z][a-z-]*)")


def with_dashes(argument: str) -> str:
    """`--rdzv_endpoint` as `--rdzv-endpoint`, as torchrun reads its flags; else unchanged."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def variable_of(flag: str) -> str:
    """`rdzv-endpoint` -> `PET_RDZV_ENDPOINT`, as torchrun calls the variable that sets a flag."""
    return f"PET_{flag.replace('-', '_').upper()}"


@contextlib.contextmanager
def named_as_set(variables: Mapping[str, str]) -> Iterator[None]:
    """In a SpecError raised within, replace a flag by the variable that set it.

    `variables`: flag, without its dashes -> variable.
    """
    try:
        yield
    except SpecError as error:
        text = _FLAG.sub(lambda flag: variables.get(flag[1], flag[0]), str(error))
        raise type(error)(text) from error
