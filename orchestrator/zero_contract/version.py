"""`--version`, which every program has."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add the flag: it prints the installed version, and ends the program."""
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        default=argparse.SUPPRESS,
        help="show the version of zero-elastic and exit",
    )


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib import metadata  # a tenth of all that an agent imports

        try:
            version = metadata.version("zero-elastic")
        except metadata.PackageNotFoundError:
            version = "that is not installed"
        print(f"zero-elastic {version}")
        parser.exit()
