"""Whether a script has changed what `initialize` was given: param groups, what is trained, memory.

An engine lays out what it trains once. What it cannot follow is an error at the next step: the
weights would stay as they are, and the loss would be the only sign of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import is_

import torch
from torch import nn

from zero_contract.errors import ZeroError
from zero_engine.sharding.flat_unit import FlatUnit
from zero_step.checks.parts import Parts

_log = logging.getLogger(__name__)

_ONCE_MORE = "or give the module to initialize() once more, with a new optimizer"


class AsGiven:
    """The module and the optimizer as `initialize` was given them."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, model: nn.Module) -> None:
        """Note both, before the engine puts what it steps into the groups of the optimizer."""
        groups = optimizer.param_groups if optimizer is not None else []
        grouped = {id(param) for group in groups for param in group["params"]}
        self._optimizer = optimizer
        self._groups = len(groups)
        self._frozen = [
            (name, param)
            for name, param in model.named_parameters()
            if id(param) in grouped and not param.requires_grad
        ]
        names = {param: name for name, param in model.named_parameters()}
        self.frozen_by_group = [
            [names[p] for p in group["params"] if p in names and not p.requires_grad]
            for group in groups
        ]
        """Of each param group the names of the parameters that are not trained."""
        self._has_warned = False
        self._members: list[torch.Tensor] = []
        """What the groups have at a step: the engine's own, once it is made."""
        self._parts = Parts(model)

    def check(self, trained: Sequence[FlatUnit]) -> None:
        """Refuse what the engine cannot follow.

        Raises:
            ZeroError: There is a further param group, a parameter of a group is to be trained since
                then, a module has another one, or a trained one has other memory.
        """
        self.check_groups()
        if self._parts.changed():
            if (name := self._parts.exchanged()) is not None:
                raise ZeroError(
                    f"{name} is another parameter than at initialize(), a further one, or none any "
                    "more: the engine trains and saves those that were there; copy values into "
                    "them, in zero.GatheredParameters(parameters, modifier_rank=0), tie them "
                    f"before, {_ONCE_MORE}"
                )
            # Nothing that is trained is new or gone: these need not be looked at again.
            self._parts.accept()
        for name, param in self._frozen:
            if param.requires_grad:
                raise ZeroError(
                    f"{name} requires gradients, and did not at initialize(): it is not trained; "
                    "let it require gradients then, with lr=0 in a param group of its own until it "
                    f"is to be trained, {_ONCE_MORE}"
                )
        for unit in trained:
            if name := unit.replaced():
                raise ZeroError(
                    f"{name} has other memory than at initialize(): half(), to() or an assignment "
                    "to its .data has replaced it, so forward does not see what the engine trains; "
                    "set the dtype in the config, and write values in "
                    "zero.GatheredParameters(parameters, modifier_rank=0): of what is written "
                    "elsewhere to large 16-bit weights the next step keeps nothing"
                )
        frozen = (
            slot.fqn
            for unit in trained
            for slot, param in zip(unit.layout.slots, unit.params, strict=True)
            if not param.requires_grad
        )
        if not self._has_warned and (name := next(frozen, None)) is not None:
            self._has_warned = True
            _log.warning(
                "%s does not require gradients any more: as in DeepSpeed, its gradient is zero "
                "from now on, and momentum and weight decay still change it; to leave it as it "
                "is, set lr=0 in its param group, %s",
                name,
                _ONCE_MORE,
            )

    def check_groups(self) -> None:
        """Refuse other param groups, or other members of one; a checkpoint has them by place too.

        Raises:
            ZeroError: The optimizer has other ones than at `initialize`.
        """
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        if len(groups) != self._groups:
            raise ZeroError(
                f"the optimizer has {len(groups)} param groups, and had {self._groups} at "
                "initialize(): what is added later is not trained; let all groups be there at "
                f"initialize(), with lr=0 until they are to be trained, {_ONCE_MORE}"
            )
        members = [each for group in groups for each in group["params"]]
        self._members = self._members or members
        # By identity: tensors are compared element by element.
        if len(members) != len(self._members) or not all(map(is_, members, self._members)):
            raise ZeroError(
                "the param groups of the optimizer have other parameters than at the step before: "
                "the engine steps those of initialize(), each in its group; change lr and other "
                f"options of the groups instead, {_ONCE_MORE}"
            )
