"""The engine: forward, backward, step, save, load, with DeepSpeed's names.

Owns the order of things within a step. Must always hold: position, step count and scheduler
move together, at the end of a step and nowhere else; what every rank must decide alike (skip,
leave) is decided from numbers that every rank has; the mean loss, the norm and the weights of a
step are the same at every world size and stage.

Made by `assembly.initialize`; scripts call it.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from zero_checkpoint.persistence import NOTES, Persistence
from zero_comm.agent_link import AgentLink, peers_may_vanish
from zero_comm.distributed import local_rank
from zero_contract.errors import ZeroError
from zero_data.global_batch import mix
from zero_engine.config import Config
from zero_engine.core.accessors import Accessors
from zero_engine.core.batching import Batching
from zero_engine.core.micro_steps import Loss, MicroSteps
from zero_engine.core.plain_backward import PlainBackward
from zero_engine.core.precision import Precision
from zero_engine.core.saving import Checkpointing
from zero_engine.core.wrapper import Wrapper
from zero_engine.observe.flops_profiler import Profile
from zero_engine.observe.reporting import Reporter, Stopwatch
from zero_engine.offload_states import (
    FOR_FORWARD,
    FOR_FORWARD_OF_SHARDS,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
    Torn,
)
from zero_engine.optim.zero_optimizer import StepOutcome, ZeroOptimizer
from zero_engine.parts import Core, Run
from zero_engine.state.engine_state import EngineState
from zero_engine.state.training import EngineTraining

_log = logging.getLogger(__name__)


class Engine(Batching, Checkpointing, Accessors, Wrapper):
    """Trains a module; one per process and module. A process may have several, see `elastic`.

    Raises (`forward`, `backward`, `step`, `save_checkpoint`, `load_checkpoint`, `weight_hash`):
        PeerLost: A peer is gone. Under an agent the process ends instead, as it asks.
    """

    def __init__(
        self,
        config: Config,
        core: Core,
        run: Run,
        scheduler: Any,
        link: AgentLink,
        keys: Mapping[str, Any],
    ) -> None:
        super().__init__(core.module)
        self.config = keys
        """The config as it was given; libraries look into it."""
        self.optimizer = core.zero.optimizer if core.zero is not None else None
        self.lr_scheduler = scheduler
        self.training_dataloader = run.loader
        self.device = core.device
        self.local_rank = local_rank()
        self.global_rank = run.rank
        self.world_size = run.world
        self.mean_loss = float("nan")
        """The mean loss of the last global batch; equal on all ranks."""
        self._config = config
        self._core = core
        self._precision = Precision.of(config, core.device)
        self._run = run
        self._link = link
        self._last: StepOutcome | None = None
        self._micro_steps = MicroSteps(core, run)
        self._plain_backward = PlainBackward(core, self._micro_steps)
        self._stopwatch = Stopwatch(core.device, on=config.wall_clock_breakdown)
        self._profile = Profile(config.flops_profiler, run.rank, core.device)
        self._reporter = Reporter(config, run.rank, self._stopwatch)
        self.monitor = self._reporter.monitors
        """The curves that the config asks for; `write_events` adds the script's own."""
        self._state = EngineState(
            module=core.module,
            units=core.units,
            zero=core.zero,
            collectives=core.collectives,
            scheduler=scheduler,
            aliases=core.aliases,
        )
        self._training = EngineTraining(config, core, run, self._state)
        self._persistence = Persistence(config.checkpoint, self._training, link)

    # ---- a step ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. In training, from this leaf's own random state."""
        gathered_from_shards = self._core.stage.shards_parameters
        self._core.moved.need(
            "forward", FOR_FORWARD_OF_SHARDS if gathered_from_shards else FOR_FORWARD
        )
        training = self.module.training
        part = "forward" if training else "evaluation"
        with peers_may_vanish(self._link), self._stopwatch.measure(part):
            if training:
                leaf = self._run.leaf()
                torch.manual_seed(mix(self._config.seed, self._run.cursor.step, leaf.index))
            with self._profile.measure(part, self._run.cursor.step):
                output = self._precision.call(self.module, args, kwargs)
        self._plain_backward.watch(output)
        return output

    def backward(
        self,
        loss: Loss,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        tokens: int | Tensor | None = None,
    ) -> Tensor:
        """Compute and reduce the gradients of one micro-step.

        A plain `loss.backward()` does so, too, outside fp16 training.

        Args:
            loss: The mean loss of this micro-batch, a scalar; or (sum, count), its sum over
                `count` tokens.
            retain_graph: As for Tensor.backward.
            scale_wrt_gas: Weight the loss by the micro-batch's share of the global batch; False
                if the script has divided it over its micro-steps: the ranks are averaged then.
            tokens: How many tokens the mean is over. Given in every micro-step, each token of the
                global batch counts the same; otherwise each sample does.

        Returns:
            The loss as it was weighted; without the loss scale of fp16 training.
        """
        self._core.moved.need("backward()")
        weighted = self._micro_steps.weigh(loss, tokens, by_share=scale_wrt_gas)
        with (
            peers_may_vanish(self._link),
            self._stopwatch.measure("backward"),
            self._profile.measure("backward", self._run.cursor.step),
        ):
            self._micro_steps.backward(weighted, retain_graph=retain_graph)
        return weighted.share

    def scale(self, loss: Loss, *, tokens: int | Tensor | None = None) -> Tensor:
        """The loss, weighted and scaled, for a `.backward()` of the script's own.

        `engine.scale(loss).backward()` does what `engine.backward(loss)` does.
        """
        self._core.moved.need("scale()")
        scaled = self._micro_steps.await_plain_backward(self._micro_steps.weigh(loss, tokens))
        return self._profile.watch_backward(scaled, self._run.cursor.step)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-step; at the boundary, the step: update weights, scheduler and position.

        If this worker has been asked to leave, the process may end here with a fresh checkpoint.

        Args:
            lr_kwargs: What the `step` of a scheduler of the script's own is called with.
        """
        self._core.moved.need("step()")
        if self._micro_steps.without_step:
            raise ZeroError("step() inside no_sync(); leave it for the last micro-step")
        if not self._micro_steps.may_end_step:
            raise ZeroError("step() without backward(); call engine.backward(loss) first")
        if not self._micro_steps.ends_step():
            self._micro_steps.end_if_awaited()
            return
        with peers_may_vanish(self._link):
            self._end_step(lr_kwargs or {})
            self._persistence.keep_in_ram()
            self._persistence.depart_if_asked()

    def _end_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        zero, cursor = self._core.zero, self._run.cursor
        assert zero is not None
        try:
            outcome = self._change(zero, lr_kwargs)
        except BaseException as error:
            if zero.changing:
                reason = f"a step has failed half way: {str(error) or type(error).__name__}"
                self._core.moved.torn = Torn(reason, optimizer=True)
            raise
        finally:
            zero.changing = False
        self._profile.report(cursor.step - 1)
        if not outcome.applied:
            self._report_skip(outcome)
        elif outcome.scaling and self.global_rank == 0:
            _log.info("step %d: %s", cursor.step, outcome.scaling)
        if self._run.ledger is not None:
            self._run.ledger.end_step(cursor.step)
        self._persistence.hear(outcome.notes[:, :NOTES].tolist())
        self._link.progress(self._persistence.number, cursor.step, cursor.samples, self.mean_loss)
        self._reporter.step(cursor, self.mean_loss, outcome.norm, self.get_lr(), self.loss_scale)

    def _change(self, zero: ZeroOptimizer, lr_kwargs: Mapping[str, Any]) -> StepOutcome:
        """Update weights, scheduler and position, all of them or none."""
        plan, cursor = self._run.ending(), self._run.cursor
        # Everybody's notes: about leaving and saving, then those of the micro-steps.
        with self._stopwatch.measure("step"):
            notes = torch.tensor(self._persistence.notes(), device=self.device)
            outcome = zero.step(
                torch.cat([notes, self._micro_steps.notes()]),
                lambda notes: MicroSteps.correction(notes[:, NOTES:], plan),
            )
        self._micro_steps.clear()
        self._micro_steps.applied = outcome.applied
        self._last = outcome
        self.mean_loss = MicroSteps.mean_loss(outcome.notes[:, NOTES:], plan)
        if outcome.applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        cursor.step, cursor.samples, cursor.micro = cursor.step + 1, plan.position + plan.samples, 0
        return outcome

    def _report_skip(self, outcome: StepOutcome) -> None:
        assert self._core.zero is not None
        cursor, state = self._run.cursor, self._core.zero.scale_state
        cursor.skipped += 1
        what = (
            f"step {cursor.step} skipped: loss {self.mean_loss:g}, gradient norm {outcome.norm}, "
            f"first in {outcome.culprit}; {outcome.scaling}; {cursor.skipped} skipped so far"
        )
        if self.global_rank == 0:
            _log.warning("%s", what)
        if state.unanswered >= self._config.elastic.max_skipped_steps:
            raise ZeroError(
                f"{what}, the last {state.unanswered} of them in a row: look at the data of these "
                "steps and at that parameter, lower the learning rate, or raise "
                "elastic.max_skipped_steps"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what a plain `.backward()` of another engine's loss has left here, if anything.

        Otherwise there is nothing to do: gradients are cleared by `step`.
        """
        self._micro_steps.forget_shared()

    # ---- the device, lent to others ----

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory, so that others can use the device's. Not collective.

        Args:
            include: Which; None: all of them.
            device: "cpu".
            pin_memory: Into page-locked memory, from which they come back faster.
            non_blocking: Return before the copies have ended.

        Raises:
            ZeroError: The config's offload_param has moved them already, or another device.
        """
        self._core.moved.offload(include, device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` has moved; training goes on as if nothing had been."""
        self._core.moved.restore(non_blocking=non_blocking)

    def destroy(self) -> None:
        """Finish a save in flight; close curves and ledger, with the last engine the link.

        If the disk was too full for the save of this very step, that is tried again for an hour.

        Raises:
            CheckpointError: The disk is full still.
        """
        self._persistence.close()
        self._reporter.monitors.close()
        if self._run.ledger is not None:
            self._run.ledger.close()
        self._link.part(self._persistence.number)
