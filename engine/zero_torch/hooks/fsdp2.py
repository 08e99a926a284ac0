"""FSDP2: the ordered reduction in the place of its reduce-scatter, through its public hooks.

Must always hold: FSDP2 neither divides nor adds. Each group of parameters that FSDP2 reduces
together is one sum, of which a rank owns what FSDP2 gives it. FSDP2 calls no reduce-scatter at
world 1, and the all-reduce hook at every world size.

What is given to FSDP2 as the result becomes `.grad`, and may be filled until the end of the
backward, unless FSDP2 makes a copy of it: in another dtype, or on another device.

FSDP2 reduces after the backward of each call of a module. One that is called several times in a
forward (a shared layer) is reduced at the end of the backward, when all its gradients have come.

FSDP2 keeps what the root has gathered until a backward frees it. After an evaluation a script would
find copies in the place of the parameters, and train weights as they were before it or a step has
changed them: a forward without gradients frees them, and the first one of a step gathers anew.
Gradients belong to the gathered weights; what reaches a sharded parameter by itself,
such as that of a norm of it in the loss, is in no sum, and is refused.

On CPUs its all-gathers go the way of the gradients, too: it is faster than gloo's own, a rank that
is asked to leave need not wait for a lost peer, and the loss is no error of the script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zero_comm.exchange.collectives import Collectives, Pending, wait
from zero_comm.sums.reduction import Turn
from zero_comm.waiting import transport_failures
from zero_contract.errors import ConfigError, ZeroError
from zero_torch.ordered_gradients import NOT_REDUCED, OrderedGradients, as_real


class TwoLevels:
    """HSDP: the reduction of the modules of a mesh [replicas, shards].

    Every rank of a mesh has a gradient of its own, so every one of them counts in the order of the
    sum. A rank owns a part of the shard that it shares with its replicas: it sums that part over
    all ranks of the mesh, and the replicas then give each other their parts, while the backward
    goes on. FSDP2's own all-reduce among replicas must add nothing. There is no hook in its place,
    so it runs in a group of this rank alone.
    """

    def __init__(
        self, gradients: OrderedGradients, collectives: Collectives, mesh: DeviceMesh
    ) -> None:
        """Sum over all ranks of a mesh, which are those of `collectives`."""
        self._gradients = gradients
        self._collectives = collectives
        self._shards = mesh.size(1)
        self._replicas = mesh.mesh[:, mesh.get_local_rank(1)].tolist()
        """The ranks that have this rank's shard."""
        self._alone = dist.new_group([collectives.rank], use_local_synchronization=True)

    def replace_all_reduce(self, module: Any) -> None:
        """Let FSDP2's all-reduce of a module's gradients be one of this rank alone.

        Raises:
            ConfigError: This version of torch keeps its group elsewhere.
        """
        try:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if not isinstance(group.mesh_info.replicate_process_group, dist.ProcessGroup):
                    raise AttributeError("replicate_process_group")
                group.mesh_info.replicate_process_group = self._alone
        except AttributeError as error:
            raise ConfigError(
                f"in torch {torch.__version__} the group of an HSDP model's all-reduce is not "
                f"where it was in 2.13 ({error}); shard over one mesh dimension, or use torch 2.13"
            ) from error

    def reduce(self, name: str, gradient: Tensor, out: Tensor, *, now: bool = False) -> None:
        """See `OrderedGradients.reduce`, for a gradient [shards * n] and this rank's shard [n]."""
        length, replicas = out.numel(), len(self._replicas)
        part = -(-length // replicas)
        # Parts of equal length, as for any sum: at the end of a shard they may be all padding.
        rows = gradient.new_zeros(self._shards, replicas * part)
        rows[:, :length] = gradient.view(self._shards, length)
        # By rank: the replicas of a mesh are its rows.
        by_rank = rows.view(self._shards, replicas, part).transpose(0, 1).reshape(-1)
        own = torch.empty(part, dtype=out.dtype, device=out.device)
        share = partial(self._share, name, own, out)
        self._gradients.reduce(name, by_rank, own, then=share, now=now)

    def _share(self, name: str, own: Tensor, out: Tensor) -> Pending:
        """Begin to give the replicas this rank's part of their shard, and to take theirs."""
        parts: dict[int, Tensor] = dict(zip(self._replicas, out.split(own.numel()), strict=False))
        held: dict[int, Tensor] = {}
        if (rank := self._collectives.rank) in parts:  # parts at the end may be all padding
            parts[rank].copy_(own[: parts[rank].numel()])
            mine = parts[rank]
            held = dict.fromkeys(self._replicas, mine)
        return self._collectives.exchange_pieces(held, parts, f"sums of {name}")


_Reduce = Callable[..., None]
"""As `OrderedGradients.reduce`."""
_Guard = Callable[[], AbstractContextManager[None]]

_HOOKS = (
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
)
_SYNCS = ("set_requires_gradient_sync", "set_requires_all_reduce")
_OWN = (
    "FSDPModule.{}() would take the sum of the gradients out of its order, in which every micro-"
    "batch has its share: leave it out"
)
_BESIDE = (
    "{} got a gradient of its own, not in a forward of its module, as of a penalty such as "
    "{}.square().sum() in the loss: each rank has that of its own micro-batch, and it would be in "
    "no sum; compute the penalty in the forward of the module, or use weight_decay"
)
_TWICE = (
    "a backward with create_graph=True, as of a penalty on gradients: FSDP2 frees the weights of "
    "the first backward, and torch crashes where the second one reads them; wrap the model in "
    "DistributedDataParallel, or train with zero_engine"
)
_HOOKED = (
    "{} has a gradient hook of the script ({}), and FSDP2 computes no gradient of a sharded "
    "parameter: it would not be called, or with a part of a sum; change gradients in a "
    "step hook of the optimizer (optimizer.register_step_pre_hook)"
)


def attach(
    model: nn.Module,
    gradients: OrderedGradients,
    collectives: Collectives,
    guard: _Guard,
) -> None:
    """Let every FSDP2 module of a model reduce its gradients through `gradients`.

    `guard` is a context around each exchange, which may find that a peer is lost.

    Raises:
        ConfigError: This version of torch has no such hooks.
    """
    # Raised at the begin of the first backward: in the second one torch would crash.
    gradients.not_twice = _TWICE
    world = collectives.world
    device = next(model.parameters()).device
    mesh = getattr(next(model.parameters()), "device_mesh", None)
    levels = None
    if mesh is not None and mesh.ndim > 1 < world:
        levels = TwoLevels(gradients, collectives, mesh)
    for path, module in model.named_modules():
        # Some scripts shard every layer, an activation without parameters, too.
        if any(True for _ in module.parameters()) and isinstance(module, FSDPModule):
            name = path or "the root module"
            reduce = gradients.reduce if levels is None else levels.reduce
            unit = _ReduceScatter(name, gradients, reduce, module, guard)
            _attach(module, unit, world)
            gradients.begins.append(unit.begin)
            gradients.ends.append(unit.end_backward)
            if device.type == "cpu":
                gather: Any = _AllGather(name, collectives, guard, gradients.poll)
                module.set_custom_all_gather(gather)
            if levels is not None:
                levels.replace_all_reduce(module)
            for setter in _SYNCS:  # as a script may have left them
                getattr(module, setter)(True, recurse=False)
                setattr(module, setter, _keep_sync)
            for setter in _HOOKS:
                setattr(module, setter, partial(_refuse, setter))
    # The buffers of rank 0, as DDP does: FSDP2 leaves to each rank what it has made.
    for name, buffer in model.named_buffers():
        if not isinstance(buffer, DTensor) and not buffer.is_meta:
            buffer.data = buffer.data.contiguous()
            collectives.broadcast(buffer, f"buffer {name}")
    direct = _Direct(gradients)
    direct.look()
    gradients.begins.append(direct.begin)


def _keep_sync(*required: bool, recurse: bool = True, **named: bool) -> None:
    """In the place of FSDP2's own: what it leaves on a rank would be in no sum."""
    del recurse
    if not all((*required, *named.values())):
        raise ZeroError(NOT_REDUCED)


def _refuse(setter: str, *_: object, **__: object) -> None:
    raise ZeroError(_OWN.format(setter))


class _Direct:
    """Sees gradients that reach sharded parameters by themselves."""

    def __init__(self, gradients: OrderedGradients) -> None:
        self._gradients = gradients
        # Autograd keeps the hook of a node, and nobody else keeps the node.
        self._nodes: dict[str, object] = {}

    def begin(self, now: Turn) -> None:
        """Begin a micro-step."""
        if now.first:
            self.look()

    def look(self) -> None:
        """Watch what is trained.

        Raises:
            ConfigError: The script has hooks of gradients.
        """
        for name, parameter in self._gradients.trained.items():
            for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if getattr(parameter, kind, None):
                    raise ConfigError(_HOOKED.format(name, kind.strip("_")))
            if name not in self._nodes:
                node = get_gradient_edge(parameter).node
                node.register_prehook(partial(self._see, name))
                self._nodes[name] = node

    def _see(self, name: str, _: object) -> None:
        if self._gradients.now is not None:
            self._gradients.hold(ZeroError(_BESIDE.format(name, name)))


def _attach(module: Any, unit: _ReduceScatter, world: int) -> None:
    if absent := [hook for hook in _HOOKS if not hasattr(module, hook)]:
        raise ConfigError(
            f"torch {torch.__version__} has no FSDPModule.{absent[0]}, through which gradients are "
            "summed in order; use torch 2.13 or newer, or DistributedDataParallel"
        )
    # The loss has its share of the step: FSDP2 would divide the sum by the ranks.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    # Else a rank whose micro-batch does not use a parameter would reduce fewer than the others.
    module.set_reduce_scatter_unused_params(True, recurse=False)
    module.set_custom_reduce_scatter(unit)
    # Before FSDP2's own hook, which gathers.
    module.register_forward_pre_hook(unit.see_call, prepend=True)
    module.register_forward_hook(unit.see_end)
    if world == 1:
        module.set_all_reduce_hook(unit.alone)


class _Memory:
    """Allocates as `torch.distributed.fsdp`'s Comm."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent, and for what it comes to."""
        return torch.empty(size, dtype=dtype, device=device)


class _AllGather(_Memory):
    """The weights of one FSDP2 module in host memory: `torch.distributed.fsdp`'s AllGather."""

    def __init__(
        self, name: str, collectives: Collectives, guard: _Guard, poll: Callable[[], None]
    ) -> None:
        self._what = f"weights of {name}"
        self._collectives = collectives
        self._guard = guard
        self._poll = poll

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` [world * n], in which `input_tensor` [n] is this rank's part."""
        with self._guard(), transport_failures(self._what):
            of_all = group.size() == self._collectives.world  # and not of one dimension of a mesh
            if async_op or not of_all or not output_tensor.is_cpu:
                return dist.all_gather_single(
                    output_tensor, input_tensor, group=group, async_op=async_op
                )
            self._poll()
            # Gathers come all through a backward, and reductions go on with them.
            wait(self._collectives.all_gather(output_tensor, self._what))
            self._poll()
        return None


class _ReduceScatter(_Memory):
    """The gradients of one FSDP2 module: `torch.distributed.fsdp`'s ReduceScatter."""

    def __init__(
        self,
        name: str,
        gradients: OrderedGradients,
        reduce: _Reduce,
        module: Any,
        guard: _Guard,
    ) -> None:
        self._name = name
        self._gradients = gradients
        self._sum = reduce
        self._module = module
        self._example: Tensor = next(module.parameters())
        self._guard = guard
        self._calls = 0
        """Of the module in the forward of this micro-step."""
        self._recomputed = 0
        """How often the backward has called it, for activations that were not kept."""
        self._kept: tuple[Tensor, Tensor] | None = None
        """The gradients of its calls so far, and where their sum goes."""

    def begin(self, _: object) -> None:
        """Begin a micro-step."""
        self._calls, self._recomputed, self._kept = 0, 0, None

    def see_call(self, *_: object) -> None:
        """The module is called."""
        if torch.compiler.is_compiling():
            return
        if torch._C._current_graph_task_id() >= 0:
            self._recomputed += 1
        elif torch.is_grad_enabled():
            now = self._gradients.now
            if not self._calls and now is not None and now.first:
                self._module.reshard()  # what is gathered may be older than the weights
            self._calls += 1

    def see_end(self, *_: object) -> None:
        """A call of the module ends."""
        # No backward will free what this forward has gathered.
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
            self._module.reshard()

    def end_backward(self) -> None:
        """All gradients of this micro-step have come.

        Raises:
            ZeroError: FSDP2 has lost one.
        """
        if (
            self._recomputed > 1
            # It has gradients of gathered parameters, which it did not reduce.
            and any(
                each._unsharded_param.grad is not None
                for group in self._module._get_fsdp_state()._fsdp_param_groups
                for each in group.fsdp_params
                if hasattr(each, "_unsharded_param")
            )
        ):
            raise ZeroError(
                f"FSDP2 has not reduced all gradients of {self._name}: it loses those of a module "
                "that is called several times in activation checkpointing with use_reentrant=True; "
                "set use_reentrant=False"
            )
        if self._kept is not None:
            kept, self._kept = self._kept, None
            self._sum(self._name, *kept)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Reduce `input_tensor` [world * n] into `output_tensor` [n]."""
        del group, op, async_op
        now = self._gradients.now
        if now is None or not now.last:
            output_tensor.zero_()
        with self._guard():
            self._reduce(as_real(input_tensor), as_real(output_tensor))

    def alone(self, reduced: Tensor) -> None:
        """Reduce in place, at world 1."""
        self._reduce(as_real(reduced), as_real(reduced))

    def _reduce(self, gradient: Tensor, out: Tensor) -> None:
        if self._gradients.looks_aside(self._name, gradient):
            return
        example = self._example
        copied = (out.dtype, out.device) != (example.dtype.to_real(), example.device)
        # FSDP2 reduces behind each call, and a sum takes one gradient of a micro-batch.
        if self._calls <= 1:
            self._sum(self._name, gradient, out, now=copied)
        elif copied:
            raise ZeroError(
                f"{self._name} is called {self._calls} times in a micro-batch, and FSDP2 copies "
                "its gradients to another dtype or device after each: set reduce_dtype to the "
                "dtype of its parameters, without CPU offload, or call it once"
            )
        elif self._kept is None:
            self._gradients.arrive(self._name)
            self._kept = gradient.clone(), out
        else:  # FSDP2 adds `out` to the first one
            self._kept[0].add_(gradient)
            out.zero_()
