"""The flags of a command line, parsed as an agent parses them, or their errors."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from zero_agent.command import command_line
from zero_orchestrator.arguments import named_as_set
from zero_orchestrator.errors import SpecError


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """The flags of a command line. Raises SpecError: one line for each that is wrong."""
    line = command_line.read(argv, environ)
    with named_as_set(line.args.variables):
        if line.wrong:
            raise SpecError("\n".join(line.wrong))
    return line.args
