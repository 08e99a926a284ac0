"""DeepSpeed's `deepspeed.runtime.dataloader`."""

from zero_engine.core.loaders import RepeatingLoader

__all__ = ["RepeatingLoader"]
