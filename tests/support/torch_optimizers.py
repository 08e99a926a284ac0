"""The classes of torch.optim, and options of each that change what it keeps or how it steps."""

from __future__ import annotations

from typing import Any

import torch

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{}, {"foreach": True, "t0": 2, "lambd": 0.01}],
    "Adadelta": [{}, {"foreach": True, "maximize": True, "weight_decay": 0.1}],
    "Adafactor": [{}, {"foreach": True, "d": 2.0}, {"maximize": True, "weight_decay": 0.1}],
    "Adagrad": [{"lr_decay": 0.1}, {"foreach": True, "initial_accumulator_value": 0.1}],
    # Without "fused": its kernel rounds the elements that do not fill a vector register in another
    # way, and those are others in flat shards than in tensors of odd sizes.
    "Adam": [
        {"amsgrad": True, "foreach": False},
        {"foreach": True, "maximize": True, "weight_decay": 0.1},
    ],
    "AdamW": [{"amsgrad": True, "foreach": False}, {"foreach": True, "maximize": True}],
    "Adamax": [{}, {"foreach": True, "weight_decay": 0.1}],
    "NAdam": [{}, {"foreach": True, "decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}, {"foreach": True, "decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [{}, {"foreach": True, "centered": True, "momentum": 0.9}],
    "Rprop": [{}, {"foreach": True, "maximize": True}],
    "SGD": [
        {"momentum": 0.9, "nesterov": True, "foreach": False},
        {"momentum": 0.5, "dampening": 0.1, "maximize": True, "foreach": True},
    ],
}


def classes() -> set[str]:
    """The names of all classes of torch.optim, but for the base class."""
    every = {name for name, cls in vars(torch.optim).items() if isinstance(cls, type)}
    return every - {"Optimizer"}
