"""`protect`, the one call of a script: checks what it is given, and chooses what it gets."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader

from zero_comm.exchange.objects import gather_objects_of_group
from zero_comm.sums.order import NATIVE_RUN
from zero_comm.worker.distributed import init_distributed
from zero_contract.clock import process_age_s
from zero_contract.errors import ConfigError
from zero_data.lanes.adapters.loaders import check_loader, warn_of_seeds
from zero_step.checks import alike
from zero_step.staying import standing
from zero_torch import settings
from zero_torch.checkpoints import Checkpoints
from zero_torch.loader import check_is_loader
from zero_torch.optimizers.held_calls import check_not_taken
from zero_torch.optimizers.supported import (
    check_members,
    check_scheduler,
    check_step,
    step_without_fusion,
    unwrapped,
)
from zero_torch.run import Run
from zero_torch.staying import stay
from zero_torch.wrapped import (
    Wrapped,
    Wrapper,
    check_gradients,
    check_no_hook,
    check_savable,
    check_sums,
    recognize,
)

_log = logging.getLogger(__name__)
_FUSED = (
    "{}(fused=True) steps with foreach=True instead: a fused kernel rounds the end of a shard "
    "differently, and the world size decides where shards end"
)
_SHARDS = (
    "rank %d has another seed of torch than rank 0, and FSDP2 takes the shard of each rank from "
    "the weights that this rank has made: unless weights are loaded, they are a mixture that "
    "depends on the world size; call torch.manual_seed() with one seed before the model is made"
)
_SEED = "elastic.seed, 42 by default; give protect(config={'elastic': {'seed': ...}})"


@overload
def protect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    microbatches: int,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    stateful: Mapping[str, Stateful] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Run: ...


@overload
def protect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    stateful: Mapping[str, Stateful] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Checkpoints: ...


def protect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any] | None = None,
    *,
    microbatches: int | None = None,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    stateful: Mapping[str, Stateful] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Run | Checkpoints:
    """Give a training with stock PyTorch the same bits at every world size. Collective.

    Without a loader it gets checkpoints and recovery alone: data, gradients and steps stay the
    script's own, and the bits depend on the world size.

    Args:
        model: Wrapped in DistributedDataParallel, or sharded by fully_shard; in one process also
            neither. torch.compile may be applied to it, or to parts of it.
        optimizer: Of the model's parameters.
        loader: Its batches are micro-batches. Every rank gives the same dataset.
        microbatches: The micro-batches of a global batch, over all ranks.
        scheduler: `run.step()` steps it, once for each step of the optimizer; but not one that
            needs a metric, such as ReduceLROnPlateau, which the script steps itself.
        scaler: `run.backward()` and `run.step()` scale the loss with it.
        stateful: Further objects by name, with state_dict() and load_state_dict(): saved and
            loaded with each checkpoint. A state must be equal on all ranks, but for DTensors.
        config: The sections "elastic" and "checkpoint", see `settings`.

    Raises:
        ConfigError: The model, optimizer or loader cannot be protected (docs/stock-pytorch.md).
        PeerLost: A peer is lost.
    """
    _check_arguments(loader, microbatches, stateful or {})
    chosen = settings.read(config or {})
    # As the script leaves them: what follows waits for other ranks, and seeds.
    torch_seed, came_after_s = torch.initial_seed(), process_age_s()
    began = standing() if chosen.elastic.in_place else None
    init_distributed()
    wrapped = recognize(model)
    optimizer = unwrapped(optimizer)
    check_savable(wrapped)
    check_members(optimizer, wrapped.trained())
    check_scheduler(scheduler)
    options = {
        "scheduler": scheduler,
        "scaler": scaler,
        "stateful": dict(stateful or {}),
        "chosen": chosen,
        "facts": {
            "microbatches": microbatches,
            "the batch_size of the loader": getattr(loader, "batch_size", None),
            **alike.of_data(loader),
            **alike.of_settings(chosen.elastic),
        },
    }
    if loader is None or microbatches is None:
        checkpoints = Checkpoints(wrapped, optimizer, **options)
        checkpoints.start()
        return checkpoints
    # From here on what only a run asks for: without a loader gradients and steps are the script's.
    _check_no_second_optimizer(wrapped, stateful or {})
    check_not_taken(model=wrapped.model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    check_no_hook(wrapped)
    check_gradients(wrapped, dist.get_world_size())
    check_sums(wrapped, chosen.elastic)
    check_step(optimizer, sharded=wrapped.wrapper is Wrapper.FSDP2)
    if step_without_fusion(optimizer) and dist.get_rank() == 0:
        _log.warning("%s", _FUSED.format(type(optimizer).__name__))
    if chosen.elastic.is_native and dist.get_rank() == 0:
        _log.warning("%s", NATIVE_RUN)
    if "seed" not in (config or {}).get("elastic", {}) and dist.get_rank() == 0:
        # Seeds that the script has set elsewhere, and that this run does not take. From 2**32 on
        # that of torch is its own or this project's.
        seed, of_torch = chosen.elastic.seed, f"torch.manual_seed({torch_seed})"
        given = torch_seed < 1 << 32 and torch_seed != seed
        warn_of_seeds(loader, seed, _SEED, *[f"{of_torch} seeds the initial weights alone"] * given)
    # A process that stays makes another one in the next round.
    again = partial(Run, wrapped, optimizer, loader, microbatches=microbatches, **options)
    run = again()
    run.start()
    if began is not None:
        stay(run, again, began, came_after_s)
    # DDP has given all ranks the weights of rank 0; fully_shard leaves to each what it has made.
    if wrapped.wrapper is Wrapper.FSDP2:
        seeds = gather_objects_of_group(torch_seed, "seeds of torch")
        others = [rank for rank, seed in enumerate(seeds) if seed != seeds[0]]
        if others and dist.get_rank() == 0:
            _log.warning(_SHARDS, others[0])
    return run


def _check_arguments(
    loader: DataLoader[Any] | None, microbatches: int | None, stateful: Mapping[str, object]
) -> None:
    if (loader is None) != (microbatches is None):
        absent = "loader" if loader is None else "microbatches"
        raise ConfigError(
            f"protect() got no {absent}: give loader and microbatches, or neither of them for "
            "checkpoints alone"
        )
    if microbatches is not None and microbatches < 1:
        raise ConfigError(f"microbatches={microbatches}: a global batch has at least one")
    if loader is None:
        return
    check_is_loader(loader)
    check_loader(loader)
    for name in (name for name, each in stateful.items() if each is loader):
        raise ConfigError(
            f"stateful[{name!r}] is the loader, whose position is in every checkpoint of a run "
            "already: leave it out"
        )


def _check_no_second_optimizer(wrapped: Wrapped, stateful: Mapping[str, object]) -> None:
    trained = set(wrapped.trained().values())
    for name, each in stateful.items():
        groups = each.param_groups if isinstance(each, torch.optim.Optimizer) else ()
        if any(parameter in trained for group in groups for parameter in group["params"]):
            raise ConfigError(
                f"stateful[{name!r}] is an optimizer of parameters of the model, and its step does "
                "not wait for the last micro-batch of a step: give these parameters to the "
                "optimizer of protect(), in a param group of their own"
            )
