"""The micro-steps of one step: weights a loss, runs its backward, records what it consumed.

Owns the weighted losses and the numbers of tokens of a step, and its order of calls, of which
`zero_step.phase` says what is legal. A micro-step has one batch, of which there may be several
losses, each with its backward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Variable

from zero_comm.sums.plan import Where
from zero_comm.sums.reduction import Turn
from zero_contract.errors import ZeroError
from zero_data.draws import Ticket
from zero_data.elastic_loader import PAST_THE_EPOCH
from zero_data.global_batch import BatchShape, StepPlan, mix
from zero_data.token_weights import (
    BY_SCRIPT,
    NOT_GIVEN,
    checked,
    correction,
    nominal,
    none_of,
    taken_together,
    unread,
)
from zero_engine.memory_check import check_memory
from zero_engine.parts import Core, Run
from zero_engine.sharding.grad_reducer import CALLS
from zero_step.checks.same_step import OptionsOfStep
from zero_step.phase import Move, Phase, State

_log = logging.getLogger(__name__)
_OPTIONS = "changed options"
_BY_STEP = (
    "give a scheduler to initialize(lr_scheduler=...), which steps it once in a step, and change "
    "options where engine.global_steps has grown"
)

Loss = Tensor | tuple[Tensor, int | Tensor]
"""A mean, or a sum and the number of its tokens."""
Count = float | Tensor
"""A number of tokens, or NOT_GIVEN, or BY_SCRIPT; a tensor if the host does not know it yet."""


@dataclass(frozen=True, slots=True, eq=False)
class Weighted:
    """A loss, ready for its backward."""

    share: Tensor
    """The loss times its share of the global batch."""
    scaled: Tensor
    """That times the loss scale, and the ranks if gradients are sums; it is differentiated."""
    tokens: Count
    """The number of its tokens."""


class EndsBy(StrEnum):
    """What ends a micro-step whose backward has run."""

    STEP = "step"
    """The script's call of `step()`."""
    NO_SYNC = "no_sync"
    """The end of its backward; the script accumulates by itself."""
    COALESCE = "coalesce"
    """The end of its backward; but the last one of a step, by `step()`."""


