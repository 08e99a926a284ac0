"""DeepSpeed's `deepspeed.runtime.dataloader`."""

from zero_engine.samples.loaders import RepeatingLoader

__all__ = ["RepeatingLoader"]
