"""DeepSpeed's `deepspeed.utils.torch`: comparisons with the version of torch."""

from __future__ import annotations

import torch

__all__ = ["required_torch_version"]


def required_torch_version(
    min_version: str | float | None = None, max_version: str | float | None = None
) -> bool:
    """Whether torch is at least, and at most, of these versions."""
    here = torch.__version__  # compares as a version
    return (min_version is None or here >= str(min_version)) and (
        max_version is None or here <= str(max_version)
    )