class MicroSteps:
    """The micro-steps of one engine."""

    def __init__(self, core: Core, run: Run) -> None:
        self.ended = 0
        """Micro-steps that this process has run."""
        self.applied = False
        """Whether the current or the last micro-step has changed the weights."""
        self.ends_by = EndsBy.STEP
        self.on_plain: Callable[[bool], None] = lambda runs: None
        """Told where a backward that the script runs begins and ends: what is raised within it, the
        script would see."""
        self.behind_last: Callable[[], None] = lambda: None
        """Called behind the last backward of a step."""
        self.declared_boundary: bool | None = None
        """Whether the script has declared the coming micro-steps to end a step; None: neither."""
        self._phase = core.reducer.phase if core.reducer is not None else Phase(CALLS)
        self._core = core
        self._run = run
        self._losses: list[Tensor] = []
        self._tokens: list[Count] = []
        self._drawn: Ticket | None = None
        """The last batch that was drawn when the current micro-step began."""
        self.begun: tuple[int, ...] | None = None
        """The micro-step whose forwards have begun random numbers; None: there is none."""
        self._began: list[tuple[bytes, int]] = [(b"", 0)]
        """How the last few began: the state of those of torch that was found, and the seed."""
        self._options = OptionsOfStep(core.zero.optimizer) if core.zero is not None else None
        self._checked: tuple[BatchShape, int] | None = None
        self._told: set[str] = set()
        """What need not be told again."""

    def _tells(self, what: str) -> bool:
        """Whether to tell something, which is not told twice."""
        is_new = what not in self._told
        self._told.add(what)
        return is_new

    # ---- forward ----

    def begin_forward(self) -> int | None:
        """The seed of a forward; None: its random numbers go on from where they are."""
        found = bytes(torch.get_rng_state().numpy())
        inside = torch._C._current_graph_task_id() != -1
        if not inside and self._core.reducer is not None:
            self._core.reducer.discard_failed()  # what failed is tried again, with its numbers
        # Activation checkpointing runs one again in a backward, and puts back what it has found.
        if inside or self.begun == self._now():
            return dict(self._began).get(found)
        # Behind a backward there may be the numbers of the step (`behind_last`), by world size.
        place = self._run.place()
        seed = mix(self._core.layout.config.seed, *place, *[1] * self._has_loss)
        if seed != self._began[-1][1]:  # else what is found may be where the first one has come to
            self._began = [*self._began[-7:], (found, seed)]
        self.begun = None
        return seed

    def end_forward(self) -> None:
        """Note that a forward has not failed."""
        self.begun = self.begun or self._now()

    def _now(self) -> tuple[int, ...]:
        cursor, reducer = self._run.cursor, self._core.reducer
        failed = reducer.failed if reducer is not None else 0
        return cursor.moves, cursor.step, cursor.micro, self._run.drawn, self._has_loss, failed

    # ---- before backward ----

    def weigh(
        self, loss: Loss, tokens: int | Tensor | None = None, *, by_share: bool = True
    ) -> Weighted:
        """The loss weighted and scaled; see `Engine.backward`.

        `by_share`: weight a loss without tokens by its samples; otherwise the script has divided it
        by its micro-steps.

        Raises:
            ZeroError: The loss cannot be differentiated, or there is no step to do so in.
        """
        zero = self._core.zero
        if zero is None:
            raise ZeroError("backward(): nothing is trained; give initialize() an optimizer")
        if self.ends_by is EndsBy.NO_SYNC and self.at_boundary:
            self._go_beyond_the_batch()
        value, tokens = loss if isinstance(loss, tuple) else (loss, tokens)
        if value.numel() != 1 or not value.requires_grad:
            raise ZeroError(
                f"backward(): the loss has shape {tuple(value.shape)} and requires_grad is "
                f"{value.requires_grad}; give one number that depends on trained parameters"
            )
        run = self._run
        count: Count
        weight: Count
        if tokens is not None:
            # A number on the device of the loss is not read here: the host would wait for it.
            if isinstance(tokens, Tensor) and tokens.device == value.device:
                count = unread(tokens)
            else:
                count = checked(tokens)
            weight = (1.0 if isinstance(loss, tuple) else count) / nominal(run.plan())
        elif by_share:
            count, weight = NOT_GIVEN, self._share()
        else:  # the script has averaged over its micro-steps; here over the ranks
            count = BY_SCRIPT
            weight = run.microbatch().size / (run.batch.micro_batch * run.world)
        # In fp32 if it is scaled: a scale of 2**16 is more than fp16 can hold. Where gradients are
        # sums over ranks, each share counts as many times as there were ranks at the beginning.
        scale = zero.scale * (run.summed_over or 1)
        wide = value if scale == 1 else value.float()
        share = _times(wide, weight)
        return Weighted(share, share if scale == 1 else share * scale, count)

    def _share(self) -> float:
        """The weight of the mean of this micro-batch's samples."""
        return self._run.plan().weight(self._run.microbatch())

    # ---- backward ----

    def backward(self, loss: Weighted, *, retain_graph: bool) -> None:
        """Run the whole backward of a micro-step."""
        self._begin(loss.tokens)
        assert self._core.reducer is not None
        if loss.scaled.requires_grad:  # else backward() raises why not
            loss.scaled.register_hook(self._core.reducer.note_graph_task)
        loss.scaled.backward(retain_graph=retain_graph)
        self._finish(loss)

    def await_plain_backward(self, loss: Weighted) -> Tensor:
        """The tensor whose `.backward()`, called by the script, is that of the micro-step."""
        loss.scaled.register_hook(partial(self._on_plain_backward, loss))
        return loss.scaled

    def _on_plain_backward(self, loss: Weighted, gradient: Tensor) -> None:
        """The hook of the loss, the first that a plain backward of the script calls."""
        self.on_plain(True)
        self._begin(loss.tokens)
        assert self._core.reducer is not None
        self._core.reducer.note_graph_task(gradient)
        Variable._execution_engine.queue_callback(partial(self._finish, loss))

    def begin_unweighted(self) -> None:
        """Begin the micro-step of a plain backward: its gradients are weighted, not its loss."""
        run = self._run
        self.on_plain(True)
        if self.ends_by is EndsBy.NO_SYNC and self.at_boundary:
            self._go_beyond_the_batch()
        weight = self._share()
        self._begin(NOT_GIVEN, weight=weight * (run.summed_over or 1))

    def finish_unweighted(self, loss: Tensor | None, *, shared: bool) -> None:
        """End the backward of it; `shared`: it has left gradients in other engines as well."""
        if loss is None:
            if self._tells("an unseen loss") and self._run.rank == 0:
                _log.info(
                    "loss.backward(): the engine does not see this loss, so mean_loss and its "
                    "curve are nan; call engine.backward(loss) to have them, or return the loss "
                    "from forward"
                )
            loss = torch.full((), float("nan"), device=self._core.device)
        share = loss * self._share()
        self._finish(Weighted(share, share, NOT_GIVEN), shared=shared)

    def take_written(self) -> None:
        """Run the micro-step of gradients that the script has written to its parameters by hand.

        Raises:
            ZeroError: A backward has made the gradients of this micro-step.
        """
        reducer = self._core.reducer
        written = reducer.written() if reducer is not None else []
        if reducer is None or not written or self._phase.state in (State.BACKWARD, State.FAILED):
            return
        if self._phase.state in (State.RUN, State.SHARED):
            raise ZeroError(
                f"step(): the script has written to .grad of {written[0]}, and the gradients of "
                "this micro-step are those of a backward; read and replace these with "
                "zero_deepspeed.utils.safe_get_full_grad and safe_set_full_grad"
            )
        self.begin_unweighted()
        reducer.take_written()
        self.finish_unweighted(None, shared=False)

    def drop(self) -> None:
        """Drop the gradients of the step so far: `zero_grad()` of the engine.

        Batches of the engine's loader stay counted: they add nothing. With batches of the script it
        is as if there had been no backward since the last `step()`.

        Raises:
            ZeroError: Other ranks hold parts of the sums.
        """
        core, run = self._core, self._run
        if core.zero is None or not core.zero.accumulating:
            return
        assert core.reducer is not None
        if core.reducer.withholds:
            raise ZeroError(
                f'zero_grad() in the middle of a step with elastic.accumulate "'
                f'{run.accumulation.where}", which adds gradients before they are sent; use "owner"'
            )
        for each in core.zero.sums:
            each.drop()
        # Zeros and no shorter list: every rank exchanges one loss for each micro-step of a step.
        self._losses = [torch.zeros_like(loss) for loss in self._losses]
        if run.loader is not None:
            if self._phase.has_run:
                self._phase.move(Move.KEEP)
            return
        if self._has_loss:
            self._losses.pop()
            self._tokens.pop()
        if not run.managed:
            run.cursor.micro = 0
            self._losses.clear()
            self._tokens.clear()
        if not run.cursor.micro or self._phase.has_run:
            self._phase.move(Move.DROP)
            self.begun = None
            core.writes.drop(run.cursor.micro)
        core.zero.accumulating = bool(self._losses)

    @property
    def _has_loss(self) -> bool:
        """Whether a backward of the current micro-step has ended."""
        return len(self._losses) > self._run.cursor.micro

    def _begin(self, tokens: Count, weight: float = 1.0) -> None:
        core, run, phase = self._core, self._run, self._phase
        assert core.reducer is not None
        core.reducer.discard_failed()  # a script may have caught the error of the one before
        # A backward after one that has run, without a step() between, is a further loss.
        draw = Move.AGAIN if phase.state is State.RUN else Move.DRAW
        phase.check(draw)
        if draw is Move.AGAIN:
            self._check_further_loss(tokens)
        # A boundary that the script has declared must be that of the batch.
        if self.declared_boundary not in (None, self.at_boundary):
            number, of = self._run.cursor.micro + 1, self._run.plan().micro_steps(self._run.world)
            raise ZeroError(
                f"set_gradient_accumulation_boundary({self.declared_boundary}), but micro-step "
                f"{number} of {of} is {'' if self.at_boundary else 'not '}the last: the global "
                "batch is fixed; change gradient_accumulation_steps or call set_train_batch_size()"
            )
        live = run.plan().live(run.cursor.micro, run.world)
        if live < 1:
            raise ZeroError(f"backward(): {PAST_THE_EPOCH}")
        # Not in initialize(): where sums wait depends on who loads the batches, and a script may
        # call batch_sampler() after it.
        self._check_memory()
        self._warn_of_options()
        self.applied = False
        core.coordinator.begin_backward()
        turn = Turn(
            live=live,
            first=run.cursor.micro == 0 and draw is Move.DRAW,
            last=self.at_boundary,
            plan=run.reduction_plan(),
            micro_step=run.cursor.micro,
            silent=not run.microbatch().size,
            accumulates=run.managed and run.accumulation.by_backend,
        )
        phase.move(draw)
        core.reducer.begin(turn, weight=weight)

    def _warn_of_options(self) -> None:
        """Warn once of options of the optimizer that change for every micro-batch."""
        assert self._options is not None
        if not self._run.managed or _OPTIONS in self._told:  # the script decides what a step is
            return
        if self._run.cursor.micro == 0:
            self._options.begin()
        elif (change := self._options.change()) and self._tells(_OPTIONS) and self._run.rank == 0:
            _log.warning("%s%s", change, _BY_STEP)

    def _check_memory(self) -> None:
        """Check that the sums of a step fit, if it is the first of its kind. Collective."""
        assert self._core.zero is not None
        block = self._core.zero.reduction_block
        if (self._run.batch, block) != self._checked:
            with self._core.guard():
                check_memory(self._core, self._run)
            told = self._run.acting(block).spread
            if told and self._tells(f"blocks of {block}") and self._run.rank == 0:
                _log.warning("%s", told)
            self._checked = self._run.batch, block

    def _finish(self, loss: Weighted, *, shared: bool = False) -> None:
        core = self._core
        assert core.reducer is not None
        assert core.zero is not None
        with core.guard():
            # First the gathers that other ranks wait for: their gradients depend on them.
            core.coordinator.end_gathers()
            core.reducer.finish()
        self.on_plain(False)
        core.coordinator.end_backward()
        core.zero.accumulating = True
        # A loss may have the shape [1]; the numbers of a step are exchanged as one tensor.
        share, tokens = loss.share.detach().float().reshape(()), loss.tokens
        if not self._run.microbatch().size:  # a lane that has ended: this counts for nothing
            share, tokens = torch.zeros_like(share), none_of(tokens)
        if shared:
            self._phase.move(Move.SHARE)
        if self._has_loss:  # this is a further one
            self._losses[-1] = self._losses[-1] + share
            return
        self._losses.append(share)
        self._tokens.append(tokens)
        self._record_samples()
        # Whether the script calls `step()` for this micro-step, which then ends it.
        coalesced = self.ends_by is EndsBy.COALESCE and self.at_boundary
        awaits_step = self._run.managed and (self.ends_by is EndsBy.STEP or coalesced)
        if awaits_step and self.at_boundary:
            self.behind_last()
        if not shared and not awaits_step:
            self.end()

    def _record_samples(self) -> None:
        """Write the samples of this micro-step into the ledger; warn of a wrong order."""
        run = self._run
        if run.loader is None and self._tells("batches of the script") and run.rank == 0:
            if not run.declared:  # the loop of a library skips what was trained on
                _log.warning(
                    "the batches come from your own DataLoader, and no checkpoint knows which "
                    "samples have been trained on: unless the script skips them, a run that "
                    "resumes begins its data again, and with another number of ranks in another "
                    "order; for each sample exactly once give initialize() the training_data, or "
                    "your DataLoader batch_sampler=engine.batch_sampler(dataset)"
                )
            if run.accumulation.where is not Where.OWNER and not run.withholds:
                _log.warning(
                    'elastic.accumulate: "%s" acts as "owner", because the engine does not choose '
                    "the samples of each rank",
                    run.accumulation.where,
                )
        # The oldest batch that waits: a loop may have drawn ahead.
        ticket = run.loader.run() or run.loader.last if run.loader is not None else None
        self._drawn = run.loader.last if run.loader is not None else None
        microbatch = run.microbatch()
        begin = run.plan().position + microbatch.start
        if ticket is not None and ticket.start != begin and self._tells("a wrong order"):
            _log.warning(
                "this batch begins at sample %d of the run, but the batches before it have come to "
                "sample %d: samples are trained on twice or not at all; call backward()%s once for "
                "each batch of the loader",
                ticket.start,
                begin,
                " and step()" if run.managed else "",
            )
        if run.ledger is not None and not microbatch.padding:
            if ticket is None:
                raise ZeroError(
                    "elastic.sample_ledger: the samples of this batch are not known; give "
                    "initialize() the training_data, or your DataLoader engine.batch_sampler()"
                )
            run.ledger.consume(microbatch.index, ticket.ids, ticket.documents)

    def end_if_awaited(self) -> None:
        """End a micro-step that is not the last of its step, if it has not ended by itself."""
        if self._phase.has_run:
            self.end()

    def end(self) -> None:
        """End a micro-step that is not the last of its step."""
        self._phase.move(Move.PASS)
        self._core.writes.end_micro_step()
        self.ended += 1
        self._run.cursor.micro += 1

    def begin_again(self) -> None:
        """Go back to the begin of the step that is not ended, as a load does."""
        self._phase.move(Move.LOAD)
        self._core.writes.drop(0)
        self._losses.clear()
        self._tokens.clear()
        cursor, zero = self._run.cursor, self._core.zero
        if zero is not None:
            zero.accumulating = False
        if self._run.ledger is not None:
            self._run.ledger.forget()
        cursor.move(step=cursor.step, samples=cursor.samples)

    def _check_further_loss(self, tokens: Count) -> None:
        """Refuse a backward before the step() of the last one, unless of the same micro-batch."""
        loader, where = self._run.loader, self._run.accumulation.where
        if self._run.reduction_plan() is not None:
            raise ZeroError(
                f'backward() twice before step() with elastic.accumulate "{where}", which adds one '
                "gradient of each micro-batch; add the losses and call backward() once, or use "
                '"owner"'
            )
        if loader is not None and loader.last != self._drawn:
            raise ZeroError(
                "backward() of another batch before the step() of the last one; call engine.step() "
                "after each batch: it updates the weights only when the global batch is complete"
            )
        if tokens != self._tokens[-1]:
            raise ZeroError(
                "backward() twice before step(), with another number of tokens or another "
                "scale_wrt_gas; give the same to every loss of a micro-batch"
            )
        if loader is None and self._tells("further losses") and self._run.rank == 0:
            _log.warning(
                "backward() more than once before step(): the gradients are added, as in "
                "DeepSpeed, and count as those of one micro-batch; if they are of several, call "
                "engine.step() after each"
            )

    # ---- where steps end ----

    def is_begun(self) -> bool:
        """Whether a step has begun, and has not ended; not to be called within a backward."""
        if self._core.reducer is not None:
            self._core.reducer.discard_failed()
        return self._run.cursor.micro > 0 or self._phase.state is not State.READY

    def check_step(self) -> None:
        """Check that there is a backward that `step()` could follow.

        Raises:
            ZeroError: There is none, or it has failed.
        """
        if not self.is_begun() or self._run.managed or self._phase.state is State.FAILED:
            self._phase.check(Move.STEP)
        else:  # the script decides what a step is
            self.end_if_awaited()

    def ends_step(self) -> bool:
        """Whether a `step()` now ends the step, not only its micro-step."""
        return self.at_boundary if self._run.managed else self.declared_boundary is not False

    @property
    def at_boundary(self) -> bool:
        """Whether the current micro-step is the last of its step; False if that is open."""
        if not self._run.managed:
            return bool(self.declared_boundary)
        return self._run.cursor.micro + 1 == self._run.plan().micro_steps(self._run.world)

    def let_script_decide(self) -> None:
        """From now on the script decides where a step ends, whatever the batch says."""
        self.end_if_awaited()
        self._run.managed, self._run.declared = False, True

    @contextmanager
    def ending_by(self, what: EndsBy) -> Iterator[None]:
        """A context of micro-steps that end otherwise."""
        before, self.ends_by = self.ends_by, what
        try:
            yield
        finally:
            self.ends_by = before

    def _go_beyond_the_batch(self) -> None:
        """Accept a backward in `no_sync` beyond the batch: the script accumulates by itself."""
        run, micro_steps = self._run, self._run.plan().micro_steps(self._run.world)
        where = run.accumulation.where
        if run.withholds:
            raise ZeroError(
                "no_sync() around the last micro-step of the batch with elastic.accumulate "
                f'"{where}", which adds up the micro-batches of a step whose end is known; set '
                "gradient_accumulation_steps (or train_batch_size) to what you accumulate, or use "
                '"owner"'
            )
        if run.loader is not None and not run.loader.order.leave_steps_to_script():
            raise ZeroError(
                f"no_sync() around micro-step {micro_steps} of {micro_steps}, which ends the step, "
                f"and these {type(run.loader).__name__} batches are handed out a step at a time; "
                "set gradient_accumulation_steps (or train_batch_size) to what you accumulate, or "
                "call the last backward() of each step outside no_sync()"
            )
        run.managed = False
        if run.rank == 0:
            _log.info(
                "no_sync() continues after the config's batch ends (micro-step %d): from here on a "
                "step is what the script accumulates, so its global batch depends on the number of "
                "ranks; to avoid that, set gradient_accumulation_steps to what you accumulate",
                micro_steps,
            )

    # ---- the numbers that all ranks exchange at the end of a step ----

    def notes(self) -> Tensor:
        """[2 * micro-steps] fp32: the weighted losses, then the numbers of tokens."""
        device = self._core.device
        # Counts on a device are filled in there: to read them, the host would wait for it.
        of_host = [NOT_GIVEN if isinstance(each, Tensor) else each for each in self._tokens]
        known = self._core.collectives.numbers(of_host, device)
        counts = [
            number.float() if isinstance(number, Tensor) else known[index]
            for index, number in enumerate(self._tokens)
        ]
        return torch.stack([*self._losses, *counts])

    def correction(self, notes: Tensor, plan: StepPlan) -> float:
        """The factor of the gradient sums, from the notes of all ranks [world, 2 * micro-steps]."""
        return correction(notes[:, notes.shape[1] // 2 :], plan, self._run.assignment)

    def together(self, notes: Tensor, plan: StepPlan) -> tuple[int, float]:
        """The tokens of the global batch, 0 if the script counts none, and its mean loss."""
        return taken_together(notes, plan, self._run.assignment)[1:]

    def end_forwards(self) -> None:
        """End the forwards of a step; of a script that ends steps they have ended."""
        if self._phase.has_run:
            self._core.writes.end_micro_step()

    def clear(self) -> None:
        """End the last micro-step of a step."""
        self._losses.clear()
        self._tokens.clear()
        if self._phase.has_run:  # a script that ends steps has ended its micro-steps
            self.ended += 1
            self._phase.move(Move.STEP)
            self._phase.move(Move.END)


def _times(loss: Tensor, weight: Count) -> Tensor:
    if not isinstance(weight, Tensor):
        return loss * weight
    # As torch multiplies with a number: the same bits whether the host knows the weight or not.
    wide = torch.promote_types(loss.dtype, torch.float32)
    return (loss.to(wide) * weight.to(wide)).to(loss.dtype)
