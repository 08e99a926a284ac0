"""`torch.optim.Muon` of a script, on shards: its groups and its state, stepped in three passes.

torch's own step wants whole matrices. Must always hold: the momentum is under the key that torch
has it under, a matrix is orthogonalized by torch's own step, and the script's object is stepped
after all, with no parameters, so that its hooks and its schedulers see every step.

Called by `zero_optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_engine.optim.muon import decay_and_move, direct_momentum
from zero_engine.optim.steps import only
from zero_engine.optim.whole import Directed, LooksAtWhole

TORCH_MUON: type[torch.optim.Optimizer] | None = getattr(torch.optim, "Muon", None)
"""None before torch 2.9."""
_OF_A_MATRIX = ("ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")
"""The options of what is done with a whole matrix."""


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What steps an optimizer's groups on shards: itself, but for torch's Muon."""
    is_torchs = TORCH_MUON is not None and isinstance(optimizer, TORCH_MUON)
    return MuonOfTorch(optimizer) if is_torchs else optimizer


class MuonOfTorch(LooksAtWhole):
    """Momentum, orthogonalized by torch."""

    def __init__(self, given: torch.optim.Optimizer) -> None:
        """Take over the groups of an optimizer, which keeps them."""
        super().__init__(given.param_groups, {})
        self.state = given.state
        self._given = given

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step, and one of the given optimizer, on nothing."""
        loss = super().step(closure)
        with only(self, ()):
            self._given.step()
        return loss

    def direct(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """The momentum."""
        direct_momentum(param, gradient, self.state[param], group)

    def look(self, directions: Sequence[Directed]) -> None:
        """Let torch orthogonalize the directions."""
        changes = [
            partial(_orthogonal, **{name: group[name] for name in _OF_A_MATRIX})
            for _, _, group in directions
        ]
        self.whole.change([direction for _, direction, _ in directions], changes)

    def apply(self, param: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        """Decay, then move."""
        decay_and_move(param, direction, group)


def _orthogonal(direction: Tensor, **options: Any) -> Tensor:
    """How a matrix of zeros moves, at a rate of 1, with nothing to remember."""
    assert TORCH_MUON is not None
    matrix = nn.Parameter(torch.zeros_like(direction))
    matrix.grad = direction
    plain: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    TORCH_MUON([matrix], **plain, **options).step()
    return matrix.detach().neg_()
