"""The engine: forward, backward, step, save, load, around the script's own module.

Owns the order of things within a step. Must always hold: position, step count and scheduler
move together, at the end of a step and nowhere else; what every rank must decide alike (skip,
leave) is decided from numbers that every rank has; the mean loss, the norm and the weights of a
step are the same at every world size and stage. Where the engine loads the batches, the global
batch decides where a step ends. As an nn.Module it puts `module.` before every name, and nothing
takes parameters away from the buffers that they are views of.

Made by `initialize`; scripts call it. `zero_deepspeed.engine` has DeepSpeed's other names.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self, SupportsIndex

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from zero_checkpoint.persistence import NOTES, ClientSource, Persistence
from zero_checkpoint.place import place
from zero_checkpoint.tags import agree_on_tag
from zero_comm.agent_link import AgentLink, exit_on_peer_loss
from zero_comm.distributed import local_rank
from zero_contract.errors import ZeroError
from zero_data.global_batch import mix
from zero_data.own_loader import MicroBatches
from zero_engine.config import Config
from zero_engine.core.loaders import microbatch_sampler
from zero_engine.core.micro_steps import Loss, MicroSteps
from zero_engine.core.plain_backward import PlainBackward
from zero_engine.core.precision import Precision
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
from zero_engine.optim.zero_optimizer import StepOutcome, ZeroOptimizer
from zero_engine.parameters.gather import GatheredParameters
from zero_engine.parts import Core, Run
from zero_engine.sharding.weights import module_state_dict
from zero_engine.state.engine_state import EngineState
from zero_engine.state.selection import LoadOptions
from zero_engine.state.training import EngineTraining

_log = logging.getLogger(__name__)


class Engine(nn.Module):
    """Trains a module; one per process and module. A process may have several, see `agent_link`.

    An attribute that it does not have is the module's.

    Raises (`forward`, `backward`, `step`, `save_checkpoint`, `load_checkpoint`, `weight_hash`):
        PeerLost: A peer is gone. Under an agent the process ends instead, as it asks.
    """

    module: nn.Module

    def __init__(
        self,
        config: Config,
        core: Core,
        run: Run,
        scheduler: Any,
        link: AgentLink,
        keys: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.module = core.module
        del self.training  # so that it, too, is looked up there
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
        """The module's forward. In training, from this micro-batch's own random state."""
        gathered_from_shards = self._core.stage.shards_parameters
        self._core.moved.need(
            "forward", FOR_FORWARD_OF_SHARDS if gathered_from_shards else FOR_FORWARD
        )
        training = self.module.training
        part = "forward" if training else "evaluation"
        with exit_on_peer_loss(self._link), self._stopwatch.measure(part):
            if training:
                microbatch = self._run.microbatch()
                torch.manual_seed(mix(self._config.seed, self._run.cursor.step, microbatch.index))
            with self._profile.measure(part, self._run.cursor.step):
                output = self._precision.call(self.module, args, kwargs)
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

        A plain `loss.backward()` does so, too, outside fp16 training.

        Args:
            loss: The mean loss of this micro-batch, a scalar; or (sum, count), its sum over
                `count` tokens.
            retain_graph: As for Tensor.backward.
            tokens: How many tokens the mean is over. Given in every micro-step, each token of the
                global batch counts the same; otherwise each sample does.
            by_share: Weight the loss by the micro-batch's share of the global batch; False if the
                script has divided it over its micro-steps: the ranks are averaged then.

        Returns:
            The loss as it was weighted; without the loss scale of fp16 training.
        """
        self._core.moved.need("backward()")
        weighted = self._micro_steps.weigh(loss, tokens, by_share=by_share)
        with (
            exit_on_peer_loss(self._link),
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
        with exit_on_peer_loss(self._link):
            self._end_step(lr_kwargs or {})
            self._persistence.keep_in_memory()
            self._persistence.depart_if_asked()

    def _end_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        zero, cursor = self._core.zero, self._run.cursor
        assert zero is not None
        try:
            outcome = self._change(zero, lr_kwargs)
        except BaseException as error:
            if zero.changing:
                reason = f"a step has failed half way: {str(error) or type(error).__name__}"
                self._core.moved.inconsistent = Inconsistency(reason, optimizer=True)
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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-steps without `step()`, for scripts that accumulate by themselves.

        Gradients are exchanged all the same: micro-batch by micro-batch is how the result stays
        one. Where more micro-steps are run here than the config's batch has, a step is from then on
        what the script accumulates until it calls `step()`, as in DeepSpeed and DDP.

        Raises:
            ZeroError: At stages 2 and 3, as in DeepSpeed.
        """
        if self._core.stage.shards_gradients:
            raise ZeroError(
                f"no_sync() does not go with divided gradients, stage {self._core.stage.number}; "
                "leave it out, or use stage 0 or 1"
            )
        with self._micro_steps.no_sync():
            yield

    def batch_sampler(self, dataset: Dataset[Any]) -> MicroBatches:
        """The engine's order for a DataLoader of your own: `DataLoader(batch_sampler=...)`.

        Its workers, collate_fn, pinning and prefetching are yours; which samples a rank runs,
        and going on exactly there, is the engine's. Each pass over the DataLoader is the rest of
        an epoch.

        Args:
            dataset: Map-style; the same that the DataLoader gets.
        """
        sampler = MicroBatches(microbatch_sampler(self._config, self._run, dataset))
        self._run.loader = sampler
        return sampler

    # ---- where the run is ----

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
        """The learning rate of each param group; NaN where the optimizer finds its own."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        rates = (group.get("lr") for group in groups)
        return [math.nan if rate is None else float(rate) for rate in rates]

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with before backward; 1 outside fp16 training."""
        return self._core.zero.scale if self._core.zero is not None else 1.0

    # ---- checkpoints ----

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        exclude_frozen_parameters: bool = False,
        blocking: bool | None = None,
    ) -> bool:
        """Save at this step's boundary; every rank calls it.

        In the background, training goes on as soon as the state is copied. A failure is then
        reported by the next `step()`, and the checkpoints there are stay as they are.

        Args:
            save_dir: On storage that all ranks share, or a URL: s3://bucket/dir, gs://bucket/dir.
            tag: A name; by default global_step<N>.
            client_state: The script's own state, given back by `load_checkpoint`: numbers, text,
                tensors and numpy arrays of up to 1 MiB each, tuples, lists and dictionaries of
                them. What rank 0 gives.
            exclude_frozen_parameters: Leave out what is not trained: whoever loads the
                checkpoint keeps the weights that the script has given these parameters.
            blocking: Return when it is published; None: as the config's checkpoint.async says.
                A worker that leaves always waits.

        Returns:
            Whether it was published, or in the background: begun. False if this worker's round
            is over or its agent does not answer, if the disk is full and the script asks
            `checkpoint_due` (which is then true again after a minute; other scripts wait here for
            room, up to an hour), or if the save before is in flight and checkpoint.when_busy is
            "skip": nothing was written, and the log says so.

        Raises:
            CheckpointError: A rank failed, the client state has something else in it, or the ranks
                name it differently and checkpoint.tag_validation is "Fail"; nothing was saved. Or
                this is the second save in a row that was not published, though etcd is there.
        """
        self._core.moved.need("save_checkpoint()")
        if self._micro_steps.awaits_step:
            raise ZeroError("save_checkpoint() between backward() and step(); call step() first")
        with exit_on_peer_loss(self._link):
            mode = self._config.checkpoint.tag_validation.lower()
            agree_on_tag(tag, mode, self._core.collectives)
            return self._persistence.save(
                place(save_dir),
                tag,
                client_state or {},
                blocking=blocking,
                exclude_frozen=exclude_frozen_parameters,
            )

    def keep_client_state(self, source: ClientSource | None) -> None:
        """Say where the engine finds the script's own state, for checkpoints that it makes itself.

        Those are the ones in memory (`checkpoint.ram`), and the one with which a worker leaves.
        A script that gives `client_state` to `save_checkpoint` and does not call this gets none in
        memory, and leaves only after its own next save. Call it before `load_checkpoint`.

        Args:
            source: Called at the end of a step, on every rank, for a `client_state`, also by
                `save_checkpoint` without one. None: there is none.
        """
        self._persistence.client_source = source

    def wait_for_checkpoint(self) -> bool:
        """Wait for the save in flight, if any.

        Returns:
            Whether the last save was published.

        Raises:
            CheckpointError: It has failed, and no `step()` has said so yet.
        """
        with exit_on_peer_loss(self._link):
            return self._persistence.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the newest valid checkpoint, made at any world size and stage.

        An engine without an optimizer loads the weights alone, in its own dtype.

        Args:
            load_dir: As given to `save_checkpoint`.
            tag: Only a checkpoint of this name, or what the file `latest` says.
            load_module_strict: False: parameters and buffers that are only here or only there
                are no error.
            load_optimizer_states: False: the optimizer stays as it is.
            load_lr_scheduler_states: False: the scheduler stays as it is.
            load_module_only: Neither optimizer, nor scheduler, nor the position in the data.

        Returns:
            Its path and the client state, or (None, {}) if there is none yet.

        Raises:
            DamagedCheckpoint: There are checkpoints, and none is whole.
            ModelMismatch: It is another model's; unless a damaged one was tried before it,
                everything is as it was.
            CheckpointError: A rank could not read. After this and after damage the state may be
                half loaded, and nothing but another load is allowed.
        """
        self._core.moved.need("load_checkpoint()", refills=True)
        with exit_on_peer_loss(self._link):
            options = LoadOptions(
                strict=load_module_strict,
                optimizer=load_optimizer_states,
                scheduler=load_lr_scheduler_states,
                module_only=load_module_only,
            )
            loading = self._training.loading(options)
            return self._persistence.load(place(load_dir), tag, loading)

    def checkpoint_due(
        self, every_steps: int | None = None, every_s: float | Literal["auto"] | None = None
    ) -> bool:
        """Whether to save now; the same on all ranks. Also true when this worker is to leave.

        A script that saves when told so leaves at that very boundary.

        Args:
            every_steps: Every so many steps,
            every_s: or every so many seconds, or as often as "auto" finds right from what saving
                costs and how often the job fails. Without either, as the config says.
        """
        return self._persistence.due(every_steps, every_s)

    @property
    def asked_to_leave(self) -> bool:
        """Whether this worker is to leave; all ranks know it since the same `step()`."""
        return self._persistence.leaving

    def leave_group(self) -> None:
        """End the process with the checkpoint just saved, as the agent has asked.

        For a loop that has to write more beside a checkpoint; `step()` does it otherwise. Every
        rank calls it.

        Raises:
            SystemExit: Always.
            ZeroError: Nobody has asked this worker to leave.
        """
        if not self._persistence.leaving:
            raise ZeroError("leave_group() without asked_to_leave; go on training")
        with exit_on_peer_loss(self._link):
            self._persistence.leave()

    # ---- the weights ----

    def weight_hash(self) -> str:
        """SHA-256 of the weights: the same at every world size and stage. Every rank calls it."""
        self._core.moved.need("weight_hash()", WEIGHTS)
        with exit_on_peer_loss(self._link):
            return self._training.weight_hash()

    def module_state_dict(self) -> dict[str, Tensor]:
        """The module's whole state_dict on the CPU, at any stage. Every rank calls it."""
        self._core.moved.need("module_state_dict()", WEIGHTS)
        with exit_on_peer_loss(self._link):
            core = self._core
            return module_state_dict(core.module, core.units, core.aliases)

    def get_fp32_state_dict(self) -> dict[str, Tensor]:
        """The module's whole state_dict in the highest precision, frozen parameters included."""
        self._core.moved.need("get_fp32_state_dict()", WEIGHTS)
        with exit_on_peer_loss(self._link):
            core = self._core
            return module_state_dict(core.module, core.units, core.aliases, highest=True)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Give the module other weights, at any stage. Every rank calls it.

        Args:
            state_dict: With the names of `state_dict()`, which begin with `module.`. Rank 0's
                parameters become everybody's, each rank loads its own buffers.
            strict: As for torch.
            assign: Without effect: weights are always copied to where the engine steps them.

        Returns:
            The missing and the unexpected keys.
        """
        del assign
        self._core.moved.need("load_state_dict()", WEIGHTS)
        with GatheredParameters(self.module, modifier_rank=0):
            return super().load_state_dict(state_dict, strict)

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

    # ---- a module around another ----

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Before `module` is set, looking for it in itself would never end; and what copy and
            # pickle ask for is how to copy us, not the module.
            if name == "module" or name.startswith("__"):
                raise
        return getattr(self.module, name)

    def train(self, mode: bool = True) -> Self:
        """Put the module in training or evaluation mode."""
        self.module.train(mode)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's forward, as `torch.compile` does, with its arguments."""
        self.module.compile(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `.to()`, `.half()`, `.cuda()` come to: nothing, where all is as they ask already."""
        for name, param in self.named_parameters():
            if fn(param) is not param:
                raise ZeroError(
                    f"to(), half() and the like would take {name} away from the engine, which "
                    "steps it where it is; choose the dtype in the config, or call them on the "
                    "model before initialize()"
                )
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise ZeroError(
            "an engine cannot be copied or pickled: it is one rank's part of a run; copy "
            "engine.module, or call engine.save_checkpoint() or engine.module_state_dict()"
        )

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
        self._link.remove(self._persistence.number)
