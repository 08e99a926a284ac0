"""DeepSpeed's `deepspeed.ops`: optimizers under the names of its kernels, with torch's."""

from zero_deepspeed.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
