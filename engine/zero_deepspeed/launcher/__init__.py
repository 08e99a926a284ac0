"""DeepSpeed's `deepspeed.launcher`: what other launchers import of it."""

from zero_deepspeed.launcher import runner

__all__ = ["runner"]
