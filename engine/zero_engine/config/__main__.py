"""Explain a configuration: resolved values, keys without effect, warnings, memory per rank.

python -m zero_engine.config ds_config.json --parameters 7e9
"""

from __future__ import annotations

import argparse
import sys

from zero_engine.config.explain import explain
from zero_engine.config.parse import load_config, read_json
from zero_engine.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Print the explanation of the config named on the command line; 2 if it is no good."""
    parser = argparse.ArgumentParser(
        prog="python -m zero_engine.config", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("file", help="a DeepSpeed-style JSON file, or the JSON itself")
    parser.add_argument(
        "--parameters",
        type=_count,
        default=10**9,
        metavar="N",
        help="trained parameters of the model, 7e9 for example (default: %(default)s)",
    )
    parser.add_argument(
        "--largest",
        type=_count,
        metavar="N",
        help="trained parameters of its largest module (default: a 32nd of all)",
    )
    options = parser.parse_args(arguments)
    try:
        written = read_json(options.file)
        config = load_config(written)
        lines = list(explain(config, written, options.parameters, options.largest))
    except ConfigError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _count(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 1 <= number < 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters, such as 7e9")
    return int(number)


if __name__ == "__main__":
    sys.exit(main())
