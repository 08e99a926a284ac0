"""How a model is wrapped, and whether its gradients can be summed in order.

Owns the names of parameters: they are those of the user's module, without what wrappers put before
them, so that DDP, FSDP2 and one process name them alike.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from zero_checkpoint.format.dtypes import DTYPES
from zero_checkpoint.state.torch_state import persistent_buffers
from zero_comm.exchange.collectives import Collectives
from zero_comm.sums.additions import SUMS
from zero_comm.sums.plan import DEFAULT_BLOCK, Where
from zero_comm.topology import alone
from zero_comm.waiting import Interrupt
from zero_contract.errors import ConfigError
from zero_step.gradients.accumulation import BY_BACKEND, SHARDED, Accumulation, why_owners
from zero_step.gradients.pipeline import Reduction, reduction_over
from zero_step.options import Elastic

_log = logging.getLogger(__name__)
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Parts of a name that torch.compile and activation checkpointing put there."""


_SUMMED = (*SUMS, torch.complex64)
"""The dtypes that gradients and checkpoints may have."""


class Wrapper(StrEnum):
    """How a model is wrapped."""

    PLAIN = "plain"
    """In nothing: the model of one process."""
    DDP = "ddp"
    FSDP2 = "fsdp2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapped:
    """A model, and what wraps it."""

    called: nn.Module
    """The module that the script calls."""
    model: nn.Module
    """This module without torch.compile around it."""
    wrapper: Wrapper
    module: nn.Module
    """The user's module: without DDP and torch.compile around it."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by their names in the user's module; a tied one once.

        Between forward and backward not to be called.
        """
        # A forward without a backward leaves gathered tensors in the places of FSDP2's parameters,
        # which the optimizer does not know.
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return {own_name(name): each for name, each in self.module.named_parameters()}

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained."""
        return {name: p for name, p in self.parameters().items() if p.requires_grad}

    @property
    def is_whole(self) -> bool:
        """Whether each rank holds all elements of all parameters."""
        return self.wrapper is not Wrapper.FSDP2

    @property
    def device(self) -> torch.device:
        """The device of what is trained."""
        return next(iter(self.trained().values())).device


def own_name(name: str) -> str:
    """A parameter's name without what wrappers have put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that torch.compile was applied to, or this one."""
    return cast(nn.Module, getattr(module, "_orig_mod", module))


def local(tensor: Tensor) -> Tensor:
    """The elements of a tensor that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def elements_of(tensor: Tensor) -> Tensor:
    """A view of these elements without gradients, made without the dispatch of DTensor."""
    with torch.no_grad():
        return local(tensor).detach()


def like(parameter: Tensor, elements: Tensor) -> Tensor:
    """A tensor that lies as a parameter does, from the elements of it that this rank has."""
    if not isinstance(parameter, DTensor):
        return elements
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    made: Tensor = DTensor.from_local(
        elements, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return made


def offsets_of(tensor: DTensor) -> Sequence[int]:
    """Where this rank's box of a tensor begins in each dimension."""
    mesh, placements = tensor.device_mesh, tensor.placements
    offsets: Sequence[int]
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return offsets


def replicas_of(tensor: DTensor, rank: int) -> tuple[int, ...]:
    """The ranks that have the same box of a tensor as `rank`, which is this one."""
    # Of several equal meshes, such as those of tensor parallelism beside data parallelism, each has
    # its own: the ranks are those of this one.
    mesh = tensor.device_mesh
    own = mesh.get_coordinate()
    if own is None or not any(each.is_replicate() for each in tensor.placements):
        return (rank,)
    box = [
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(tensor.placements, own, strict=True)
    ]
    return tuple(sorted(mesh.mesh[tuple(box)].flatten().tolist()))


def is_first_replica(tensor: DTensor) -> bool:
    """Whether no rank before this one has the same box of a tensor."""
    mesh = tensor.device_mesh
    # A mesh of some ranks, such as each data parallel group beside tensor parallelism, has an equal
    # beside it for the others. Together they have all ranks, and the one with rank 0 comes first.
    replicated = [dim for dim, each in enumerate(tensor.placements) if each.is_replicate()]
    return bool(mesh.mesh.min() == 0) and not any(map(mesh.get_local_rank, replicated))


