"""The order in which a run sums its gradients, as its checkpoints record it.

Must always hold: a run that resumes sums in the order of its checkpoint, or does not resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_comm.reduction_plan import DEFAULT_BLOCK
from zero_contract.errors import ConfigError

_TREE = {"order": "tree", "version": 1}
_BEFORE_BLOCKS = {**_TREE, "block": 1}
"""The order of older checkpoints, which have no such record."""


def check_block(block: int | None) -> None:
    """Check elastic.reduction_block of a config.

    Raises:
        ConfigError: It is no power of two.
    """
    if block is None:
        return
    if block < 1:
        raise ConfigError(f"elastic.reduction_block: {block} is less than 1")
    if block & (block - 1):
        below = 1 << block.bit_length() - 1
        raise ConfigError(
            f"elastic.reduction_block is {block}, which is no power of two; "
            f"set it to {below} or {2 * below}"
        )


def record_of(block: int) -> dict[str, Any]:
    """The record of a run that sums in blocks of `block` micro-batches."""
    return {**_TREE, "block": block}


def block_of(saved: Mapping[str, Any], configured: int | None, *, anew: str) -> int:
    """The block in which a resumed run sums gradients: that of its checkpoint.

    Args:
        saved: The checkpoint's record of its run, with this record under "reduction".
        configured: elastic.reduction_block.
        anew: How the user begins a new run with the weights of the checkpoint, for the error.

    Raises:
        ConfigError: The config asks for another block, or the order is not known.
    """
    reduction = saved.get("reduction", _BEFORE_BLOCKS)
    if reduction is None:  # unknown, as after an import
        return configured or DEFAULT_BLOCK
    order = {key: reduction.get(key) for key in _TREE}
    if order != _TREE:
        raise ConfigError(
            f"the run of this checkpoint sums gradients in an order that this release does not "
            f"know: {order}; resume it with the release that it was made with, or {anew}"
        )
    block: int = reduction["block"]
    if configured not in (None, block):
        raise ConfigError(
            f"elastic.reduction_block is {configured}, and the run of this checkpoint sums "
            f"gradients in blocks of {block}: another order gives other bits; remove the key or "
            f"set it to {block}, or {anew}"
        )
    return block
