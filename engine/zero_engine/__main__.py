"""Explain a configuration: resolved values, keys without effect, warnings, memory per rank.

python -m zero_engine ds_config.json --parameters 7e9

It exits with 0 only if `initialize` accepts the config, apart from what depends on the model.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from zero_contract.errors import ConfigError
from zero_contract.sections import AUTO
from zero_engine.config import reading
from zero_engine.config.parse import load_config
from zero_engine.observe.explain import check_batch, check_sections, explain

_BROKEN_PIPE = 141


def main(arguments: list[str] | None = None) -> int:
    """Print the explanation of the config on the command line; returns 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m zero_engine", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("file", help="a DeepSpeed-style JSON file, or the JSON itself")
    parser.add_argument(
        "--parameters",
        type=_count,
        default=10**9,
        metavar="N",
        help="trained parameters of the model, such as 7e9 (default: %(default)s)",
    )
    parser.add_argument(
        "--largest",
        type=_count,
        metavar="N",
        help="trained parameters of the model's largest module (default: a 32nd of all)",
    )
    parser.add_argument(
        "--node-ranks",
        type=_ranks,
        default=8,
        metavar="G",
        help="ranks of each node; what elastic.accumulate keeps depends on it (default: 8)",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(format=f"{parser.prog}: %(message)s", level=logging.WARNING)
    logging.getLogger(reading.__name__).setLevel(logging.INFO)
    try:
        written = reading.read_json(options.file)
        config = load_config(written)
        # Raises ConfigError where `initialize` would, though each key alone is valid.
        check_sections(config)
        # Libraries such as the Trainer fill these in.
        if AUTO not in (written.get(key) for key in _BATCH):
            check_batch(config)
        sizes = options.parameters, options.largest, options.node_ranks
        lines = list(explain(config, written, *sizes))
    except ConfigError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # `python -m zero_engine ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    return 0


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu")


def _count(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 1 <= number < 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters, such as 7e9")
    return int(number)


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, such as 8")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
