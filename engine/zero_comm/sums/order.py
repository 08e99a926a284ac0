"""The order in which a run sums its gradients, as its checkpoints record it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_comm.sums.plan import DEFAULT_BLOCK
from zero_contract.errors import ConfigError

ORDERED, NATIVE = "ordered", "native"
"""The values of elastic.reduction."""
CHAIN = 1
"""The block of a sum whose addends are added one after the other."""
_NORM = {"norm": 1}
"""The version of what the sums are clipped by, `zero_step.gradients.norm`."""
_TREE = {"order": "tree", "version": 1, **_NORM}
_ROUNDED = {"order": "tree", "version": 2, "quantized": "blocks", **_NORM}
"""Of a run that rounds the sum of each block to int8; releases that do not know it refuse it."""
_NATIVE = {"order": NATIVE, "version": 1, **_NORM}
NATIVE_RUN = (
    'elastic.reduction is "native": the backend sums the gradients in its own order, so the '
    "result depends on the number of ranks, and a run cannot be repeated to the bit; remove the "
    "key for sums in a fixed order"
)
"""Logged at the begin of such a run."""
_FROM_ORDERED = (
    'elastic.reduction is "native", and was "ordered" when the checkpoint was made: from here on '
    "the result depends on the number of ranks; remove the key if bits count"
)
_TO_ROUNDED = (
    "zero_optimization.zero_quantized_gradients is true, and the run of this checkpoint did not "
    "round the sums of blocks; from here on the results are not those of that run; remove the key "
    "if it was not set there"
)
_FROM_ROUNDED = (
    "zero_optimization.zero_quantized_gradients was true when the checkpoint was made, and sums "
    "are not rounded to int8 any more: from here on the results are not those of that run; set "
    "the key in the engine's config if bits count"
)
_FROM_NATIVE = (
    'elastic.reduction is "ordered", and was "native" when the checkpoint was made: from here on '
    "the number of ranks changes no bit, but what the steps before have come to depends on it"
)


def record_of(block: int, *, rounds: bool = False) -> dict[str, Any]:
    """The record of a run that sums in blocks of B micro-batches, and may round each to int8."""
    return {**(_ROUNDED if rounds else _TREE), "block": block}


def record_of_native(backend: str, dtype: str) -> dict[str, Any]:
    """The record of a run whose sums are made by a backend, in a dtype."""
    return {**_NATIVE, "backend": backend, "dtype": dtype}


def order_of(
    saved: Mapping[str, Any],
    mode: str | None,
    configured: int | None,
    *,
    anew: str,
    rounds: bool = False,
) -> tuple[int, str]:
    """How a resumed run sums gradients: as its checkpoint says, unless the config names a mode.

    `saved` is the checkpoint's record of its run; mode and block are those of the config. `anew`
    says for the error how a user begins a new run with these weights. `rounds`: the run rounds the
    sum of each block to int8.

    Returns:
        The block, and a sentence about what changes; empty if nothing does.

    Raises:
        ConfigError: The order would change though the config does not name the mode, or it asks for
            another block, or the order is not known.
    """
    reduction = saved["reduction"]
    if reduction is None:  # unknown, as after an import
        return CHAIN if mode == NATIVE else configured or DEFAULT_BLOCK, ""
    order = {key: reduction[key] for key in _ROUNDED if key in reduction}
    if order not in (_TREE, _ROUNDED, _NATIVE):
        raise ConfigError(
            f"the run of this checkpoint sums gradients, or their norm, in an order that this "
            f"release does not know: {order}; resume it with the release that it was made with, or "
            f"{anew}"
        )
    if mode == NATIVE:
        return CHAIN, "" if order == _NATIVE else _FROM_ORDERED
    if order != _NATIVE:
        change = ("", _TO_ROUNDED) if order == _TREE else (_FROM_ROUNDED, "")
        if configured not in (None, block := reduction["block"]):
            raise ConfigError(
                f"elastic.reduction_block is {configured}, and the run of this checkpoint sums "
                f"gradients in blocks of {block}: another order gives other bits; remove the key "
                f"or set it to {block}, or {anew}"
            )
        return block, change[rounds]
    if mode is None:
        raise ConfigError(
            "the run of this checkpoint leaves the sums of gradients to the backend; set "
            'elastic.reduction to "native" to continue like that, or to "ordered" to sum them in a '
            "fixed order from here on"
        )
    return configured or DEFAULT_BLOCK, _FROM_NATIVE
