"""`accelerate launch --use_deepspeed`: the workers that it starts find this engine, too.

accelerate starts them by torch's launcher, as `python SCRIPT`. Here they are started as
`python -m zero_deepspeed.as_deepspeed SCRIPT`.
"""

from __future__ import annotations

import argparse

from accelerate.utils import launch

from zero_contract.errors import UsageExit

_prepare = launch.prepare_deepspeed_cmd_env
_BY_TORCH = "standard"
"""accelerate's name of torch's launcher, for several machines."""


def install() -> None:
    """Amend the command."""
    launch.prepare_deepspeed_cmd_env = prepare


def prepare(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Prepare as accelerate does; then make the script an argument of `as_deepspeed`.

    Raises:
        UsageExit: The workers would be started by DeepSpeed's launcher, or not by Python.
    """
    if args.num_machines > 1 and args.deepspeed_multinode_launcher != _BY_TORCH:
        raise UsageExit(
            "accelerate launch: on several machines DeepSpeed's launcher would start the script; "
            f"give --deepspeed_multinode_launcher={_BY_TORCH}, or start it with zero-agent"
        )
    if args.no_python:
        raise UsageExit(
            "accelerate launch --no_python: the script must be one of Python, to find this engine"
        )
    command, environment = _prepare(args)
    script = ["-m"] if args.module else []
    args.training_script_args = [*script, args.training_script, *args.training_script_args]
    args.training_script, args.module = "zero_deepspeed.as_deepspeed", True
    return command, environment
