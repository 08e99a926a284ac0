"""The section "activation_checkpointing": what is kept between forward and backward, and where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from zero_contract.errors import ConfigError


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
    policy: str = Policy.RECOMPUTE.value
    """"recompute" keeps the inputs of a module, and runs its forward again in backward. "selective"
    also keeps the results of matrix products, convolutions and attention, and recomputes the rest.
    "offload" keeps everything in host memory, and recomputes nothing."""
    cpu_checkpointing: bool = False
    """Keep in host memory the inputs that "recompute" and "selective" keep."""

    def __post_init__(self) -> None:
        if self.policy not in list(Policy):
            raise ConfigError(
                f'activation_checkpointing.policy: {self.policy!r} is not "recompute", "selective" '
                'or "offload"'
            )
