"""DeepSpeed's `deepspeed.runtime.dataloader`."""

from zero_deepspeed.loaders import RepeatingLoader

__all__ = ["RepeatingLoader"]
