"""A training loop of the script's own, protected: `protect` returns its `Run`.

Owns the position in a step. Must always hold: a batch of `run.loader` is one micro-batch; batches
are run in the order in which they are drawn, and a loop may draw ahead; optimizer, scheduler and
loss scaler act at the last micro-batch of a step and do nothing at the others, whoever calls them;
a step counts when the optimizer has acted.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from zero_checkpoint.training import Loading
from zero_comm.exchange.cpu.malloc import keep_freed_memory
from zero_comm.sums.reduction import Turn
from zero_comm.waiting import transport_failures
from zero_comm.worker.agent_link import exit_on_peer_loss
from zero_contract.errors import ZeroError
from zero_data.generators import generators_of_module
from zero_data.global_batch import MicroBatch, StepPlan, plan_step
from zero_data.ledger import Ledger, begin_ledger
from zero_data.position_loader import LoopCalls, Moment
from zero_data.token_weights import NOT_GIVEN, checked, nominal, none_of, taken_together
from zero_step.agree import Agreed, Agreement, clipped
from zero_step.checks.replicas import Replicas
from zero_step.checks.same_step import OptionsOfStep, SameStep
from zero_step.forward_writes import ForwardWrites
from zero_step.lane_states import exchange_sizes, lanes_of
from zero_step.phase import Move, State
from zero_step.session import NOTES, begin_micro_step, come_back, fill_in, outlived, see_forward
from zero_torch import hooks, settings
from zero_torch.checkpoints import Checkpoints
from zero_torch.checks import self_test
from zero_torch.checks.as_given import AsGiven
from zero_torch.gradient_norm import Norms, scale
from zero_torch.hooks.ddp import DEPTH
from zero_torch.loader import NOT_ITS_TURN, NOT_STEPPED, OTHER_THREAD, PASSED_OVER, in_order
from zero_torch.optimizers.held_calls import HELD, HeldCalls, Steps, take
from zero_torch.optimizers.supported import check_members
from zero_torch.ordered_gradients import CALLS, NOT_REDUCED, OrderedGradients
from zero_torch.training import Ordered
from zero_torch.wrapped import (
    HookOfOriginal,
    Wrapped,
    Wrapper,
    check_gradients,
    choose_sums,
    make_reduction,
)

_log = logging.getLogger(__name__)


class Run(Checkpoints):
    """One training, with its data and gradients in order.

    Attributes:
        loader: The script's loader, in order: iterate over it for the rest of the epoch.
    """

    _in_order = True

    def __init__(
        self,
        wrapped: Wrapped,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        *,
        microbatches: int,
        scheduler: Any,
        scaler: torch.amp.GradScaler | None,
        stateful: Mapping[str, Stateful],
        chosen: settings.Settings,
        facts: Mapping[str, Any],
        former: Run | None = None,
    ) -> None:
        """Attach to the model; `protect` checks the arguments, and calls `start`.

        The script keeps the position, the loader and the held calls that it has of a `former` run.
        """
        super().__init__(
            wrapped,
            optimizer,
            scheduler=scheduler,
            scaler=scaler,
            stateful=stateful,
            chosen=chosen,
            facts=facts,
            cursor=former._cursor if former is not None else None,
        )
        options = chosen.elastic
        self._hooks: list[RemovableHandle] = []
        """The hooks of the script's module and parameters."""
        self._sums = choose_sums(options, self._collectives)
        self._assignment = self._sums.assignment
        place = self._rank, self._assignment, options.seed
        begins = partial(exchange_sizes, self._collectives)
        self.loader = in_order(loader, microbatches, self._cursor, *place, begins)
        if former is not None:  # the script iterates over its loader
            vars(former.loader.order).update(vars(self.loader.order))
            self.loader = former.loader
        self._batch = self.loader.order.batch
        between = partial(self._between_steps, calls=False)
        self.loader.calls = LoopCalls(self._begin_iteration, self._draw, between)
        self._writes = self.writes = ForwardWrites(wrapped.module, self._collectives)
        self._gradients = OrderedGradients(
            self._phase,
            make_reduction(wrapped, self._collectives, self._link.interrupt, self._sums),
            wrapped.parameters(),
            self._sums.block,
            guard=partial(exit_on_peer_loss, self._link),
            depth=DEPTH if wrapped.wrapper is Wrapper.DDP else 1,
        )
        self._gradients.starts.append(partial(fill_in, self, True))
        self._gradients.changes.append(self._train_others)
        # Before those of the hooks, which count on what it checks.
        self._gradients.begins.append(AsGiven(wrapped, optimizer).begin)
        normed = self._gradients, self._collectives, wrapped.device
        self._norms = Norms(*normed, is_ready=self._norm_is_ready, guard=partial(outlived, self))
        self._watches, self._trains = False, True
        """Whether forwards are watched, and whether the model that is trained is in train()."""
        self._owed = False
        """Whether the script may still call the step() of the micro-step before."""
        self._count = NOT_GIVEN
        """The tokens of the backward under way."""
        self._counted = 0
        """The tokens of the step, on all ranks."""
        self._skipped = False
        """Whether the last step left the weights as they were, since gradients were not finite."""
        self._steps = Steps(
            is_over=self._is_over,
            ends_now=self._ends_now,
            may_act=self._may_act,
            has_acted=self._has_acted,
            count=self._count_step,
        )
        held = optimizer, scheduler, scaler, stateful.values()
        self._held: HeldCalls = former._held if former else HeldCalls(*held)
        self._options = OptionsOfStep(optimizer)
        replicas = Replicas(wrapped.parameters(), self._collectives, whole=wrapped.is_whole)
        self._same = SameStep(optimizer, replicas, self._collectives)
        given = options.sample_ledger, self._link.round, self._collectives.everybodys
        self._ledger = begin_ledger(*given, rank=self._rank, world=self._world)

    def start(self) -> None:
        """See `Checkpoints.start`."""
        self._training.ordered = Ordered(
            gradients=self._gradients,
            batch=self._batch,
            feed=self.loader,
            sums=self._sums,
            chosen=self._chosen.elastic,
        )
        called, guard = self._wrapped.called, partial(exit_on_peer_loss, self._link)
        if called._compiled_call_impl is None:  # else the hooks would be compiled
            begin = HookOfOriginal(self._writes.begin_forward)
            self._hooks.append(called.register_forward_pre_hook(begin, prepend=True))
            self._hooks.append(called.register_forward_hook(HookOfOriginal(self._end_forward)))
        self._hooks += hooks.attach(self._wrapped, self._gradients, self._collectives, guard)
        self._gradients.ends.append(self._end_backward)  # the last one: behind all gradients
        self.loader.of_loop = generators_of_module(self._wrapped.module, lanes_of(self.loader))
        self_test.attach(
            self._wrapped, self._training, self._gradients, self.loader.of_loop, self._link
        )
        self.loader.is_alone = self._link.is_alone
        self._held.hold(self._steps)
        take(self._wrapped.model)
        if self._wrapped.device.type == "cpu":
            keep_freed_memory()

    def detach(self) -> None:
        """Leave a model under DDP and what else the script has to a run in this one's place."""
        for hook in self._hooks:
            hook.remove()
        self._gradients.drop_all()
        self._norms.end()
        self._held.drop()
        if self._ledger is not None:
            self._ledger.close()

    def _end_forward(self, module: nn.Module, _: object, output: object) -> None:
        """Prepare for a backward that the script calls itself; notice one that has failed."""
        see_forward(self, module)
        self._writes.check_parameters()
        # In a backward this is the forward of a recomputation, and that backward has not failed.
        if torch._C._current_graph_task_id() == -1:
            self._refuse_failed()
        for each in tree_leaves(output) if self._gradients.now is not None else ():
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(self._gradients.announce)

    def _refuse_failed(self) -> None:
        """Raise if a backward has failed: another one would add to its gradients."""
        if self._phase.state is State.BACKWARD:
            self._gradients.see_failure()
            self._phase.check(Move.PASS)

    def _train_others(self) -> None:
        """Layers were frozen or unfrozen since the last step."""
        check_members(self._optimizer, self._gradients.trained)
        check_gradients(self._wrapped, self._world)
        if self.staying is not None:
            self.staying.forbid("layers were frozen or unfrozen")

    def _take_notes(self, everybodys: Tensor) -> float:
        """Take the notes of all ranks; returns the factor that they give the gradients."""
        factor = 1.0
        if self._everybodys is None:
            # Once in a step: a further clip finds the gradients weighed.
            plan, count = self._plan(), len(self._tokens)
            if (lanes := lanes_of(self.loader)) is not None:
                lanes.hear(everybodys[:, NOTES : -2 * count].tolist())
            of_step = everybodys[:, -2 * count :], plan, self._assignment
            factor, self._counted, self._mean_loss = taken_together(*of_step)
        self._everybodys = everybodys
        return factor

    def _agree(self, agreement: Agreement, parts: Sequence[Tensor], **clip: float) -> Agreed:
        notes = self._collectives.numbers(self._notes().tolist(), agreement.device)
        return self._same.agree(agreement, parts, notes, **clip)

    # ---- a step ----

    @property
    def samples(self) -> int:
        """Samples consumed by the steps done."""
        return self._cursor.samples

    @property
    def tokens(self) -> int:
        """Tokens of the steps done, as they were given to `backward`."""
        return self._cursor.tokens

    @property
    def last(self) -> bool:
        """Whether the micro-batch under way is the last one of its step on this rank."""
        return self._now().last

    def backward(self, loss: Tensor, *, tokens: int | Tensor | None = None) -> None:
        """Compute the gradients of this micro-batch's mean loss, with its share of the step.

        Args:
            loss: A scalar.
            tokens: The number of tokens in the mean. If it is given in every micro-batch of a step,
                each token of it has the same weight; otherwise each sample has.

        Raises:
            ZeroError: There is no micro-batch, or this is its second backward.
        """
        self._advance()
        self._now()
        self._refuse_failed()
        pipeline = self._gradients.pipeline
        if self.lost is not None:
            return
        before, pipeline.weight = pipeline.weight, 1.0  # for the loss has it
        weight, self._count = before, NOT_GIVEN
        if tokens is not None:
            self._count = checked(tokens)
            weight = self._count / nominal(self._plan())
        loss = (loss if loss.dtype == torch.float64 else loss.float()) * weight
        # Read at the step's end: a device is busy. torch takes a loss of one element in any shape.
        self._losses[self._cursor.micro] = loss.detach().squeeze()
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if loss.requires_grad:  # else backward() raises why not
            loss.register_hook(self._gradients.announce)
        try:
            with outlived(self), transport_failures("the backward", of_script=True):
                loss.backward()
        finally:
            pipeline.weight, self._count = before, NOT_GIVEN
        if self.lost is None:
            self._phase.check(Move.PASS)

    def step(self, max_norm: float | None = None) -> bool:
        """End the micro-batch; at the last one of the step, step optimizer and scheduler.

        Args:
            max_norm: The largest norm of all gradients; they are scaled down to it.

        Returns:
            Whether this was the last micro-batch of a step.
        """
        if self.lost is not None or not self._belongs_to_this():
            return False
        last = self._now().last
        with outlived(self):
            if last:
                self._act(max_norm)
            self._end_micro_step()
        return last and self.lost is None  # one that has lost a peer had no effect

    def _act(self, max_norm: float | None) -> None:
        if max_norm is not None:
            self.clip_grad_norm_(max_norm)
        if self.scaler is not None:
            self.scaler.step(self._optimizer)
            self.scaler.update()
        else:
            self._optimizer.step()
        if self._held.steps_scheduler and not self._skipped:
            try:
                self.scheduler.step()
            except BaseException:  # the weights have stepped, and their rates have not
                self._phase.move(Move.FAIL)
                raise

    def clip_grad_norm_(self, max_norm: float) -> float | None:
        """Scale all gradients down to a norm, in the place of torch.nn.utils.clip_grad_norm_.

        Returns:
            The norm before; None if this is not the last micro-batch of the step.
        """
        if not self._ends_now():
            return None
        if self.scaler is not None and not self._held.unscaled:
            self.scaler.unscale_(self._optimizer)
        trained = self._gradients.trained.values()
        gradients = [p.grad for p in trained if p.grad is not None]
        if len(gradients) < len(trained):
            raise ZeroError("a parameter has no gradient; clip them between backward and step")
        self.grad_norm = None  # what it is if a peer is lost
        with outlived(self):
            norm = self._norms.of(self._gradients.trained)
            # It carries the notes as well: the end of the step needs no other exchange.
            agreed = self._agree(norm.agreement, norm.parts(gradients), max_norm=float(max_norm))
            if not math.isfinite(agreed.norm):
                name, step = norm.first_not_finite(), self._cursor.step + 1
                if self._rank == 0:
                    _log.warning("step %d: gradient norm %s, first in %s", step, agreed.norm, name)
            factor = self._take_notes(agreed.notes)
            self.grad_norm, factor = clipped(agreed.norm, factor, max_norm)
            scale(self._gradients.trained, factor)
        return self.grad_norm

    def ledger(self) -> Ledger | None:
        """This rank's record of consumed samples; None without elastic.sample_ledger.

        `zero_data.read_ledger` reads the records of all ranks, and `zero_data.verify` checks them.
        """
        return self._ledger

    def close(self) -> None:
        """Finish a save in the background, and leave the agent; before destroy_process_group."""
        if self._phase.state is State.RUN and self._now().last and self._rank == 0:
            _log.warning("%s", NOT_STEPPED)
        with closing(self._ledger) if self._ledger is not None else nullcontext():
            super().close()

    def load(
        self,
        directory: str | os.PathLike[str],
        tag: str | float | None = None,
        loading: Loading | None = None,
    ) -> str | None:
        """See `zero_step.Session.load`.

        Inside of a loop, a step that is not ended is dropped, and the loop goes on from the loaded
        position; one that draws ahead must be left.
        """
        cursor = self._cursor
        if not self._between_steps():
            self._drop_step()
            cursor.move(step=cursor.step, samples=cursor.samples)
        moves = cursor.moves
        path = super().load(directory, tag, loading)
        if cursor.moves != moves:  # the batch that waits is of the position before
            self._drop_step()
        return path

    def _drop_step(self) -> None:
        self._gradients.drop()
        self._writes.drop(0)
        self._losses.clear()
        self._tokens.clear()
        self._everybodys, self._owed = None, False
        self._held.drop()
        if self._ledger is not None:
            self._ledger.forget()

    def _between_steps(self, *, calls: bool = True) -> bool:
        come_back(self, calls=calls)
        if self._phase.begun:
            if not self._has_acted():
                return False
            self._end_micro_step()
        come_back(self, calls=calls)
        return not self._cursor.micro

    def _leave_step(self, what: str) -> None:
        if not self._between_steps():
            raise ZeroError(
                f"{what} in the middle of a step: its gradients cannot be saved; call it after "
                "the step() of the last micro-batch, which returns True"
            )

    # ---- micro-steps ----

    def _now(self) -> Turn:
        if self._gradients.now is None:
            raise ZeroError(CALLS.batch)
        return self._gradients.now

    def _belongs_to_this(self) -> bool:
        """Whether a call of the script belongs to this micro-step; raises if none has run."""
        now = self._now()
        if self._phase.has_run:
            if not now.last and self._phase.state is State.RUN:
                self._phase.move(Move.STEP)
            return True
        # A batch was drawn between the backward of the one before and this call, and it was not the
        # last of its step.
        if not self._owed:
            self._phase.check(Move.STEP)
        self._owed = False
        return False

    def _plan(self) -> StepPlan:
        order = self.loader.order
        return plan_step(self._cursor.samples, self._batch, order.epoch_size, order.sizes())

    def _begin_iteration(self) -> None:
        """Begin an iteration: what the one before has drawn and not run comes again."""
        come_back(self)
        if self._phase.begun:
            self._end_micro_step()
        come_back(self)
        self._phase.move(Move.DROP)
        self._writes.drop(self._cursor.micro)
        self._owed = False

    def _draw(self) -> None:
        """A batch was drawn: the micro-step before has ended, or the batch waits for its end."""
        batches, moves = self.loader, self._cursor.moves
        if batches.elsewhere:
            raise ZeroError(OTHER_THREAD)
        come_back(self)  # after the loss of a peer the step is not ended
        if self._cursor.moves != moves:
            return
        if batches.draws.passed_over is not None:
            raise ZeroError(PASSED_OVER)
        if self._phase.begun and (not self._gradients.pipeline.turn.last or self._has_acted()):
            self._owed = self._phase.state is State.RUN
            self._end_micro_step()
        come_back(self)
        if self._cursor.moves != moves:  # in another round
            return
        if self._gradients.now is None:
            self._begin_micro_step()
        if batches.draws.waiting > 1 or self._phase.begun:
            self._watch()

    def _watch(self) -> None:
        """From now on the next micro-step begins with its forward, if not with a draw."""
        if not self._watches:
            self._watches = True  # before FSDP2 gathers: a step may end here
            if self.staying is not None:
                self.staying.forbid("the loop draws batches ahead")
            begin = HookOfOriginal(self._before_forward)
            self._wrapped.called.register_forward_pre_hook(begin, prepend=True)

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if module.training == self._trains and torch.is_grad_enabled():
            self._advance()

    def _advance(self) -> None:
        """Begin the micro-step of a batch that was drawn ahead, if the one before has run."""
        gradients = self._gradients
        if not self.loader.draws.waiting:
            return
        if self._phase.begun:
            self._end_micro_step()
        come_back(self)
        if gradients.now is None:
            self._begin_micro_step()

    def _of_loader(self) -> list[int]:
        return lanes.notes() if (lanes := lanes_of(self.loader)) is not None else []

    def _microbatch(self) -> MicroBatch:
        return self._plan().assigned(self._assignment, self._cursor.micro, self._rank)

    def _begin_micro_step(self) -> None:
        plan, micro, world = self._plan(), self._cursor.micro, self._world
        if micro == 0:
            self._optimizer.zero_grad()
        elif change := self._options.change():
            raise ZeroError(change + HELD)
        begin_micro_step(self)
        self._writes.begin_micro_step(plan.first_place(self._assignment))
        self._gradients.begin(
            Turn(
                live=plan.live(micro, world),
                first=micro == 0,
                last=micro == plan.micro_steps(world) - 1,
                plan=self._sums.plan(plan.microbatches),
                micro_step=micro,
                silent=not self._microbatch().size,
                accumulates=self._sums.by_backend,
            ),
            plan.weight(self._microbatch()),
        )

    def _end_backward(self) -> None:
        """The gradients of this micro-step are there: it has run the oldest batch."""
        if not self._gradients.has_received:
            raise ZeroError(NOT_REDUCED)
        fill_in(self, False)
        self._owed, self._trains = False, self._wrapped.called.training
        ticket, microbatch = self.loader.run(), self._microbatch()
        self._tokens.append(self._count if microbatch.size else none_of(self._count))
        self._note_loss(microbatch)
        if ticket is None or ticket.start != self._cursor.samples + microbatch.start:
            raise ZeroError(NOT_ITS_TURN)
        self._writes.end_micro_step()
        if self._cursor.micro == 0:
            self._options.begin()
        if self._ledger is not None and not microbatch.padding:
            self._ledger.consume(microbatch.index, ticket.ids, ticket.documents)
        if self._gradients.pipeline.turn.last:
            self.loader.seed_step(Moment.GRADIENTS)

    def _end_micro_step(self) -> None:
        """End the micro-step; an error if it was the last of its step, and nothing acted."""
        self._gradients.end()
        if self._gradients.pipeline.turn.last:
            self._end_step()
        else:
            self._cursor.micro += 1

    # ---- what held calls ask, see `Steps` ----

    def _is_over(self) -> bool | None:
        if self.lost is not None:
            return None
        now = self._gradients.now  # None after run.step(), which ends the micro-step
        return now.last if now is not None and self._phase.begun else not self._cursor.micro

    def _has_acted(self) -> bool:
        return self._phase.state is State.STEPPED and self._gradients.pipeline.turn.last

    def _ends_now(self) -> bool:
        return self.lost is None and self._belongs_to_this() and self._now().last

    def _norm_is_ready(self, sharded: bool) -> bool:
        """See `Norms`."""
        if self._phase.state not in (State.RUN, State.SHARED):
            return False
        weighs = none_of(self._tokens[-1]) == 0  # tokens are given in all micro-batches, or in none
        return self._weigh() if sharded or weighs else True

    def _weigh(self) -> bool:
        """Whether the step ends now; then its tokens are weighed. Collective."""
        if not self._ends_now():
            return False
        self._phase.check(Move.STEP)
        if self._everybodys is None:  # else a clip has weighed them
            with outlived(self):
                notes = self._agree(self._agreement, []).notes
                scale(self._gradients.trained, self._take_notes(notes))
        return self.lost is None

    def _may_act(self) -> bool:
        if not self._weigh():
            return False
        self._training.take_back()
        self.loader.seed_step(Moment.OPTIMIZER)
        return True

    def _count_step(self, skipped: bool) -> None:
        plan, cursor = self._plan(), self._cursor
        assert self._everybodys is not None  # `_may_act` has weighed the tokens
        with exit_on_peer_loss(self._link):  # before the step counts: it has all of its state
            self._writes.end_step(self._everybodys[:, NOTES - 1].tolist())
        self._skipped, self._held.unscaled = skipped, False
        self._same.stepped()
        cursor.step += 1
        cursor.samples += plan.samples
        cursor.tokens += self._counted
        cursor.skipped += skipped
        cursor.micro = 0
        self.loader.seed_step()
        if self._ledger is not None:
            self._ledger.end_step(cursor.step)
        self._phase.move(Move.STEP)  # last: what is interrupted before it cannot be saved
