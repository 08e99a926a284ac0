"""A plain `.backward()` of the script, on a loss that the engine has not seen.

DeepSpeed allows it in place of `engine.backward(loss)`. The loss itself is unknown, so the
gradients are weighted instead, and its value is known only if forward has returned it.

Autograd does not announce a backward. It is noticed by the first of: a hook of the output of
forward, a hook of a sharded module's output, and the first gradient of a parameter.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from zero_contract.errors import ZeroError
from zero_engine.core.micro_steps import MicroSteps
from zero_engine.parts import Core
from zero_engine.sharding.grad_reducer import if_alive, is_weighted

# One backward may end at the parameters of several engines: a GAN's.
_ALL: weakref.WeakSet[PlainBackward] = weakref.WeakSet()


class PlainBackward:
    """Makes plain backwards of the script the backwards of an engine's micro-steps."""

    def __init__(self, core: Core, micro_steps: MicroSteps) -> None:
        self._core = core
        self._micro_steps = micro_steps
        self._task = -1
        """Autograd's number of the current backward, the outermost one; -1: there is none."""
        self._last_task = -1
        """The number, unique in the process, of the last backward of a micro-step."""
        self._looked_into = -1
        """The number of a backward that is known to end at none of the parameters."""
        self._begun = False
        self._loss: Tensor | None = None
        if core.reducer is not None:
            core.reducer.on_plain_backward = self.begin
            core.coordinator.on_plain_backward = if_alive(self.notice)
            _ALL.add(self)

    def watch(self, output: Any) -> None:
        """Hook the output of forward, which a backward passes first."""
        reducer = self._core.reducer
        if reducer is None:
            return
        if torch._C._current_graph_task_id() == -1:  # what is still running has failed
            self._task, self._begun = -1, False
            reducer.discard_failed()
        tensors = [
            leaf
            for leaf in tree_leaves(output)
            if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf
        ]
        numbers = [tensor.detach() for tensor in tensors if tensor.numel() == 1]
        for tensor in tensors:
            value = numbers[0] if tensor.numel() == len(numbers) == 1 else None
            tensor.register_hook(partial(if_alive(self.on_output), value))

    def on_output(self, value: Tensor | None, gradient: Tensor) -> None:
        """Note that a backward has come to the output of forward; `value`: its only number."""
        if is_weighted(torch._C._current_graph_task_id()):
            return
        # It does not begin a micro-step: `torch.autograd.grad` calls this hook, too, and leaves no
        # gradients.
        self.notice()
        if value is not None:  # the loss, or its part in one
            self._loss = (value * gradient).reshape(())

    def notice(self) -> None:
        """Note that a backward is running; it is a micro-step's if it ends at a parameter."""
        task = torch._C._current_graph_task_id()
        if task == -1 or is_weighted(task):
            return
        self._core.overlap.wait()  # of a step since that forward
        self._await_end(task)
        # At stage 3 weights are gathered before there is a gradient, and within a micro-step only:
        # this may be the hook of a sharded module's output.
        if self._core.stage.shards_parameters and not self._begun and task != self._looked_into:
            try:
                ends_at_parameters = any(
                    torch._C._will_engine_execute_node(get_gradient_edge(param).node)
                    for unit in self._core.units
                    for param in unit.params
                    if param.requires_grad
                )
            except RuntimeError:  # torch.autograd.grad() with respect to one of them
                ends_at_parameters = False
            if ends_at_parameters:
                self.begin()
            else:
                self._looked_into = task

    def begin(self) -> None:
        """Begin a micro-step with the current backward.

        Raises:
            ZeroError: The backward needs a loss scale, which only `scale()` and `backward()` apply;
                or there cannot be a backward now.
        """
        if self._core.zero is not None and self._core.zero.scale != 1:
            raise ZeroError(
                "loss.backward() in fp16 training: the loss must be scaled first; call "
                "engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._core.moved.compute("loss.backward()")
        self._await_end(torch._C._current_graph_task_id())
        if not self._begun:
            self._begun, self._last_task = True, self._task
            self._micro_steps.begin_unweighted()

    def _await_end(self, task: int) -> None:
        # The outermost one: reentrant activation checkpointing has backwards inside of it.
        if self._task == -1:
            self._task, self._loss = task, None
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """Autograd's callback at the end of the outermost backward."""
        begun, self._task, self._begun = self._begun, -1, False
        if begun:  # else `torch.autograd.grad`, or it ends at other parameters
            others = (each for each in _ALL if each is not self)
            shared = any(other._last_task == self._last_task for other in others)
            self._micro_steps.finish_unweighted(self._loss, shared=shared)
