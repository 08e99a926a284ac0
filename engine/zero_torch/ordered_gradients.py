"""The gradients of one step: those of micro-batches come in, their ordered sum goes out.

Owns the sums of a step, by name, and where in a step this rank is. Must always hold: every sum
receives every micro-batch of the step, in the order of their numbers, so the sum depends on the
micro-batches alone; what torch has in `.grad` means nothing before the last micro-step, and is
dropped, so torch adds nothing to a sum.

A backward may have others in it, each a graph task of its own: activation checkpointing with
`use_reentrant` computes one for each module. What torch does at the end of a task finds its sums
complete; what belongs to the end of the whole backward comes after that of the outermost task.

Exchanges go on while the backward runs, and have ended when backward() returns. On a device with
streams the stream waits, so each ends at once.

`hooks` bring torch's gradients here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from zero_comm.exchange.collectives import Pending
from zero_comm.sums.additions import SUMS
from zero_comm.sums.native import NativeReduction
from zero_comm.sums.ordered_sum import OrderedSum
from zero_comm.sums.reduction import Turn
from zero_contract.errors import ZeroError
from zero_step.checks.bit_sum import bit_sum
from zero_step.gradients.pipeline import Pipeline, Reduction, by_stream
from zero_step.phase import Calls, Move, Phase, State

NOT_REDUCED = (
    "no gradient was reduced in this micro-step: call run.backward(loss) once for each batch of "
    "run.loader, and not within no_sync(). accelerator.accumulate() is a "
    "no_sync() with gradient_accumulation_steps > 1: set it to 1, protect() accumulates. In "
    "Lightning's manual optimization call self.manual_backward(loss)"
)
CALLS = Calls(
    backward="run.backward(loss)",
    step="run.step(), or optimizer.step(),",
    batch="there is no micro-batch: run.backward(), run.step() and clip_grad_norm_() belong to a "
    "batch of run.loader, drawn after the last run.load()",
    reduced=NOT_REDUCED,
    resume="continue from a checkpoint: run.load(), or in a new process if that is refused",
)


_TAKEN = (
    "a hook of the script has taken the gradient of {} away, as one that steps an optimizer within "
    "the backward: it would be in no sum; leave steps to the optimizer that protect() was given"
)


def check_taken(name: str, parameter: Tensor) -> None:
    """Raise ZeroError in a hook of a gradient if another one has removed it."""
    if parameter.grad is None:
        raise ZeroError(_TAKEN.format(name))


def as_real(flat: Tensor) -> Tensor:
    """The same memory as real numbers: of a complex number, its two parts."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


