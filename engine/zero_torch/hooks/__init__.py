"""Hooks on the gradients of a model, one module for each way to wrap it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import cast

from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zero_comm.exchange.collectives import Collectives
from zero_torch.hooks import ddp, fsdp2, plain
from zero_torch.ordered_gradients import OrderedGradients
from zero_torch.wrapped import Wrapped, Wrapper


def attach(
    wrapped: Wrapped,
    gradients: OrderedGradients,
    collectives: Collectives,
    guard: Callable[[], AbstractContextManager[None]],
) -> list[RemovableHandle]:
    """Let a model reduce its gradients through `gradients`.

    `guard` is a context around an exchange, which may find that a peer is lost.

    Returns:
        The hooks of the parameters under DDP, which can be left: its others end with its reducer.
    """
    match wrapped.wrapper:
        case Wrapper.FSDP2:
            fsdp2.attach(wrapped.module, gradients, collectives, guard)
        case Wrapper.DDP:
            model = cast(DistributedDataParallel, wrapped.model)
            return ddp.attach(model, wrapped.parameters(), gradients, collectives)
        case Wrapper.PLAIN:
            plain.attach(gradients)
    return []
