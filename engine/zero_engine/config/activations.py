"""The section "activation_checkpointing": what is kept between forward and backward, and where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Policy(StrEnum):
    """What is kept of a module's forward for its backward."""

    RECOMPUTE = "recompute"
    SELECTIVE = "selective"
    OFFLOAD = "offload"


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """What is kept between the forward and the backward of modules, and where. No bit changes.

    DeepSpeed's keys apply to its `checkpointing.checkpoint`; `modules` and `policy` are ours.
    """

    modules: tuple[str, ...] = ()
    """Classes of modules, such as "LlamaDecoderLayer", or patterns of their names, such as
    "layers.*.mlp": their activations are treated as `policy` says. Modules inside them are not
    treated once more."""
    policy: Policy = Policy.RECOMPUTE
    """"recompute" keeps the inputs of a module, and runs its forward again in backward. "selective"
    also keeps the results of matrix products, convolutions and attention, and recomputes the rest.
    "offload" keeps everything in host memory, and recomputes nothing."""
    cpu_checkpointing: bool = False
    """Keep in host memory the inputs that "recompute" and "selective" keep."""
