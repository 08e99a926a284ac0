"""How a protected run goes on in its process when the ranks change: see `zero_step.staying`.

Must always hold: who stays does what a newcomer does, exchange by exchange. A newcomer wraps its
model in DDP and calls `protect`; so the group of DDP is met anew, with a reducer of its own, and
the run is made again with what `protect` was given. What the script holds stays the same objects:
the model, the loader, in whose iteration it is, and the run.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.utils import _sync_module_states, _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel

from zero_comm.worker.agent_link import agent_link
from zero_contract.worker import Ability
from zero_data.position_loader import LoopCalls
from zero_step.session import Session
from zero_step.staying import Standing, Staying
from zero_torch.run import Run
from zero_torch.wrapped import Wrapped, Wrapper

_NEVER = {
    Wrapper.FSDP2: "FSDP2 decides the sizes of its shards when the model is sharded",
    Wrapper.PLAIN: "the model is that of one process",
}
_SEES_NO_PEER = timedelta(seconds=60)
_OTHERS = "the script exchanges something of its own before protect()"


def stay(run: Run, again: Callable[..., Run], began: Standing, came_after_s: float) -> None:
    """Let a run, which has just been made, stay in its process, if it can.

    The log of its end says why it cannot. `again` makes one of what `protect` was given, in the
    place of a former one. `began`: what the process had exchanged when `protect` was called, at the
    age `came_after_s`.
    """
    why_not = _why_not(run, began)
    wrapping = (1, 0, 0) if not why_not else began
    staying = Staying(partial(_make_again, ref(run), again), wrapping, came_after_s, why_not)
    run.staying, staying.loader = staying, run.loader
    if not staying.why_not:  # else no newcomer warms up for the sake of the others
        link = agent_link(dist.get_rank())
        link.announce(Ability.BOUNDARY, Ability.REJOIN)
        staying.when_forbidden = partial(link.announce, Ability.BOUNDARY)


def _why_not(run: Run, began: Standing) -> str:
    """Why a newcomer could not meet this run; empty: it can."""
    wrapped = run._wrapped
    if why_not := _NEVER.get(wrapped.wrapper):
        return why_not
    kind, ddp = wrapped.device.type, _ddp_of(wrapped)
    options = ddp.mixed_precision, ddp._use_python_reducer, ddp._delay_all_reduce_params
    # What `_wrap_again` does has to be all that the constructor has done.
    obstacles = (
        (kind != "cpu", f"it trains on {kind}, and only CPUs are tested"),
        (wrapped.called is not ddp, "torch.compile has DistributedDataParallel in its graph"),
        (
            type(ddp) is not DistributedDataParallel,
            f"{type(ddp).__name__} is derived from DistributedDataParallel",
        ),
        (
            ddp.process_group is not dist.group.WORLD,
            "DistributedDataParallel has a process group of the script's own",
        ),
        (any(options), "DistributedDataParallel is made with options that are not tested"),
    )
    if why_not := next((text for found, text in obstacles if found), ""):
        return why_not
    groups, exchanged, own = began
    if groups != 1 or own:
        return _OTHERS
    # So far DDP's constructor alone may have exchanged anything.
    if exchanged != _exchanges_of_one(ddp):
        return f"{_OTHERS}, or DistributedDataParallel has not met when it was made"
    return ""


def _ddp_of(wrapped: Wrapped) -> DistributedDataParallel:
    return cast(DistributedDataParallel, wrapped.model)


def _exchanges_of_one(ddp: DistributedDataParallel) -> int:
    """The number of exchanges with which DDP meets, counted in a group of this process alone."""
    store, gloo = dist.HashStore(), dist.ProcessGroup.BackendType.GLOO
    group: Any = dist.ProcessGroup(store, 0, 1)  # torch's stubs lack calls of it
    group._set_default_backend(gloo)
    backend = dist.ProcessGroupGloo(store, 0, 1, _SEES_NO_PEER)
    group._register_backend(torch.device("cpu"), gloo, backend)
    _meet(ddp, group)
    count: int = group._get_sequence_number_for_group()
    return count


def _meet(ddp: DistributedDataParallel, group: Any) -> None:
    """Exchange what the constructor does: shapes are compared, the state of rank 0 is sent."""
    parameters, _ = ddp._build_params_for_reducer()
    _verify_param_shape_across_processes(group, parameters)
    _sync_module_states(
        module=ddp.module,
        process_group=group,
        broadcast_bucket_size=ddp.broadcast_bucket_size,
        src=0,
        params_and_buffers_to_ignore=ddp.parameters_to_ignore,
        broadcast_buffers=True,
    )


def _wrap_again(ddp: DistributedDataParallel) -> None:
    """Meet in the group that there is now, and make a reducer, as the constructor. Collective."""
    ddp._remove_autograd_hooks()
    group: Any = dist.group.WORLD
    ddp.process_group = group
    _meet(ddp, group)
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    # `_set_static_graph` does nothing where it is set.
    is_static, ddp.static_graph = ddp.static_graph, False
    ddp._ddp_init_helper(parameters, sparse, names, is_static)
    # As a constructor leaves them: the run that is made next attaches its hook.
    ddp._comm_hooks, ddp._has_rebuilt_buckets, ddp._lazy_init_ran = [], False, False
    ddp.require_backward_grad_sync = True
    if is_static:
        ddp._set_static_graph()


def _make_again(run_of: Callable[[], Run | None], again: Callable[..., Run]) -> Session:
    """Make a run anew over the group that there is now, as the same object. Collective.

    Its weights and the state of its optimizer are undefined until a checkpoint is loaded.
    """
    run = run_of()
    assert run is not None  # it is in a call of the script, or of its loader
    run.detach()
    _wrap_again(_ddp_of(run._wrapped))
    fresh = again(former=run)
    fresh.start()
    fresh.loss, fresh.grad_norm = run.loss, run.grad_norm
    agent_link(dist.get_rank()).announce(Ability.BOUNDARY, Ability.REJOIN)
    of_others = {name: each for name, each in vars(run).items() if name not in vars(fresh)}
    vars(fresh).update(of_others)
    # Both are one from now on: the script has this one, and hooks know the other.
    object.__setattr__(run, "__dict__", vars(fresh))
    # A loop that begins in this round may last longer than it, and `fresh` does not.
    between = partial(run._between_steps, calls=False)
    run.loader.calls = LoopCalls(run._begin_iteration, run._draw, between)
    return fresh
