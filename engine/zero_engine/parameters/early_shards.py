"""Parameters that are divided before there is an engine: those of a model that no rank can hold.

Owns this rank's shares of them, until an engine takes them. A parameter is whole, or shows NaN in
its own shape. Everything here is collective unless its docstring says otherwise.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zero_comm.exchange.collectives import Collectives, wait
from zero_comm.worker.agent_link import agent_link, exit_on_peer_loss
from zero_comm.worker.distributed import group_store
from zero_contract.errors import ZeroError
from zero_engine.parameters.places import ZeroParamStatus, show_as_divided
from zero_engine.sharding.flat_unit import round_up

_SHARES = WeakTensorKeyDictionary()
"""Parameter -> its `EarlyShare`, from its first division until an engine takes it."""
_REFUSING = weakref.WeakSet[nn.Module]()
"""The modules that `refuse_loads` has been called for."""
_COPY = "__deepcopy__"
"""The attribute of a divided parameter by which `copy.deepcopy` copies its share."""


class EarlyGroup:
    """The ranks that parameters are divided among, and the numbers of these parameters."""

    def __init__(self, collectives: Collectives) -> None:
        """All ranks make their groups in the same order."""
        self.collectives = collectives
        self.numbers = itertools.count()
        self.name = group_store("divided parameters").path

    def agree(self, answer: bool, what: str) -> bool:
        """The answer of rank 0. Collective."""
        told = torch.tensor([float(answer)], device="cpu")
        with exit_on_peer_loss(agent_link(self.collectives.rank)):
            self.collectives.broadcast(told, what)
        return bool(told.item())


class EarlyShare:
    """This rank's share of one parameter that belongs to no engine yet.

    Attributes:
        gathered: Whether the parameter is whole.
        holders: The number of open contexts of a script that keep it whole.
    """

    def __init__(self, param: Tensor, group: EarlyGroup) -> None:
        """Take a parameter that is whole; `divide` is to follow. Not collective."""
        self.number = group.name, next(group.numbers)
        """The same on all ranks."""
        self.group = group
        self._collectives = group.collectives
        self._shape = param.shape
        self._own: Tensor | None = None
        """Its values; None: nobody has written any yet."""
        self._guard = partial(exit_on_peer_loss, agent_link(group.collectives.rank))
        shape = tuple(param.shape)
        self._what = f"parameter {self.number[1]}, of shape {shape}, before initialize()"
        self.gathered = True
        self.holders = 0

    def divide(self, param: Tensor, source: int | None = 0) -> None:
        """Keep the share alone, of the values of a rank; None: those before it was gathered."""
        # Memory that nobody has written to does not travel, and becomes zeros.
        if source is not None:
            whole = self._padded(param)
            with self._guard():
                self._collectives.broadcast(whole, self._what, source)
            self._own = self._collectives.own(whole).clone()
        self._hide(param)

    def keep(self, param: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        """Keep the share of values that all ranks have, in their dtype. Not collective."""
        self._own = self._collectives.own(self._padded(values)).clone()
        self._show(param, dtype)

    def cast(self, param: Tensor, dtype: torch.dtype) -> None:
        """Keep the share in another dtype. Not collective."""
        self._own = None if self._own is None else self._own.to(dtype)
        self._show(param, dtype)

    def _show(self, param: Tensor, dtype: torch.dtype) -> None:
        param.data = param.new_empty((), dtype=dtype, requires_grad=False).expand(self._shape)
        self._hide(param)

    def _padded(self, values: Tensor) -> Tensor:
        numel = self._shape.numel()
        whole = values.new_zeros(round_up(numel, self._collectives.world), requires_grad=False)
        whole[:numel].copy_(values.detach().flatten())
        return whole

    def _hide(self, param: Tensor) -> None:
        hide(param)
        self.gathered = False
        show_as_divided(param, self._shape, self._collectives.world)
        vars(param)[_COPY] = partial(_divided_copy, weakref.ref(param))

    def copy(self, param: Tensor) -> nn.Parameter:
        """Another parameter with the same values, divided too. Not collective."""
        other = nn.Parameter(param.detach(), param.requires_grad)
        share = _SHARES[other] = EarlyShare(other, self.group)
        share._own = None if self._own is None else self._own.clone()
        share._hide(other)
        return other

    def gather(self, param: Tensor) -> None:
        """Make the parameter whole."""
        param.data = self.whole(param)
        self.gathered = True
        # A whole one is copied as any other tensor.
        vars(param).pop(_COPY, None)
        vars(param)["ds_status"] = ZeroParamStatus.AVAILABLE

    def spread(self, param: Tensor, source: int) -> None:
        """Give all ranks the values that rank `source` has written; the parameter stays whole."""
        values = param.detach().contiguous()
        with self._guard():
            self._collectives.broadcast(values, self._what, source)
        param.data = values

    def whole(self, param: Tensor) -> Tensor:
        """The values of all shares, in the dtype and on the device that the parameter has now."""
        if self.gathered:
            return param.detach()
        # A hidden parameter has memory for one element. With more, a script has given it values
        # since; or has converted it, and the values are NaN still.
        has_more = param.untyped_storage().nbytes() > param.element_size()
        if has_more and not bool(param.detach().isnan().all()):
            return param.detach()
        if self._own is None:
            return torch.zeros(self._shape, dtype=param.dtype, device=param.device)
        flat = self._own.new_empty(self._own.numel() * self._collectives.world)
        self._collectives.own(flat).copy_(self._own)
        with self._guard():
            wait(self._collectives.all_gather(flat, self._what))
        return flat[: self._shape.numel()].view(self._shape).to(param.device, param.dtype)


def _divided_copy(source: weakref.ref[Tensor], memo: dict[int, object]) -> nn.Parameter:
    param = source()
    assert param is not None, "its attribute is called"
    share = share_of(param)
    assert share is not None, "the attribute goes with the share"
    memo[id(param)] = copied = share.copy(param)
    return copied


def hide(param: Tensor) -> None:
    """Free a parameter's memory: it shows NaN in its shape. Not collective."""
    blank = param.new_empty((), requires_grad=False)
    blank.fill_(float("nan") if param.is_floating_point() or param.is_complex() else 0)
    # Expanded: torch refuses to write to it.
    param.data = blank.expand(param.shape)


