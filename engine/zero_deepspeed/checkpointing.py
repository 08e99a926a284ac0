"""DeepSpeed's `deepspeed.checkpointing`: activations that are computed again in backward.

Owns nothing: torch does it, and random numbers come out again as they were. What `configure`
says about where activations are kept has no effect. Scripts call it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]

_log = logging.getLogger(__name__)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, of which only the inputs are kept until backward."""
    return torch_checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Accept DeepSpeed's settings, and say once that none of them is needed."""
    del mpu_, deepspeed_config
    if asked := sorted(name for name, value in options.items() if value):
        _log.info("checkpointing.configure: without effect here: %s", ", ".join(asked))


def is_configured() -> bool:
    """True: there is nothing to configure."""
    return True


def reset() -> None:
    """Nothing to do: nothing is kept between two steps. For scripts that call it."""
