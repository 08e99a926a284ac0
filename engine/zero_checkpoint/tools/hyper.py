"""Param groups of other programs, as the engine writes its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from zero_checkpoint.torch_state import plain

_OTHER = frozenset({"params", "step", "foreach", "fused", "capturable", "differentiable"})
"""Keys that are no hyperparameters: contents, a counter, and the choice of kernels."""


def group_record(
    names: Sequence[str], options: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """One param group in the engine's form.

    Args:
        names: Its parameters.
        options: The group as the optimizer had it.
        state: The state of any of its parameters; what holds one value per element is left out.
            Some optimizers count their steps in the group instead.
    """
    counters = {k: v for k, v in state.items() if not (isinstance(v, Tensor) and v.dim() > 0)}
    if "step" in options:
        counters.setdefault("step", options["step"])
    record: dict[str, Any] = {
        "params": list(names),
        "hyperparameters": {k: plain(v, None) for k, v in options.items() if k not in _OTHER},
        "state": {},
    }
    for key, value in counters.items():
        number = plain(value, None)
        if isinstance(number, int | float) and not isinstance(number, bool):
            # torch's optimizers keep a counter as a 0-d fp32 tensor.
            number = {"tensor": float(number), "dtype": "torch.float32", "shape": []}
        record["state"][key] = number
    return record
