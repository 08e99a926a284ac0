"""DeepSpeed's `deepspeed.launcher.runner`: what `accelerate launch` imports."""

from __future__ import annotations

from collections.abc import Sequence

from zero_contract.errors import UsageExit

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "main"]

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""The file in which accelerate leaves variables for DeepSpeed's launcher; nothing reads it here."""


def main(args: Sequence[str] | None = None) -> None:
    """Say what starts scripts here.

    Raises:
        UsageExit: Always.
    """
    del args
    raise UsageExit(
        "deepspeed.launcher: zero-agent starts scripts, and zero-ctl launch starts it on the hosts "
        "of a hostfile"
    )


if __name__ == "__main__":
    main()
