"""From autograd's gradients to sums on the shards: hooks, and the order of the units.

Owns the gradient buffers between a parameter's hook and the accumulator. Units are reduced in one
fixed order on every rank, each while the next one's backward runs.

A backward pass is announced by `begin` and ended by `finish`. A gradient of an unannounced one
calls `on_plain_backward`, which announces it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import repeat
from math import inf
from typing import Any

import torch
from torch import Tensor

from zero_comm.sums.ordered_sum import OrderedSum
from zero_comm.sums.reduction import Turn
from zero_contract.errors import ZeroError
from zero_engine.sharding.flat_unit import FlatUnit
from zero_step.gradients.pipeline import Pipeline, Reduction, by_stream
from zero_step.phase import Calls, Move, Phase, State

CALLS = Calls(
    backward="engine.backward(loss)",
    step="engine.step()",
    batch="call engine.backward(loss) first",
    reduced="call engine.backward(loss) first",
    resume="continue from a checkpoint: engine.load_checkpoint()",
)

_AT_ONCE = 1 << 20
"""Elements. A larger gradient is copied when it is made, so that it is not in memory twice."""


class UnitGradient:
    """The gradient of one unit in one micro-step, and the sum over the micro-steps.

    Attributes:
        buffer: [padded] in the compute dtype, or None while there is none.
        sum: This rank's interval, [padded / world], of the sum over micro-batches.
        whole: [padded] in fp32, of which the sum's total is an interval and which is not read
            before the step; None if gradients are sharded.
    """

    def __init__(self, unit: FlatUnit, sum: OrderedSum, whole: Tensor | None) -> None:
        self.unit = unit
        self.sum = sum
        self.whole = whole
        self.buffer: Tensor | None = None
        slots = unit.layout.slots
        starts = [slot.start for slot in slots[1:]] + [unit.padded]
        after = [(slot.stop, start) for slot, start in zip(slots, starts, strict=True)]
        self._gaps = [(stop, start) for stop, start in after if stop < start]
        # Of each part of the buffer: a parameter, what follows it, the next parameter, ...
        self._sizes = [
            size
            for slot, (stop, start) in zip(slots, after, strict=True)
            for size in (slot.numel, start - stop)
        ]
        self._made: dict[int, Tensor] = {}
        """Gradients by position that are to be copied together: a kernel takes longer to be begun
        than to copy a few thousand elements."""
        self.missing = set(range(len(unit.layout.slots)))

    def reset(self) -> None:
        """Expect the gradient of every parameter again."""
        self._made.clear()
        self.missing = set(range(len(self.unit.layout.slots)))

    def start(self, buffer: Tensor) -> None:
        """Take a buffer with undefined contents: all of it will be written."""
        self.buffer = buffer
        for start, stop in self._gaps:  # they take part in norms
            buffer[start:stop].zero_()

    def write(self, position: int, gradient: Tensor) -> None:
        """Write, or add, the gradient of one parameter, dense or sparse (as of an embedding)."""
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        if position not in self.missing:  # another part of it, from another reentrant checkpoint
            self._copy_made()
            self.view(position).add_(dense)
        elif dense.numel() > _AT_ONCE:
            self.view(position).copy_(dense)
        else:
            self._made[position] = dense
        self.missing.discard(position)
        if not self.missing:
            self._copy_made()

    def fill_missing(self) -> None:
        """Write zeros for every parameter without a gradient."""
        for position in self.missing:
            self.view(position).zero_()
        self.missing.clear()
        self._copy_made()

    def _copy_made(self) -> None:
        if not self._made:
            return
        assert self.buffer is not None
        parts = self.buffer.split(self._sizes)
        places = [parts[2 * position].view(each.shape) for position, each in self._made.items()]
        torch._foreach_copy_(places, list(self._made.values()))
        self._made.clear()

    def view(self, position: int) -> Tensor:
        """The part of the buffer that belongs to one parameter, in its shape."""
        assert self.buffer is not None
        slot = self.unit.layout.slots[position]
        return self.buffer[slot.start : slot.stop].view(slot.shape)


_REDUCERS: weakref.WeakSet[GradReducer] = weakref.WeakSet()


def is_weighted(graph_task: int) -> bool:
    """Whether a backward pass, by autograd's number, is that of a loss that an engine weighted."""
    return any(reducer._graph_task == graph_task for reducer in _REDUCERS)


