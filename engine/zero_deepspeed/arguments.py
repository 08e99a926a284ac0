"""DeepSpeed's command-line arguments, for scripts that take their config from them."""

from __future__ import annotations

from argparse import ArgumentParser


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add --deepspeed and --deepspeed_config; `initialize(args=...)` reads the second.

    Source: deepspeed.add_config_arguments, with the same names and defaults.
    """
    group = parser.add_argument_group("DeepSpeed", "the engine's configuration")
    group.add_argument(
        "--deepspeed",
        default=False,
        action="store_true",
        help="run with the engine; for scripts that can also run without one",
    )
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="the JSON config")
    return parser