class HookOfOriginal:
    """A hook of a module, which copies of the module do not have, and no file has."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        """Call the hook, on the module itself."""
        self._hook(*args)

    def __reduce__(self) -> Any:
        """Of a copy, or in a file: a hook that does nothing."""
        return HookOfOriginal, (_nothing,)


def _nothing(*_: object) -> None:
    pass


def recognize(model: nn.Module) -> Wrapped:
    """Find out how a model is wrapped.

    Raises:
        ConfigError: It is wrapped in a way whose state has no names and shapes of its own.
    """
    inner = uncompiled(model)
    modules = list(model.modules())
    if any(isinstance(each, FullyShardedDataParallel) for each in modules):
        raise ConfigError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which has no hook for the "
            "sum of gradients; use torch.distributed.fsdp.fully_shard"
        )
    if isinstance(inner, DistributedDataParallel):
        module = uncompiled(inner.module)
        return Wrapped(called=model, model=inner, wrapper=Wrapper.DDP, module=module)
    if any(isinstance(each, DistributedDataParallel) for each in modules):
        raise ConfigError(
            "a part of the model is wrapped in DistributedDataParallel; wrap the whole model"
        )
    sharded = any(isinstance(each, FSDPModule) for each in modules)
    wrapper = Wrapper.FSDP2 if sharded else Wrapper.PLAIN
    return Wrapped(called=model, model=inner, wrapper=wrapper, module=inner)


def check_savable(wrapped: Wrapped) -> None:
    """Check that a checkpoint can hold a model: now, and not only at the first save.

    Raises:
        ConfigError: It cannot; names the parameter or buffer.
    """
    buffers = ((own_name(name), each) for name, each in persistent_buffers(wrapped.module))
    for name, tensor in (*wrapped.parameters().items(), *buffers):
        if not elements_of(tensor).is_contiguous():
            raise ConfigError(
                f"{name} is not contiguous in memory, as after to(memory_format="
                "torch.channels_last), and no checkpoint can hold it so: call "
                "model.to(memory_format=torch.contiguous_format), or of a transposed matrix "
                "tensor.data = tensor.data.contiguous(), before zero_torch.protect wraps it, and "
                "before DDP does; the inputs may be in channels_last"
            )
        if tensor.dtype not in DTYPES.values():
            raise ConfigError(
                f"{name} has the dtype {tensor.dtype}, which no checkpoint can hold; convert it, "
                "or register it as a buffer with persistent=False"
            )


def check_no_hook(wrapped: Wrapped) -> None:
    """Check that nobody else reduces the gradients of a model.

    Raises:
        ConfigError: A communication hook of DDP does; names it.
    """
    for hook, _ in getattr(wrapped.model, "_comm_hooks", ()):
        raise ConfigError(
            f"DistributedDataParallel has the communication hook {hook.__qualname__}, and it can "
            "have one alone: protect's own, which sums gradients in order; leave the other out"
        )


def check_gradients(wrapped: Wrapped, world: int) -> None:
    """Check that the gradients of a model can be summed in order.

    Raises:
        ConfigError: They cannot, or they would not be summed at all.
    """
    for name, parameter in wrapped.trained().items():
        if parameter.dtype not in _SUMMED:
            raise ConfigError(
                f"{name} has the dtype {parameter.dtype}, and gradients are summed in order of "
                f"{', '.join(str(each).removeprefix('torch.') for each in _SUMMED)}: convert it, "
                "or set requires_grad=False"
            )
    for name, module in wrapped.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"the gradient of {own_name(name)}.weight is sparse, and dense ones are summed; "
                "make its embedding with sparse=False"
            )
    if wrapped.wrapper is Wrapper.FSDP2:
        for name, parameter in wrapped.trained().items():
            if problem := shard_problem(parameter, world):
                raise ConfigError(f"{name} {problem}")
    elif wrapped.wrapper is Wrapper.PLAIN and world > 1:
        raise ConfigError(
            f"there are {world} ranks and the model is not distributed: its gradients would stay "
            "on each rank; wrap it in DistributedDataParallel, or call fully_shard(model), before "
            "zero_torch.protect"
        )


def shard_problem(parameter: Tensor, world: int) -> str | None:
    """Why the bits of a parameter under FSDP2 would depend on the world size; None: they do not."""
    if not isinstance(parameter, DTensor):
        return (
            "is not sharded: its gradient would stay on each rank; call fully_shard on the root "
            "module, too"
        )
    if parameter.device.type == "cpu" and parameter.dtype in (torch.bfloat16, torch.float16):
        return (
            f"has the dtype {parameter.dtype} on a CPU, whose optimizer kernels round the end of a "
            "shard differently in 16 bits, and the world size decides where shards end: keep fp32 "
            "parameters, and compute in 16 bits by fully_shard(..., mp_policy="
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))"
        )
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.size() != world or mesh.mesh.flatten().tolist() != list(range(world)):
        return (
            f"lies on a mesh of shape {tuple(mesh.shape)}, and there are {world} ranks: gradients "
            "are summed in order over a mesh that has all ranks in their order; make it with "
            "torch.distributed.device_mesh.init_device_mesh. Under tensor parallelism call "
            "protect() without a loader, for checkpoints alone"
        )
    *outer, last = placements
    if not (isinstance(last, Shard) and outer in ([], [Replicate()])):
        placed = ", ".join(map(str, placements))
        return (
            f"is placed as ({placed}); only (Shard) and (Replicate, Shard), those of fully_shard "
            "on one or two mesh dimensions, are supported. Under tensor parallelism call protect() "
            "without a loader, for checkpoints alone"
        )
    if outer and mesh.size(-1) == 1 < world:
        return (
            f"lies on a mesh of shape {tuple(mesh.shape)}, in which nothing is sharded: wrap the "
            "model in DistributedDataParallel, or shard it over more ranks"
        )
    return None


def check_sums(wrapped: Wrapped, options: Elastic) -> None:
    """Check that gradients can be added before they are sent, if the config says so.

    Raises:
        ConfigError: They cannot.
    """
    where, is_native = options.accumulate, options.is_native
    if where is Where.LOCAL and wrapped.wrapper is Wrapper.FSDP2:
        raise ConfigError(SHARDED.format("FSDP2", "DistributedDataParallel"))
    if where is Where.NODE and is_native:
        raise ConfigError(BY_BACKEND)
    double = [name for name, p in wrapped.parameters().items() if p.dtype == torch.float64]
    if double and where is not Where.OWNER and not is_native:
        raise ConfigError(
            f'elastic.accumulate: "{where}" adds gradients in fp32 before they are sent, and '
            f'{double[0]} is float64; use "owner", or convert it'
        )


def choose_sums(options: Elastic, collectives: Collectives) -> Accumulation:
    """Where gradients are added in this round. Collective."""
    where, topology = options.accumulate, collectives.find_nodes(os.environ)
    if options.is_native:  # the backend sums over all ranks at once
        topology = alone(topology.world)
    if (reason := why_owners(where, topology)) and not collectives.rank:
        _log.info('elastic.accumulate: "%s" acts as "owner" in this round: %s', where, reason)
    return Accumulation(
        where=Where.OWNER if reason else where,
        topology=topology,
        block=options.reduction_block or DEFAULT_BLOCK,
        native_bytes=0 if options.is_native else None,
    )


def make_reduction(
    wrapped: Wrapped, collectives: Collectives, interrupt: Interrupt, sums: Accumulation
) -> Reduction:
    """By the backend, or in order, which begins inside of nodes if it can. Collective."""
    parameters = wrapped.parameters().values()
    device = wrapped.device
    is_native, any_order = sums.native_bytes is not None, collectives.any_order(device)
    is_fsdp = wrapped.wrapper is Wrapper.FSDP2
    # Nodes give their partial sums on in fp32.
    is_double = any(each.dtype == torch.float64 for each in parameters)
    need_not = sums.where is Where.OWNER and (is_double or not any_order)
    two = sums.has_two_exchanges and not need_not
    if two:  # FSDP2 says which rank has which shard
        collectives.lay_out(sums.topology, range(collectives.world) if is_fsdp else None)
    # FSDP2's gathers of weights have the default group to themselves.
    apart = is_native or (is_fsdp and not any_order)
    native = (torch.float64 if is_double else torch.float32) if is_native else None
    return reduction_over(collectives, device, interrupt, alone=apart, two=two, native=native)