class GradReducer:
    """Reduces the gradients of the trained units of one model."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        sums: Sequence[OrderedSum],
        reduction: Reduction,
        wholes: Sequence[Tensor] = (),
        on_ready: Callable[[FlatUnit], None] | None = None,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        gathers: bool,
    ) -> None:
        """Hook the parameters.

        Args:
            units: The trained units, in module order.
            sums: For each unit the sum of this rank's interval, [padded / world]; or [padded], to
                be made by the backend for every rank.
            reduction: Makes them.
            wholes: For each unit the tensor [padded] that the total of its sum is an interval of,
                if every rank has it.
            on_ready: Called when this backward pass does not need a unit's weights any more.
            guard: A context around exchanges, which may find that a peer is lost.
            gathers: Whether parameters are gathered in backward.
        """
        self._guard = guard
        self._on_ready = on_ready or (lambda _: None)
        gradients = [
            UnitGradient(unit, each, whole)
            for unit, each, whole in zip(units, sums, wholes or repeat(None), strict=False)
        ]
        # Backward meets the modules in about the reverse of their order, and ends with the root.
        blocks = [gradient for gradient in gradients if not gradient.unit.spec.is_root]
        # Fixed, not the order of this rank's backward: ranks take different branches.
        self._order = [*reversed(blocks), *(g for g in gradients if g.unit.spec.is_root)]
        self._next = 0
        self.phase = Phase(CALLS)
        """Where in a step this rank is."""
        self.failed = 0
        """Backward passes that have failed half way, and were discarded."""
        self._graph_task = -1
        """Autograd's number, unique in the process, of the backward pass of the newest loss."""
        self.on_plain_backward: Callable[[], None] = _refuse
        """Called at a gradient of an unannounced backward pass; it must call `begin`."""
        # Where parameters are gathered in backward, a process that waits here for another rank
        # could keep it waiting there (a deadlock), since one whose branch left a unit out sends
        # its zeros at the end. A stream can wait: such a rank sends them in their turn.
        self._by_stream = by_stream(reduction)
        self.pipeline = Pipeline(reduction, depth=1 if self._by_stream or not gathers else inf)
        for unit in units:
            for param in unit.params:
                param.grad = None  # of a time before the engine
        _REDUCERS.add(self)
        self._hooks = [
            param.register_post_accumulate_grad_hook(
                partial(if_alive(self.on_gradient), number, position)
            )
            for number, gradient in enumerate(self._order)
            for position, param in enumerate(gradient.unit.params)
        ]

    def check_hooks(self) -> None:
        """Check that no gradient has gone to its sum before a hook of the script sees it.

        Raises:
            ZeroError: A hook was registered after those here.
        """
        units = [gradient.unit for gradient in self._order]
        places = ((unit, at) for unit in units for at in range(len(unit.params)))
        for (unit, at), handle in zip(places, self._hooks, strict=False):
            hooks: Any = unit.params[at]._post_accumulate_grad_hooks
            if next(reversed(hooks)) != handle.id:
                raise ZeroError(
                    f"{unit.layout.slots[at].fqn} has a post-accumulate-grad hook that was "
                    "registered after initialize(): it finds no gradient, which has gone to its "
                    "sum; use parameter.register_hook(), or register it before"
                )

    def unhook(self) -> None:
        """Remove the hooks from the parameters."""
        while self._hooks:
            self._hooks.pop().remove()

    @property
    def withholds(self) -> bool:
        """Whether ranks hold pieces of this step that have not come to their owners."""
        return self.pipeline.turn.withholds

    def begin(self, turn: Turn, *, weight: float = 1.0) -> None:
        """Announce one backward pass; its gradients are multiplied with `weight`."""
        self.pipeline.begin(turn, weight)
        self._next = 0
        for gradient in self._order:
            gradient.reset()
        self.phase.move(Move.BEGIN)

    def discard_failed(self) -> None:
        """Discard a backward pass that has failed half way, if there is one; not within another."""
        if not self.running:
            return
        # Exchanges under way still read the buffers, and what comes is added to the sums.
        self.pipeline.complete()
        for gradient in self._order:
            gradient.buffer = None
        self.failed += 1
        self.phase.move(Move.RECALL if self.pipeline.turn.first else Move.FAIL)

    @property
    def running(self) -> bool:
        """Whether a backward pass has begun and has not ended."""
        return self.phase.state is State.BACKWARD

    def note_graph_task(self, _gradient: Tensor) -> None:
        """The hook of a loss: note that the current backward pass is of this engine's loss."""
        self._graph_task = torch._C._current_graph_task_id()

    def skip(self, unit: FlatUnit) -> None:
        """Expect no gradient of a unit in this backward pass: its module has not run here."""
        gradient = next((each for each in self._order if each.unit is unit), None)
        # In its turn, where a stream waits: no other rank's stream waits then for the end of this
        # backward.
        if gradient is None or not self._by_stream or not self.running:
            return
        self._ensure_buffer(gradient)
        gradient.fill_missing()
        with self._guard():
            self._issue_ready()

    def finish(self) -> None:
        """Complete the units that lack gradients and end every exchange."""
        # A rank that has skipped a branch sends zeros: so it stays in step with the others.
        for gradient in self._order[self._next :]:
            if gradient.missing:
                self._ensure_buffer(gradient)
                gradient.fill_missing()
                self._on_ready(gradient.unit)
        self._issue_ready()
        self.pipeline.end()
        self.phase.move(Move.FINISH)

    def written(self) -> list[str]:
        """The parameters that have a gradient which no backward has made."""
        return [
            slot.fqn
            for gradient in self._order
            for slot, param in zip(gradient.unit.layout.slots, gradient.unit.params, strict=True)
            if param.grad is not None
        ]

    def take_written(self) -> None:
        """Take these gradients as those of the backward pass that `begin` has announced."""
        for number, gradient in enumerate(self._order):
            for position, param in enumerate(gradient.unit.params):
                if param.grad is not None:
                    self.on_gradient(number, position, param)

    def on_gradient(self, number: int, position: int, _: object) -> None:
        """Take the gradient of a parameter of the unit that is the `number`-th to be reduced."""
        # A hook of the script before this one may have returned something in its place.
        param = self._order[number].unit.params[position]
        made, param.grad = param.grad, None  # also if this fails
        if not self.running:
            if is_weighted(torch._C._current_graph_task_id()):
                # The loss of another engine passes this one's module: a generator's loss passes the
                # discriminator. These are not gradients of this engine's loss.
                return
            self.on_plain_backward()
        gradient = self._order[number]
        name = gradient.unit.layout.slots[position].fqn
        if made is None:
            raise ZeroError(
                f"backward(): a hook of the script has taken the gradient of {name} away, as one "
                "that steps an optimizer within the backward: leave that to the engine's step()"
            )
        if number < self._next:
            raise ZeroError(
                f"backward(): the gradient of {name} came twice, and the first has been reduced "
                "already: it is used in a reentrant activation checkpoint and in another, or "
                "outside as well; give checkpoint() use_reentrant=False"
            )
        self._ensure_buffer(gradient)
        gradient.write(position, made)
        del made  # its memory may be used by the exchange that begins now
        if not gradient.missing:
            self._on_ready(gradient.unit)
            with self._guard():
                self._issue_ready()

    def _ensure_buffer(self, gradient: UnitGradient) -> None:
        if gradient.buffer is not None:
            return
        dtype, whole = gradient.unit.full.dtype, gradient.whole
        # A gradient can be where its sum is going to be: nothing has been summed there yet.
        if self.pipeline.turn.first and whole is not None and whole.dtype == dtype:
            gradient.start(whole)
        else:
            gradient.start(self.pipeline.pool.take(gradient.unit.padded, dtype))

    def _issue_ready(self) -> None:
        # One that is ready before its turn waits.
        while self._next < len(self._order) and not self._order[self._next].missing:
            gradient = self._order[self._next]
            microbatches, gradient.buffer = gradient.buffer, None
            assert microbatches is not None
            what, lent = f"gradients of {gradient.unit.label}", microbatches is not gradient.whole
            self.pipeline.reduce(microbatches, what, gradient.sum, lent=lent)
            self._next += 1


def _refuse() -> None:
    raise ZeroError(
        "gradients outside engine.backward(loss); call it in place of loss.backward(), or call "
        "engine.scale(loss).backward()"
    )


def if_alive(method: Callable[..., None]) -> Callable[..., None]:
    """A method as a hook of a parameter, a module or an output, which does not keep its object."""
    # Python's garbage collector does not see the references of an autograd hook, and a module may
    # outlive its engine: one that its script has dropped would stay, with its memory and its
    # threads.
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call
