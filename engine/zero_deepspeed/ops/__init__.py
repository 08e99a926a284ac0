"""DeepSpeed's `deepspeed.ops`: optimizers with torch's kernels, under DeepSpeed's names."""

from zero_deepspeed.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
