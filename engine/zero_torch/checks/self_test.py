"""The self-test of a model under stock PyTorch: see `zero_step.checks.self_test`.

Owns how the first micro-batch is run without a trace in its step. Must always hold: DDP sees
nothing of it, since its parameters are replaced by others of the same memory, which nobody watches;
FSDP2 gathers weights, and what it would reduce is looked at (`OrderedGradients.aside`).

It begins in the first forward, within what wraps the module and moves its inputs. A module that is
compiled together with its hooks is not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from zero_comm.worker.agent_link import AgentLink, exit_on_peer_loss
from zero_data.generators import Generator, kept_generators, seed_generators
from zero_data.position_loader import kept, seed_everything
from zero_step.checks.bit_sum import bit_sum
from zero_step.checks.self_test import Gradient, Replay, SelfTest, bits_of, differentiate, roots_of
from zero_step.phase import State
from zero_torch.ordered_gradients import OrderedGradients
from zero_torch.training import Training
from zero_torch.wrapped import HookOfOriginal, Wrapped, Wrapper, own_name


def attach(
    wrapped: Wrapped,
    training: Training,
    gradients: OrderedGradients,
    generators: Sequence[Generator],
    link: AgentLink,
) -> None:
    """Let the first forward be tested, if elastic.deterministic asks for it."""
    is_ddp = wrapped.wrapper is Wrapper.DDP
    tested: Any = wrapped.model.module if is_ddp else wrapped.called
    device = wrapped.device
    mode = training.hardware.mode
    compiles_hooks = tested._compiled_call_impl is not None
    if not mode.replays(device) or compiles_hooks or (is_ddp and wrapped.called != wrapped.model):
        return
    once = _Once(tested, device.type)
    replay = _of_shards if wrapped.wrapper is Wrapper.FSDP2 else _of_copies
    test = SelfTest(
        module=wrapped.module,
        mode=mode,
        collectives=training.collectives,
        device=device,
        cursor=training.cursor,
        hardware_changed=lambda: training.hardware_changed,
        replay=partial(replay, once, gradients),
    )

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        is_first = torch.is_grad_enabled() and gradients.phase.state is State.DRAWN
        if not (tested.training and is_first):
            return
        # Once, whatever comes of it.
        hook.remove()
        devices = [] if device.type == "cpu" else [device]
        with (
            exit_on_peer_loss(link),
            mode.refusals(),
            kept(),
            kept_generators(generators),
            torch.random.fork_rng(devices, device_type=device.type),
        ):
            test.run_if_due(partial(_call, tested), args, kwargs, partial(_seed, generators))
            # What follows is the forward of the micro-step itself.
            gradients.start_over()

    hook = tested.register_forward_pre_hook(HookOfOriginal(begin), prepend=True, with_kwargs=True)


def _call(tested: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return tested(*args, **kwargs)


def _seed(generators: Sequence[Generator]) -> None:
    seed_everything(0)
    seed_generators(generators, 0)


class _Once(nn.Module):
    """Forward and backward as one module, so that its parameters can be replaced for both."""

    def __init__(self, tested: nn.Module, device_type: str) -> None:
        super().__init__()
        self.tested = tested
        self._device_type = device_type

    def forward(self, forward: Callable[[], Any]) -> tuple[int, ...]:
        """The bits of what `forward` returns, after the backward of it."""
        outputs = forward()
        bits = bits_of(outputs)
        if roots := roots_of(outputs):
            with torch.autocast(self._device_type, enabled=False):
                differentiate(roots)
        return bits


def _of_copies(once: _Once, gradients: OrderedGradients, forward: Callable[[], Any]) -> Replay:
    copies = {
        name: each.detach().requires_grad_(each.requires_grad)
        for name, each in once.named_parameters()
    }
    with gradients.aside():
        outputs = functional_call(once, copies, (forward,))
    # About the order of backward: the last parameters come first.
    found = ((name, copy.grad) for name, copy in reversed(copies.items()))
    bits = [
        Gradient(turn, own_name(name.removeprefix("tested.")), int(bit_sum(gradient)))
        for turn, (name, gradient) in enumerate(found)
        if gradient is not None
    ]
    return Replay(outputs=outputs, gradients=bits)


def _of_shards(once: _Once, gradients: OrderedGradients, forward: Callable[[], Any]) -> Replay:
    with gradients.aside() as seen:
        outputs = once(forward)
    bits = [Gradient(turn, *each) for turn, each in enumerate(seen)]
    return Replay(outputs=outputs, gradients=bits)