def share_of(param: Tensor) -> EarlyShare | None:
    """The share of a parameter that is divided and belongs to no engine. Not collective."""
    found: EarlyShare | None = _SHARES.get(param)
    return found


def divide(param: Tensor, group: EarlyGroup, *, written: bool = True) -> None:
    """Divide a parameter: the values of rank 0; `written`: anything has been written to it here."""
    share = share_of(param)
    if share is None:
        share = _SHARES[param] = EarlyShare(param, group)
    written = group.agree(written, f"whether parameter {share.number[1]} has been written to")
    share.divide(param, 0 if written else None)


def cast(group: EarlyGroup, dtype: torch.dtype) -> None:
    """Give another dtype to what a group has divided and is not whole now. Not collective."""
    for param, share in list(_SHARES.items()):
        if share.group is group and not share.gathered and param.is_floating_point():
            share.cast(param, dtype)


def keep_share(param: Tensor, values: Tensor, dtype: torch.dtype, group: EarlyGroup) -> None:
    """Divide a parameter whose values all ranks have; see `EarlyShare.keep`. Not collective."""
    share = _SHARES[param] = EarlyShare(param, group)
    share.keep(param, values, dtype)


def refuse_loads(module: nn.Module) -> None:
    """Let `load_state_dict` say what to do about parameters that are divided. Not collective."""
    if module not in _REFUSING:
        _REFUSING.add(module)
        module.register_load_state_dict_pre_hook(_refuse_to_load)


def _refuse_to_load(
    module: nn.Module, state: Mapping[str, Any], prefix: str, details: Mapping[str, Any], *_: object
) -> None:
    """Refuse to copy to a parameter that is divided; one that is replaced is none any more."""
    if details.get("assign_to_params_buffers"):
        return
    for name, param in module._parameters.items():
        share = share_of(param) if param is not None else None
        if prefix + name in state and share is not None and not share.gathered:
            raise ZeroError(
                f"load_state_dict(): {prefix}{name} is divided among the ranks since zero.Init; "
                "load inside zero.GatheredParameters(model, modifier_rank=0), where the weights of "
                "rank 0 count, or make the model on the meta device and let "
                "elastic.initial_weights name safetensors files"
            )


def early_shares(params: Iterable[nn.Parameter]) -> dict[nn.Parameter, EarlyShare]:
    """The parameters among these that are divided and belong to no engine. Not collective.

    Their order is the same on all ranks, whatever that of the parameters is.
    """
    found = [(param, share) for param in params if (share := share_of(param)) is not None]
    return dict(sorted(found, key=lambda each: each[1].number))


def take(param: Tensor) -> Tensor | None:
    """The values of a parameter, whose share is given up; None if it has none."""
    share = share_of(param)
    if share is None:
        return None
    whole = share.whole(param)
    del _SHARES[param]
    vars(param).pop(_COPY, None)
    return whole
