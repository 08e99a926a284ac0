"""accelerate on `zero_torch.Run`: what `prepare` returns, in order.

    run, model, optimizer, loader, scheduler = zero_libraries.accelerate.protect(
        accelerator, model, optimizer, loader, scheduler, microbatches=12
    )
    run.load("checkpoints")
    for epoch in range(run.loader.epoch, epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                ...                        # as ever
            run.save_if_due("checkpoints")

`accelerator.accumulate` follows the micro-batches of the run, `accelerator.backward` weighs them,
and `accelerator.clip_grad_norm_` has the norm that does not depend on the number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from accelerate.utils import (
    DistributedType,
    parse_flag_from_env,
    recursively_apply,
    send_to_device,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zero_torch
from zero_contract.errors import ConfigError, ZeroError
from zero_libraries.versions import check_replaced

_KEPT = {
    "save_state": "the run has the state: call run.save_if_due(DIR) after each batch",
    "load_state": "the run has the state: call run.load(DIR) once, after protect()",
    "register_for_checkpointing": "give protect(stateful={name: object})",
}
"""Methods that would keep a part of the state, and what has the whole of it."""
_REPLACED = ("backward", "clip_grad_norm_", "gather", "no_sync", "_do_sync", *_KEPT)
"""Methods of an accelerator in whose place a run's are."""


def protect(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    scheduler: Any = None,
    *,
    microbatches: int,
    stateful: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[zero_torch.Run, Any, Any, Any, Any]:
    """Prepare a training whose bits do not depend on the number of ranks; see `zero_torch.protect`.

    Returns:
        The run, then model, optimizer, loader and scheduler in the place of those that
        `accelerator.prepare` returns. The scheduler steps once in a step.

    Raises:
        ConfigError: The accelerator accumulates by itself, or see `zero_torch.protect`.
    """
    if (steps := accelerator.gradient_accumulation_steps) != 1:
        raise ConfigError(
            f"Accelerator(gradient_accumulation_steps={steps}): leave it out; microbatches is the "
            "number of micro-batches in a step, over all ranks"
        )
    check_processes(accelerator.num_processes)
    # Without the loader, whose samples the run divides, and the scheduler, which accelerate would
    # step once for each rank.
    model, optimizer = accelerator.prepare(model, optimizer)
    run = zero_torch.protect(
        model,
        optimizer,
        loader,
        microbatches=microbatches,
        scheduler=scheduler,
        scaler=accelerator.scaler,
        stateful=stateful,
        config=config,
    )
    hand_over(accelerator, run)
    return run, model, optimizer, _OnDevice(run, accelerator), scheduler


def check_processes(counted: int) -> None:
    """Check that accelerate knows of all processes.

    Raises:
        ConfigError: It knows of fewer; another batch than the script's would be trained.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if counted < world:
        raise ConfigError(
            f"accelerate counts {counted} process{'es' if counted > 1 else ''}, and there are "
            f"{world}: without a GPU it chooses no backend. Give it one: "
            "Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend='gloo')], ...), or "
            "TrainingArguments(use_cpu=True) for the Trainer"
        )


class _OnDevice:
    """The run's loader, whose batches are moved to the device of an accelerator."""

    def __init__(self, run: zero_torch.Run, accelerator: Accelerator) -> None:
        self._run = run
        self._device = accelerator.device if accelerator.device_placement else None
        self.dataset = run.loader.dataset

    def __len__(self) -> int:
        """The micro-batches of the rest of the epoch; TypeError for a stream."""
        return len(self._run.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch."""
        for batch in self._run.loader:
            yield batch if self._device is None else send_to_device(batch, self._device)


def hand_over(accelerator: Any, run: zero_torch.Run) -> None:
    """Let a run do what an accelerator would do in a step.

    Raises:
        ConfigError: The accelerator was to shard the model, and has not.
    """
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and not sharded and accelerator.num_processes > 1:
        raise ConfigError(
            "accelerate has dropped fsdp_plugin (fsdp= of TrainingArguments), as it does on CPUs: "
            "each rank would have the whole model, in DDP. Leave it out, or train on GPUs"
        )

    def backward(loss: Tensor, *, tokens: int | Tensor | None = None, **_: Any) -> None:
        run.backward(loss, tokens=tokens)

    def do_sync() -> None:
        run._advance()  # in a loop that draws ahead, to the micro-step of the batch that is next
        accelerator.gradient_state._set_sync_gradients(run.last)

    check_replaced("accelerate", accelerator, _REPLACED)
    accelerator.backward = backward
    accelerator.clip_grad_norm_ = partial(_clip_grad_norm, accelerator, run)
    if accelerator.num_processes > 1:
        one = partial(_gathered, accelerator.gather)
        accelerator.gather = partial(recursively_apply, one, error_on_other_type=True)
    # Each micro-step has to reduce: the run accumulates.
    accelerator.no_sync = lambda _=None: nullcontext()
    accelerator._do_sync = do_sync
    for name, instead in _KEPT.items():
        setattr(accelerator, name, _refusing(f"accelerator.{name}(): {instead}"))
    for prepared in accelerator._optimizers:  # which has kept its step() of before
        prepared.__setstate__({})


def _clip_grad_norm(
    accelerator: Any,
    run: zero_torch.Run,
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2,
) -> Tensor | None:
    if norm_type != 2:
        raise ZeroError(f"clip_grad_norm_(norm_type={norm_type}): the norm of a run is that of 2")
    some = dict.fromkeys([parameters] if isinstance(parameters, Tensor) else parameters)
    groups = [group for each in accelerator._optimizers for group in each.param_groups]
    if any(p.requires_grad and p not in some for group in groups for p in group["params"]):
        if run.lost is not None or not run.last:
            return None
        accelerator.unscale_gradients()
        # The run answers torch, for some of its gradients as for all.
        return nn.utils.clip_grad_norm_(some, max_norm)
    norm = run.clip_grad_norm_(max_norm)
    return None if norm is None else torch.tensor(norm, dtype=torch.float64)


def _gathered(gather: Callable[[Tensor], Tensor], mine: Tensor) -> Tensor:
    """The rows of all ranks, who need not have equally many."""
    if not mine.ndim:
        return gather(mine)
    # The last micro-batch of an epoch has fewer. accelerate's loaders repeat samples to prevent
    # that, and a run has each sample once.
    sizes = gather(torch.tensor([len(mine)], device=mine.device)).tolist()
    most = max(sizes)
    if most == min(sizes):
        return gather(mine)
    padded = torch.cat([mine, mine.new_zeros(most - len(mine), *mine.shape[1:])])
    parts = gather(padded).split(most)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _refusing(why: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise ZeroError(why)

    return refuse


@contextmanager
def unprepared(accelerator: Any) -> Iterator[None]:
    """Let `prepare` return a loader as it is given."""
    accelerator.prepare = lambda given: given
    try:
        yield
    finally:
        del accelerator.prepare
