"""The construction of a model that no rank can hold: its parameters are divided meanwhile.

Registering a parameter with a module opens it. When too many elements are open, the parameter that
has not been used for the longest time is divided. A use of it, such as a write by the constructor
of an outer module, gathers it again. So code in the context sees every parameter as if it were
whole; ranks divide and gather in the same order, that of their constructors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from zero_comm.exchange.collectives import Collectives
from zero_comm.worker.agent_link import agent_link, exit_on_peer_loss
from zero_comm.worker.distributed import init_distributed, local_device
from zero_engine.parameters.early_shards import EarlyGroup, cast, divide, refuse_loads, share_of

OPEN_ELEMENTS = 1 << 24
"""Elements of parameters that are whole at once: 64 MiB in fp32."""
_USED_TOGETHER = 2
"""Parameters that stay whole in any case: `a.weight.data.copy_(b.weight.data)` shows both first."""
_NO_VALUES = {
    *("numel", "nelement", "size", "dim", "ndimension", "stride", "storage_offset", "element_size"),
    *("is_floating_point", "is_complex", "is_contiguous", "requires_grad_", "__len__", "__hash__"),
    *("is_shared", "get_device", "register_hook", "register_post_accumulate_grad_hook"),
}
"""Methods of a tensor that ask for no values: any rank may call them alone."""
_WITH_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes that show values."""
_UNWRITTEN = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)
"""What makes tensors that nobody has written to."""


class DividedConstruction(TorchFunctionMode):
    """A context in which models are made; afterwards each rank has shares of their parameters."""

    def __init__(
        self, params: Iterable[nn.Parameter] = (), dtype: torch.dtype | None = None
    ) -> None:
        """Divide what is made in the context, and these parameters, which exist already.

        At the end they get the dtype; None: they keep theirs.
        """
        super().__init__()
        self._open: dict[Tensor, None] = {}
        """The parameters that are whole; the one that was used last is at the end."""
        self._count = 0
        """Their elements."""
        self._unwritten: dict[int, StorageWeakRef] = {}
        """By its address, memory that nobody has written to; its address stays its own."""
        self._given, self._dtype = tuple(params), dtype
        self._group: EarlyGroup | None = None
        self._leaving = ExitStack()

    def __enter__(self) -> DividedConstruction:
        with exit_on_peer_loss():
            init_distributed()
        link = agent_link(dist.get_rank())
        with exit_on_peer_loss(link):
            collectives = Collectives(interrupt=link.interrupt, name="construction")
            # Constructors make parameters on either.
            for device in dict.fromkeys((torch.device("cpu"), local_device())):
                collectives.meet(device)
            self._group = EarlyGroup(collectives)
        with ExitStack() as stack:
            stack.enter_context(exit_on_peer_loss(link))
            stack.callback(register_module_parameter_registration_hook(self._register).remove)
            stack.callback(register_module_module_registration_hook(self._register_all).remove)
            super().__enter__()
            # Left in reverse: what is open is divided first, with the guard around.
            stack.push(super().__exit__)
            stack.push(self._divide_all)
            self._hold([param for param in self._given if not param.is_meta])
            self._leaving = stack.pop_all()
        return self

    def __exit__(self, *details: Any) -> None:
        self._leaving.__exit__(*details)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make the parameters whole that a function of torch is called with."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            asks_for_values = name == "__get__" and attribute in _WITH_VALUES
        else:
            asks_for_values = name not in _NO_VALUES
        if asks_for_values:
            given = [each for each in tree_iter((args, dict(kwargs))) if isinstance(each, Tensor)]
            for each in given:
                self._unwritten.pop(_address(each), None)  # perhaps it is written to now
            self._hold([each for each in given if each in self._open or share_of(each)])
        made = func(*args, **kwargs)
        if func in _UNWRITTEN and (address := _address(made)):
            self._unwritten[address] = StorageWeakRef(made.untyped_storage())
        return made

    def _register(self, module: nn.Module, _name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            refuse_loads(module)
            self._hold([param])

    def _register_all(self, _module: nn.Module, _name: str, added: nn.Module | None) -> None:
        # A copied module has parameters that have never been registered.
        for module in added.modules() if added is not None else ():
            for name, param in module.named_parameters(recurse=False):
                if param not in self._open and share_of(param) is None:
                    self._register(module, name, param)

    def _hold(self, params: Sequence[Tensor]) -> None:
        """Make some parameters whole, and divide others if too many are."""
        # What is done to parameters here is no use of them by a constructor.
        with torch._C.DisableTorchFunction():
            for param in params:
                share = share_of(param)
                if share is not None and not share.gathered:
                    share.gather(param)
                self._count += 0 if param in self._open else param.numel()
                self._open.pop(param, None)
                self._open[param] = None
            if params:
                self._shrink(OPEN_ELEMENTS, keep=max(len(params), _USED_TOGETHER))

    def _divide_all(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            with torch._C.DisableTorchFunction():
                self._shrink(0)
                if self._dtype is not None:
                    assert self._group is not None
                    cast(self._group, self._dtype)
        self._unwritten.clear()

    def _shrink(self, elements: int, keep: int = 0) -> None:
        """Divide the oldest open parameters, but the last `keep`, until `elements` are open."""
        assert self._group is not None
        while len(self._open) > keep and (self._count > elements or not elements):
            param = next(iter(self._open))
            self._count -= param.numel()
            del self._open[param]
            share = share_of(param)
            if share is None or (share.gathered and not share.holders):
                known = self._unwritten.pop(_address(param), None)
                written = known is None or param._version > 0  # extensions write unseen
                divide(param, self._group, written=written)


def _address(tensor: Tensor) -> int:
    """A number of the memory of a tensor, different from others'; 0 if it has no memory."""
    try:
        return tensor.untyped_storage()._cdata
    except RuntimeError:  # a sparse one, for example
        return 0
