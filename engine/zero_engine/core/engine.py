"""The engine: forward, backward, step, save and load of a script's module.

Owns the order of events within a step. The mean loss, the norm and the weights of a step are the
same at every world size and stage. `zero_deepspeed.engine` has DeepSpeed's further names.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from zero_checkpoint.saving.departure import ClientSource
from zero_comm.sums.plan import Where
from zero_comm.worker.agent_link import AgentLink, exit_on_peer_loss
from zero_comm.worker.distributed import local_rank
from zero_contract.errors import ZeroError
from zero_contract.worker import Progress
from zero_data.generators import generators_of_module, seed_generators
from zero_data.lanes.adapters.loaders import Given
from zero_data.own_loader import MicroBatches
from zero_data.position_loader import Moment, PositionLoader, seed_everything
from zero_engine.core.loaders import microbatch_sampler
from zero_engine.core.micro_steps import EndsBy, Loss, MicroSteps
from zero_engine.core.plain_backward import PlainBackward
from zero_engine.core.precision import Precision
from zero_engine.core.replay import replay
from zero_engine.core.whole_weights import WholeWeights
from zero_engine.observe.flops_profiler import Profile
from zero_engine.observe.reporting import Reporter, Stopwatch
from zero_engine.offload_states import (
    FOR_FORWARD,
    FOR_FORWARD_OF_SHARDS,
    WEIGHTS,
    Inconsistency,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
)
from zero_engine.optim.lr_schedules import check_call
from zero_engine.optim.zero_optimizer import StepOutcome
from zero_engine.parts import Core, Run
from zero_engine.sharding.grad_reducer import if_alive
from zero_engine.state.engine_state import EngineState
from zero_engine.state.selection import LoadOptions
from zero_engine.state.training import EngineTraining
from zero_step.checks.self_test import SelfTest
from zero_step.lane_states import lanes_of
from zero_step.session import (
    NOTES,
    Session,
    begin_micro_step,
    come_back,
    end_step,
    fill_in,
    notes_of,
    outlived,
    see_forward,
)

_log = logging.getLogger(__name__)


class Engine(WholeWeights):
    """Trains a module on all ranks. A process may have several engines, each for its own module.

    Raises (`forward`, `backward`, `step`, `save_checkpoint`, `load_checkpoint`, `weight_hash`):
        PeerLost: A peer is lost. Under an agent the process exits instead, as the agent expects.
    """

    def __init__(
        self, core: Core, run: Run, scheduler: Any, link: AgentLink, keys: Mapping[str, Any]
    ) -> None:
        super().__init__(core.module)
        config = core.layout.config
        self.config = keys
        """The config as it was given; libraries read it."""
        self.optimizer = core.zero.optimizer if core.zero is not None else None
        self.lr_scheduler = scheduler
        link.note_schedule(scheduler)
        self.training_dataloader = run.loader
        self.layout = core.layout
        """How the run is laid out; `print(engine.layout)` shows each choice with its reason."""
        self.device = core.device
        self.local_rank = local_rank()
        self.global_rank = run.rank
        self.world_size = run.world
        self.mean_loss = float("nan")
        """The mean loss of the last global batch; equal on all ranks."""
        self._config = config
        self._core = core
        self._precision = Precision(config, core.device)
        self._self_test = SelfTest(
            module=core.module,
            mode=core.hardware.mode,
            collectives=core.collectives,
            device=core.device,
            cursor=run.cursor,
            hardware_changed=lambda: run.hardware_changed,
            replay=partial(replay, core, run),
        )
        self._run = run
        self._link = link
        self._last: StepOutcome | None = None
        self._micro_steps = MicroSteps(core, run)
        self._plain_backward = PlainBackward(core, self._micro_steps)
        self._stopwatch = Stopwatch(core.device, on=config.wall_clock_breakdown)
        self._profile = Profile(config.flops_profiler, run.rank, core.device)
        self._reporter = Reporter(config, run.rank, self._stopwatch)
        self.monitor = self._reporter.monitors
        """The monitors of the config; `write_events` adds curves of the script."""
        self._state = EngineState(core, scheduler)
        self._training = EngineTraining(core, run, self._state)
        self._session = Session(config.checkpoint, self._training, core.collectives, link)
        self._session.hardware, self._session.writes = core.hardware, core.writes
        # Hooks of a loss refer to the micro-steps, and must not keep the engine.
        self._micro_steps.on_plain = if_alive(self._fill_in)
        # A script may add noise to the gradients.
        self._micro_steps.behind_last = partial(if_alive(self._seed_step), Moment.GRADIENTS)
        self._of_module = generators_of_module(self.module, lanes_of(run.loader))
        """Random numbers that modules draw from generators of their own."""

    def _fill_in(self, runs: bool) -> None:
        fill_in(self._session, runs)

    def _seed(self, seed: int) -> None:
        seed_everything(seed)
        seed_generators(self._of_module, seed)

    # ---- a step ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; in training with the random state of this micro-batch.

        Of several forwards of a micro-batch the first seeds; the others go on with its numbers.
        """
        kinds = FOR_FORWARD_OF_SHARDS if self._core.stage.shards_parameters else FOR_FORWARD
        # Weights that arrive late are awaited module by module.
        self._core.moved.compute("forward", kinds, arrived=False)
        training = self.module.training
        part = "forward" if training else "evaluation"
        call = partial(self._precision.call, self.module)
        with exit_on_peer_loss(self._link), self._core.hardware.mode.refusals():
            if training:
                if self._session.is_behind:
                    self._come_back()
                see_forward(self._session, self.module)
                begin_micro_step(self._session)
                if self._core.zero is not None:
                    first = self._run.plan().first_place(self._run.assignment)
                    self._core.writes.begin_micro_step(first)
                if (number := self._micro_steps.begin_forward()) is not None:
                    seed = partial(self._seed, number)
                    if self._core.zero is not None and not self._core.zero.accumulating:
                        self._self_test.run_if_due(call, args, kwargs, seed)
                    seed()
            # A forward goes on without a lost peer: the script needs something to call backward on.
            with (
                outlived(self._session, goes_on=True) if training else nullcontext(),
                self._stopwatch.measure(part),
                self._profile.measure(part, self._run.cursor.step),
            ):
                output = call(args, kwargs)
            if training:
                self._micro_steps.end_forward()
                self._core.writes.check_parameters()
        self._plain_backward.watch(output)
        return output

    def backward(
        self,
        loss: Loss,
        retain_graph: bool = False,
        *,
        tokens: int | Tensor | None = None,
        by_share: bool = True,
    ) -> Tensor:
        """Compute and reduce the gradients of one micro-step.

        Outside fp16 training a plain `loss.backward()` does the same.

        Args:
            loss: The mean loss of this micro-batch, a scalar; or (sum, count), its sum over
                `count` tokens.
            retain_graph: As for Tensor.backward.
            tokens: The number of tokens in the mean. If it is given in every micro-step, each token
                of the global batch has the same weight; otherwise each sample has.
            by_share: Weight the loss by the micro-batch's share of the global batch. False if the
                script has divided it by its micro-steps: then the ranks are averaged.

        Returns:
            The weighted loss, without the loss scale of fp16 training.
        """
        self._core.moved.compute("backward()")
        weighted = self._micro_steps.weigh(loss, tokens, by_share=by_share)
        if self._session.lost is not None:  # in its forward: the step has no effect any more
            return weighted.share
        with (
            outlived(self._session),
            self._core.hardware.mode.refusals(),
            self._stopwatch.measure("backward"),
            self._profile.measure("backward", self._run.cursor.step),
        ):
            self._micro_steps.backward(weighted, retain_graph=retain_graph)
        return weighted.share

    def scale(self, loss: Loss, *, tokens: int | Tensor | None = None) -> Tensor:
        """The loss, weighted and scaled, for the script to call `.backward()` on.

        `engine.scale(loss).backward()` does what `engine.backward(loss)` does.
        """
        self._core.moved.compute("scale()")
        scaled = self._micro_steps.await_plain_backward(self._micro_steps.weigh(loss, tokens))
        return self._profile.watch_backward(scaled, self._run.cursor.step)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-step; at the boundary also the step: update weights, scheduler, position.

        Asked to leave, the process exits with a fresh checkpoint where the loop over the engine's
        loader comes back from what the script does behind the step; with another loader, here.
        Gradients that the script has written to `.grad` of the parameters are those of the
        micro-step, if it has had no backward; in fp16 training they are scaled.

        Args:
            lr_kwargs: Arguments for the `step` of the script's scheduler.
        """
        self._core.moved.compute("step()")
        if self._micro_steps.ends_by is EndsBy.NO_SYNC:
            raise ZeroError("step() inside no_sync(); leave it for the last micro-step")
        if self._session.lost is None:
            self._end_micro_step(lr_kwargs or {})
        if self._session.lost is not None:  # the step has no effect
            self._micro_steps.applied = False
        if self._run.loader is None or not self._run.loader.comes_back:
            self._come_back()

    def _come_back(self) -> None:
        # States that are away delay it to the next forward: it may save them.
        if self._session.lost is not None or not self._core.moved.are_away:
            come_back(self._session)

    def _hear_loop(self, loader: PositionLoader[Any]) -> None:
        """The loop over it begins, has drawn a batch, or ends."""
        if not loader.elsewhere:
            self._come_back()
            self._micro_steps.begun = None  # what ran before is not of the batch that comes
        if self._session.staying is not None:
            self._session.staying.hear_loop(loader, are_away=self._core.moved.are_away)

    def _end_micro_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        with outlived(self._session):
            self._micro_steps.take_written()
        if self._session.lost is not None:
            return
        self._micro_steps.check_step()
        if not self._micro_steps.ends_step():
            self._micro_steps.end_if_awaited()
            return
        # Now: the written values are compared among the ranks in this step, before they count.
        self._core.moved.take_writes()
        if self._core.zero is not None:
            self._core.as_given.check(self._core.zero.units)
            assert self._core.reducer is not None
            self._core.reducer.check_hooks()
        if self.lr_scheduler is not None:
            check_call(self.lr_scheduler, lr_kwargs)
        with outlived(self._session):
            self._end_step(lr_kwargs)

    def _end_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        zero, cursor = self._core.zero, self._run.cursor
        assert zero is not None
        plan, lanes = self._run.ending(), lanes_of(self._run.loader)
        # Before the notes, one of which says whether forwards have written to buffers.
        self._micro_steps.end_forwards()
        self._seed_step(Moment.OPTIMIZER)  # an optimizer may draw random numbers
        try:
            # Update weights, scheduler and position, all of them or none. The notes of every rank:
            # about leaving and saving, then those of the micro-steps.
            with self._stopwatch.measure("step"):
                # Skip and leave are decided from these, so that all ranks decide alike.
                own = [*notes_of(self._session), *(lanes.notes() if lanes is not None else ())]
                outcome = zero.step(
                    torch.cat(
                        [
                            self._core.collectives.numbers(own, self.device),
                            self._micro_steps.notes(),
                        ]
                    ),
                    lambda notes: self._micro_steps.correction(notes[:, len(own) :], plan),
                )
            if lanes is not None:
                lanes.hear(outcome.notes[:, NOTES : len(own)].tolist())
            self._core.writes.end_step(outcome.notes[:, NOTES - 1].tolist())
            of_micro_steps = outcome.notes[:, len(own) :]
            self._micro_steps.clear()
            self._micro_steps.applied = outcome.applied
            self._last = outcome
            tokens, self.mean_loss = self._micro_steps.together(of_micro_steps, plan)
            cursor.tokens += tokens
            if outcome.applied and self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
            # Position, step count and scheduler move together, here and nowhere else.
            cursor.step, cursor.samples, cursor.micro = (
                cursor.step + 1,
                plan.position + plan.samples,
                0,
            )
        except BaseException as error:
            if zero.changing:
                reason = f"a step has failed half way: {str(error) or type(error).__name__}"
                self._core.moved.inconsistent = Inconsistency(reason, optimizer=True)
            raise
        finally:
            zero.changing = False
        self._after_step(outcome, zero.scale_state.unanswered)

    def _after_step(self, outcome: StepOutcome, unanswered: int) -> None:
        """Report a step that has ended."""
        cursor = self._run.cursor
        self._profile.report(cursor.step - 1)
        if not outcome.applied:
            cursor.skipped += 1
            what = (
                f"step {cursor.step} skipped: loss {self.mean_loss:g}, gradient norm "
                f"{outcome.norm}, first in {outcome.culprit}; {outcome.scaling}; {cursor.skipped} "
                "skipped so far"
            )
            if self.global_rank == 0:
                _log.warning("%s", what)
            if unanswered >= self._config.elastic.max_skipped_steps:
                raise ZeroError(
                    f"{what}, the last {unanswered} of them in a row: look at the data of these "
                    "steps and at that parameter, lower the learning rate, or raise "
                    "elastic.max_skipped_steps"
                )
        elif outcome.scaling and self.global_rank == 0:
            _log.info("step %d: %s", cursor.step, outcome.scaling)
        self._seed_step()  # a script may draw some before its next forward
        if self._run.ledger is not None:
            self._run.ledger.end_step(cursor.step)
        progress = Progress(
            step=cursor.step,
            samples=cursor.samples,
            loss=self.mean_loss,
            gradient_norm=outcome.norm,
            loss_scale=self.loss_scale if self._config.loss_scaling.enabled else None,
            tokens=cursor.tokens,
            reduction="native" if self._core.layout.native else "",
        )
        self._reporter.step(cursor, self.mean_loss, outcome.norm, self.get_lr(), self.loss_scale)
        end_step(self._session, outcome.notes[:, :NOTES].tolist(), progress)

    def _seed_step(self, moment: Moment = Moment.BETWEEN) -> None:
        if self._run.loader is not None and self._link.is_alone():
            self._run.loader.seed_step(moment)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last optimizer step, to leave a batch out of it.

        Of the engine's loader, the batch stays counted: a `step()` for it must follow. With a
        DataLoader of the script a loop may go on to the next batch without one. `step` clears
        gradients, so no other call is needed.

        Args:
            set_to_none: Without effect.

        Raises:
            ZeroError: In the middle of a step with another elastic.accumulate than "owner".
        """
        self._core.moved.compute("zero_grad()")
        self._micro_steps.drop()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context of micro-steps without `step()`, for scripts that accumulate by themselves.

        Gradients are still reduced, one micro-batch after the other: so the result is the same at
        every world size. If more micro-steps run here than the config's batch has, from then on the
        script decides where a step ends, by calling `step()`, as in DeepSpeed and DDP.

        Raises:
            ZeroError: At stages 2 and 3, as in DeepSpeed.
        """
        if self._core.stage.shards_gradients:
            raise ZeroError(
                "no_sync() cannot be combined with sharded gradients, stage "
                f"{self._core.stage.number}; leave it out, or use stage 0 or 1"
            )
        with self._micro_steps.ending_by(EndsBy.NO_SYNC):
            yield

    def batch_sampler(self, dataset: Dataset[Any]) -> MicroBatches:
        """A batch sampler for a DataLoader of the script: `DataLoader(batch_sampler=...)`.

        The engine chooses the samples of each rank, and resumes exactly there; workers, collate_fn,
        pinning and prefetching are the DataLoader's. Each pass over it is the rest of an epoch.

        Args:
            dataset: The map-style dataset of that DataLoader.

        Raises:
            ZeroError: A step has begun with other batches, and elastic.accumulate is not "owner".
        """
        where = self._run.accumulation.where
        if self._micro_steps.is_begun() and where is not Where.OWNER:
            raise ZeroError(
                f'batch_sampler() in the middle of a step with elastic.accumulate "{where}", which '
                "decides who runs which micro-batch of a step; call it before the first backward()"
            )
        given = Given(dataset=dataset, source=None)
        sampler = MicroBatches(microbatch_sampler(self._config, self._run, given))
        self._run.loader = sampler
        return sampler

    # ---- the position of the run ----

    @property
    def global_steps(self) -> int:
        """Optimizer steps since the run began, skipped ones included."""
        return self._run.cursor.step

    @property
    def global_samples(self) -> int:
        """Samples consumed by those steps."""
        return self._run.cursor.samples

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because the gradient norm was not finite."""
        return self._run.cursor.skipped

    def get_global_grad_norm(self) -> float | None:
        """The gradient norm of the last step before clipping; None before the first step."""
        return self._last.norm if self._last is not None else None

    def get_lr(self) -> list[float]:
        """The learning rate of each param group; NaN if the optimizer computes its own."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        rates = (group.get("lr") for group in groups)
        return [math.nan if rate is None else float(rate) for rate in rates]

    @property
    def loss_scale(self) -> float:
        """The factor of the loss before backward; 1 outside fp16 training."""
        return self._core.zero.scale if self._core.zero is not None else 1.0

    # ---- checkpoints ----

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | float | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        blocking: bool | None = None,
    ) -> bool:
        """Save a checkpoint; see `zero_step.Session.save`. Every rank calls it.

        Inside of a step it is that of the step before.
        """
        come_back(self._session, calls=True)
        self._core.moved.need("save_checkpoint()")
        if self._micro_steps.is_begun() and self.global_rank == 0:
            _log.warning(
                "save_checkpoint() inside of step %d: the checkpoint is that of the step before, "
                "without the gradients so far; a run that resumes from it trains on their "
                "micro-batches again",
                self.global_steps + 1,
            )
        return self._session.save(
            save_dir,
            tag,
            client_state,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
            blocking=blocking,
        )

    def keep_client_state(self, source: ClientSource | None) -> None:
        """Register a source of client state; see `zero_step.Session.keep_client_state`."""
        self._session.keep_client_state(source)

    def wait_for_checkpoint(self) -> bool:
        """Wait for the save in flight; see `zero_step.Session.wait`."""
        return self._session.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the newest whole checkpoint; see `zero_step.Session.load`. Every rank calls it.

        A loop over the engine's loader goes on from there, as a new one does: gradients of a step
        that is not ended are dropped, and its samples come again.

        An engine without an optimizer loads the weights alone, in its own dtype.

        Args:
            load_dir: The `save_dir` of `save_checkpoint`.
            tag: Load only checkpoints of this tag, or the one of this name.
            load_module_strict: Refuse a checkpoint whose parameters and buffers differ from the
                module's.
            load_optimizer_states: False keeps the optimizer as it is.
            load_lr_scheduler_states: False keeps the scheduler as it is.
            load_module_only: Load neither optimizer, nor scheduler, nor the position in the data.

        Returns:
            The path of the checkpoint and its client state, or (None, {}) if there is none yet.
        """
        come_back(self._session, calls=True)
        self._core.moved.need("load_checkpoint()", refills=True)
        if self._micro_steps.is_begun():
            self._micro_steps.begin_again()
        options = LoadOptions(
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
        )
        path = self._session.load(load_dir, tag, self._training.loading(options))
        return path, self._session.client_state

    def checkpoint_due(
        self, every_steps: int | None = None, every_s: float | Literal["auto"] | None = None
    ) -> bool:
        """Whether to save now; see `zero_step.Session.due`."""
        come_back(self._session, calls=True)
        return self._session.due(every_steps, every_s)

    @property
    def asked_to_leave(self) -> bool:
        """Whether this worker has been asked to leave; equal on all ranks after each `step()`."""
        return self._session.leaving

    def leave_group(self) -> None:
        """Exit the process after the checkpoint just saved; see `zero_step.Session.leave`."""
        self._session.leave()

    # ---- the weights ----

    def weight_hash(self) -> str:
        """SHA-256 of the weights: the same at every world size and stage. Every rank calls it."""
        self._core.moved.need("weight_hash()", WEIGHTS)
        with exit_on_peer_loss(self._link):
            return self._training.weight_hash()

    # ---- the device, freed for another use ----

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory, to free memory of the device. Not collective.

        Args:
            include: The kinds of state; None: all of them.
            device: "cpu".
            pin_memory: Use page-locked memory, from which a reload is faster.
            non_blocking: Begin all copies before the host waits for them. They have ended when this
                returns: the parameters and the state of the optimizer show them.

        Raises:
            ZeroError: The config's offload_param has moved them already, or `device` is not "cpu".
        """
        self._core.moved.offload(include, device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what `offload_states` has moved; training continues unchanged."""
        self._core.moved.restore(non_blocking=non_blocking)

    # ---- its end ----

    def destroy(self) -> None:
        """Close the session (see `zero_step.Session.close`), monitors and ledger."""
        monitors, ledger = self._reporter.monitors, self._run.ledger
        with closing(monitors), closing(ledger) if ledger is not None else nullcontext():
            self._session.close()
