"""DeepSpeed's `deepspeed.checkpointing`: activation checkpointing.

Owns nothing: torch recomputes the activations, with the same random numbers. The settings of
`configure` about the place of activations have no effect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]

_log = logging.getLogger(__name__)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, with its activations recomputed in backward from the inputs."""
    return torch_checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Accept DeepSpeed's settings, and log that they have no effect."""
    del mpu_, deepspeed_config
    if asked := sorted(name for name, value in options.items() if value):
        _log.info("checkpointing.configure: without effect here: %s", ", ".join(asked))


def is_configured() -> bool:
    """True: there is nothing to configure."""
    return True


def reset() -> None:
    """Do nothing: no buffer is kept between two steps."""