class OrderedGradients:
    """The sums of all gradients of a model.

    Attributes:
        trained: The parameters that require gradients in this step, by name.
        block: Micro-batches that are summed in a tree; it may change between two steps.
        pipeline: The reductions; its `weight` is that of this rank's micro-batch in the mean loss
            of the step.
        begins: Called at the begin of a micro-step.
        changes: Called at the begin of a step in which others are trained than in the one before.
        starts: Called at the begin of a backward.
        settles: Called at the end of a graph task, before its exchanges are completed.
        ends: Called at the end of a backward, behind what torch does there, before the exchanges of
            that end are completed.
    """

    def __init__(
        self,
        phase: Phase,
        reduction: Reduction,
        parameters: Mapping[str, nn.Parameter],
        block: int,
        guard: Callable[[], AbstractContextManager[None]],
        *,
        depth: int,
    ) -> None:
        """Sum over the group of a reduction those gradients that parameters require."""
        self.phase = phase
        self.block = block
        self.begins: list[Callable[[Turn], None]] = []
        self.changes: list[Callable[[], None]] = []
        self.starts: list[Callable[[], None]] = []
        self.settles: list[Callable[[], None]] = []
        self.ends: list[Callable[[], None]] = []
        self.not_twice = ""
        """Why a gradient cannot be differentiated once more; empty: it can."""
        self._parameters = parameters
        self.trained = self._require_gradients()
        self._guard = guard
        # On a stream exchanges of weights begin in between, in an order that torch decides.
        self.pipeline = Pipeline(reduction, depth=depth, at_once=by_stream(reduction))
        self._sums: dict[str, OrderedSum] = {}
        self._totals: dict[str, Tensor] = {}
        """The memory of sums that take several micro-steps."""
        self._of_step: set[str] = set()
        """The sums that have received a gradient in this step."""
        self._received: set[str] = set()
        """Those that have received one in this micro-step."""
        self._tasks: list[int] = []
        """The graph tasks of the backward under way, whose end is announced to autograd."""
        self._failure: Exception | None = None
        """The error that a hook could not raise: raised at the end of the backward."""
        self._aside: list[tuple[str, int]] | None = None
        """The bits of gradients that are in no sum."""

    @property
    def is_native(self) -> bool:
        """Whether the backend makes the sums."""
        return isinstance(self.pipeline.reduction, NativeReduction)

    def begin(self, now: Turn, weight: float) -> None:
        """Begin a micro-step, in which this rank's micro-batch has a weight.

        Raises:
            ZeroError: Other parameters are trained than in the micro-steps before.
        """
        trained = self._require_gradients()
        if changed := sorted(trained.keys() ^ self.trained.keys()):
            if not now.first:
                raise ZeroError(
                    f"requires_grad of {changed[0]} has changed in the middle of a step, at micro-"
                    f"step {now.micro_step}: freeze and unfreeze layers between two steps"
                )
            self.trained = trained
            for change in self.changes:
                change()
        if now.first:
            for gone in self._sums.keys() - self._of_step:  # DDP has other buckets now
                del self._sums[gone]
                self._totals.pop(gone, None)
            self._of_step.clear()
        self._received.clear()
        self._tasks.clear()
        self.phase.move(Move.DRAW)
        self.pipeline.begin(now, weight)
        self.start_over()

    def start_over(self) -> None:
        """Begin the forward of this micro-step anew, before it has a gradient."""
        self.drop_all()
        for begin in self.begins:
            begin(self.pipeline.turn)

    @contextmanager
    def aside(self) -> Iterator[list[tuple[str, int]]]:
        """A backward of no step: what is given to `looks_aside` in it, by name and bits."""
        self.drop_all()
        self._aside = []
        try:
            yield self._aside
        finally:
            self._aside = None

    def looks_aside(self, name: str, gradient: Tensor) -> bool:
        """Whether a gradient is in no sum; then its bits are taken down."""
        if self._aside is None:
            return False
        self._aside.append((name, int(bit_sum(gradient))))
        return True

    @property
    def now(self) -> Turn | None:
        """The micro-step; None between the end of one and the next micro-batch."""
        return None if self.phase.state is State.READY else self.pipeline.turn

    @property
    def has_received(self) -> bool:
        """Whether a sum has received a gradient of this micro-step."""
        return bool(self._received)

    def drop(self) -> None:
        """Drop the micro-step, and with it what there is of its step.

        Raises:
            ZeroError: Its backward has failed, and exchanges are under way.
        """
        # First: it raises where a part of the gradients is on its way, and nothing is dropped.
        self.see_failure()
        self.phase.move(Move.DROP)
        self._received.clear()
        self._of_step.clear()
        self._tasks.clear()
        self.drop_all()

    def see_failure(self) -> None:
        """Behind a backward: if it has not ended, it has failed."""
        if self.phase.state is State.BACKWARD and not self.pipeline.under_way:
            self.phase.move(Move.FAIL)

    def end(self) -> None:
        """End the micro-step; the phase of the last one ends with the step.

        Raises:
            ZeroError: There was no backward in it, or it failed, or some parameters got no gradient
                in it; or it is the last one, and the optimizer has not acted.
        """
        turn = self.pipeline.turn
        self.phase.check(Move.END if turn.last else Move.PASS)
        if absent := sorted(self._of_step - self._received):
            raise ZeroError(
                f"{absent[0]} got no gradient in micro-step {turn.micro_step} and had one "
                "before: every micro-batch must use the same parameters; let the others contribute "
                "0 * parameter.sum() to the loss"
            )
        if not turn.last:
            self.drop_all()
            self.phase.move(Move.PASS)
        elif turn.first:
            for ordered in self._sums.values():
                ordered.total = ordered.total[:0]  # the memory is that of `.grad`

    def reduce(
        self,
        name: str,
        gradient: Tensor,
        out: Tensor,
        *,
        then: Callable[[], Pending] | None = None,
        now: bool = False,
    ) -> None:
        """Begin to add the gradients [world * n] of the micro-batches of all ranks. Collective.

        They are real numbers, see `as_real`, and used up. In the last micro-step `out` is filled
        with the sums [n], or all if the backend makes them, until the end of the backward; it may
        be this rank's part of `gradient`. `then` begins an exchange of the sums, which has ended at
        that time, too.

        Raises:
            ZeroError: There is no micro-step, or a gradient of one comes a second time.
            PeerLost: A peer is lost.
        """
        micro_step = self.receive(name)
        ordered = self._sum_of(name, out, micro_step)

        def share() -> Pending | None:
            ordered.settle()
            # Where a step has one micro-step, the sum was made there.
            if ordered.total.data_ptr() != out.data_ptr():
                out.copy_(ordered.total)
            return None if then is None else then()

        what = f"gradients of {name}"
        self.pipeline.reduce(gradient, what, ordered, then=share if micro_step.last else None)
        if now:
            self.pipeline.complete()

    def poll(self) -> None:
        """Go on with the reductions whose exchanges have ended, in the middle of a backward.

        What it raises is raised at the end of the backward.
        """
        if self._failure is None:
            try:
                self.pipeline.poll()
            except Exception as error:
                self.hold(error)

    def add(self, name: str, gradients: Tensor) -> Tensor | None:
        """Add gradients [micro-steps, world, n], which all ranks have, after `receive`.

        They are those of this micro-step; or of all, in the last one, if there is a plan. That
        returns [n] in the dtype of sums.
        """
        turn = self.pipeline.turn
        by_place = gradients.flatten(0, 1)
        total = torch.empty_like(by_place[0], dtype=SUMS[gradients.dtype])
        if turn.plan is None:
            ordered, given = self._sum_of(name, total, turn), list(by_place[: turn.live])
        else:
            ordered = OrderedSum(total, self.block)
            # Ranks may have run several one after the other; the order is that of their numbers.
            given = [by_place[place] for place in turn.plan.places]
        first = turn.first or turn.plan is not None
        ordered.add(given, self.pipeline.pool, first=first, last=turn.last)
        if not turn.last:
            return None
        ordered.settle()
        return ordered.total

    def hold(self, failure: Exception) -> None:
        """Raise an error at the end of the backward."""
        # torch would replace what a hook raises. The first one is the cause of the others.
        self._failure = self._failure or failure
        self.announce()

    def receive(self, name: str) -> Turn:
        """Note that a gradient of a sum has come.

        Raises:
            ZeroError: As `reduce`.
        """
        now = self._expect(name)
        self._received.add(name)
        self._of_step.add(name)
        self.arrive()
        return now

    def arrive(self, name: str | None = None) -> None:
        """A gradient has come, which is reduced later in this backward.

        Raises:
            ZeroError: As `reduce`, of the sum of this name.
        """
        if self._aside is not None:
            return
        if name is not None:
            self._expect(name)
        if self.phase.state is not State.BACKWARD:
            self.phase.move(Move.BEGIN)
        self.announce()

    def announce(self, *gradient: object) -> None:
        """Announce to autograd the end of the graph task under way; the first one is the outermost.

        To be called in a backward as early as possible: as a hook of the loss, or of what the model
        returns.
        """
        # There may be no gradient of a parameter, as in torch.autograd.grad: the phase stays.
        task = torch._C._current_graph_task_id()
        if gradient and self.not_twice and torch.is_grad_enabled():  # as by create_graph=True
            raise ZeroError(self.not_twice)
        if self.now is not None and self._aside is None and task not in self._tasks:
            self._tasks.append(task)
            is_outermost = len(self._tasks) == 1
            for start in self.starts if is_outermost else ():
                start()
            # They are called in the order in which they are announced: DDP announces its end, which
            # reads the buckets, behind the last gradient.
            torch.autograd.Variable._execution_engine.queue_callback(
                partial(self._settle, is_outermost)
            )

    def _sum_of(self, name: str, out: Tensor, now: Turn) -> OrderedSum:
        if now.first:
            # Where a step has one micro-step, the sum is made where it goes.
            total = out
            wide = SUMS[out.dtype]
            if not now.last or out.dtype != wide:
                kept = self._totals.get(name)
                if kept is None or kept.numel() != out.numel() or kept.dtype != wide:
                    kept = torch.empty_like(out, dtype=wide)
                total = self._totals[name] = kept
            ordered = self._sums.setdefault(name, OrderedSum(total, self.block))
            ordered.total, ordered.block = total, self.block
        return self._sums[name]

    def _settle(self, is_outermost: bool) -> None:
        """End the exchanges of a graph task; autograd calls it at the end."""
        self._complete(self.settles)
        if is_outermost:  # torch may have announced ends of its own meanwhile
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """End a backward."""
        self._tasks.clear()
        if self.phase.state is State.BACKWARD:
            self._complete(self.ends)
            self.pipeline.end()
            self.phase.move(Move.FINISH)

    def _complete(self, before: list[Callable[[], None]]) -> None:
        with self._guard():
            if (failure := self._failure) is not None:
                self._failure = None
                self._tasks.clear()
                self.see_failure()
                raise failure
            for each in before:
                each()
            self.pipeline.complete()

    def _require_gradients(self) -> dict[str, nn.Parameter]:
        return {name: each for name, each in self._parameters.items() if each.requires_grad}

    def drop_all(self) -> None:
        """Drop what parameters have of gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def _expect(self, name: str) -> Turn:
        turn = self.pipeline.turn
        if self.phase.state is State.READY:
            self.phase.check(Move.BEGIN)
        if name in self._received:
            raise ZeroError(
                f"{name} got a second gradient in micro-step {turn.micro_step}: call "
                "backward() once for each batch of run.loader, with the sum of its losses"
            )
        if not turn.first and name not in self._of_step:
            raise ZeroError(
                f"{name} got no gradient in the micro-steps before {turn.micro_step}: every "
                "micro-batch must use the same parameters; let the others contribute "
                "0 * parameter.sum() to the loss"
            )
        return turn
