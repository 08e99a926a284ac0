"""DeepSpeed's `deepspeed.runtime.base_optimizer`: torch's, as `initialize` returns one."""

from torch.optim import Optimizer as DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer"]
