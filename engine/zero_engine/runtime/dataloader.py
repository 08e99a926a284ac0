"""DeepSpeed's `deepspeed.runtime.dataloader`."""

from zero_engine.loaders import RepeatingLoader

__all__ = ["RepeatingLoader"]
