"""Whether a script has changed what `protect` was given: the module's parameters, param groups.

Must always hold: a parameter that forward computes with, and whose gradient is in no sum, is an
error at the next step. Otherwise each rank would train it on its own micro-batches alone, and
nothing would fail.
"""

from __future__ import annotations

import logging
from operator import is_

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from zero_comm.sums.reduction import Turn
from zero_contract.errors import ConfigError, ZeroError
from zero_step.checks.parts import Parts
from zero_torch.optimizers.supported import check_members
from zero_torch.wrapped import Wrapped, own_name

_log = logging.getLogger(__name__)

_ADDED = (
    "the optimizer has got a param group that it did not have at protect(): a start that resumes "
    "must give it this group before it loads, or its load is refused, and the job does not go on; "
    "give it all groups before protect(), those of frozen layers too"
)
_EXCHANGED = (
    "{} is another parameter than at protect(), a further one, or none any more: its gradient is "
    "in no sum, so each rank would train it by itself; copy values into the parameter that was "
    "there (under torch.no_grad() with copy_, or by load_state_dict() without assign=True), tie it "
    "before, or wrap the changed module anew, and give it to protect() with a new optimizer"
)
_NOT_REDUCED = (
    "DistributedDataParallel does not see the gradient of {} any more: it waits for that of the "
    "parameter as it was when the module was wrapped. Parametrize, tie, convert and move modules "
    "before they are wrapped"
)
_NOT_GATHERED = (
    "fully_shard does not know the parameter at {}: it puts the one that it has sharded in its "
    "place in every forward; tie and exchange parameters before fully_shard"
)


class AsGiven:
    """The model and the optimizer as `protect` was given them."""

    def __init__(self, wrapped: Wrapped, optimizer: torch.optim.Optimizer) -> None:
        """Note both.

        Raises:
            ConfigError: The wrapper knows other parameters than the module has.
        """
        self._wrapped, self._optimizer = wrapped, optimizer
        self._parameters = wrapped.parameters()
        self._parts, self._members = Parts(wrapped.module), list[Tensor]()
        self._groups = len(optimizer.param_groups)
        # Of parameters of DDP what makes their gradients: as long as it is held it is the same.
        self._nodes: dict[str, object] = {}
        if isinstance(wrapped.model, DistributedDataParallel):
            names = {parameter: name for name, parameter in self._parameters.items()}
            for parameter in wrapped.model._module_parameters:
                if parameter.requires_grad and parameter not in names:
                    raise ConfigError(_NOT_REDUCED.format("a parameter that the module has lost"))
        self._check_nodes()
        self._check_shards()

    def begin(self, now: Turn) -> None:
        """Begin a micro-step.

        Raises:
            ZeroError: It is the first of a step, and something has changed.
        """
        if not now.first:
            return
        if self._parts.changed():
            self._wrapped.parameters()  # what is gathered is in its place
            if (name := self._parts.exchanged()) is not None:
                raise ZeroError(_EXCHANGED.format(own_name(name)))
            self._check_nodes()
            self._check_shards()
            self._parts.accept()
        members = [each for group in self._optimizer.param_groups for each in group["params"]]
        if len(members) != len(self._members) or not all(map(is_, members, self._members)):
            check_members(self._optimizer, self._wrapped.trained())
            self._members = members
        if len(self._optimizer.param_groups) > self._groups and dist.get_rank() == 0:
            _log.warning(_ADDED)
        self._groups = len(self._optimizer.param_groups)

    def _check_nodes(self) -> None:
        if isinstance(self._wrapped.model, DistributedDataParallel):
            for name, parameter in self._parameters.items():
                if parameter.requires_grad:
                    node = get_gradient_edge(parameter).node
                    if self._nodes.setdefault(name, node) is not node:
                        raise ZeroError(_NOT_REDUCED.format(name))

    def _check_shards(self) -> None:
        paths = {module: f"{path}." for path, module in self._wrapped.module.named_modules()}
        for module in paths:
            if not isinstance(module, FSDPModule):
                continue
            # FSDP2's own record of where it puts what it gathers.
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for each in group.fsdp_params:
                    info = each._module_info
                    known = each.sharded_param, getattr(each, "_unsharded_param", None)
                    places = [(info.module, info.param_name)]
                    places += zip(info.shared_modules, info.shared_param_names, strict=True)
                    for owner, key in places:
                        if not any(owner._parameters.get(key) is one for one in known):
                            where = own_name(f"{paths.get(owner, '')}{key}").lstrip(".")
                            raise ZeroError(_NOT_GATHERED.format(where))
