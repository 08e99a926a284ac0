"""The engine: forward, backward, step, save, load, with DeepSpeed's names.

Owns the order of things within a step. Must always hold: position, step count and scheduler
move together, at the end of a step and nowhere else; what every rank must decide alike (skip,
leave) is decided from numbers that every rank has; the mean loss, the norm and the weights of a
step are the same at every world size and stage.

Made by `assembly.initialize`; scripts call it. An attribute that the engine does not have is
looked up in the module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from zero_engine.accessors import Accessors
from zero_engine.config import Config
from zero_engine.distributed import local_rank
from zero_engine.elastic import AgentLink, peers_may_vanish
from zero_engine.engine_state import EngineState
from zero_engine.errors import CheckpointError, ConfigError, EngineError
from zero_engine.export import without_frozen, write_weights
from zero_engine.global_batch import BatchShape, mix
from zero_engine.loaders import Collate, evaluation_loader, training_loader
from zero_engine.micro_steps import Loss, MicroSteps
from zero_engine.parts import Core, Run
from zero_engine.persistence import NOTES, Persistence
from zero_engine.precision import Precision
from zero_engine.selection import LoadOptions
from zero_engine.weights import module_state_dict, weight_hash
from zero_engine.zero_optimizer import StepOutcome

_log = logging.getLogger(__name__)


class Engine(Accessors):
    """Trains a module; one per process and module.

    Raises (`__call__`, `backward`, `step`, `save_checkpoint`, `load_checkpoint`, `weight_hash`):
        PeerLost: A peer is gone. Under an agent the process ends instead, as it asks.
    """

    def __init__(
        self, config: Config, core: Core, run: Run, scheduler: Any, link: AgentLink
    ) -> None:
        self.module = core.module
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
        state = EngineState(
            module=core.module,
            units=core.units,
            zero=core.zero,
            collectives=core.collectives,
            scheduler=scheduler,
            aliases=core.aliases,
        )
        self._persistence = Persistence(config, core, run, state, link)

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # not set yet: looking it up in itself would never end
            raise AttributeError(name)
        return getattr(self.module, name)

    # ---- a step ----

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. In training, from this leaf's own random state."""
        with peers_may_vanish(self._link):
            if self.module.training:
                leaf = self._run.leaf()
                torch.manual_seed(mix(self._config.seed, self._run.cursor.step, leaf.index))
            return self._precision.call(self.module, args, kwargs)

    forward = __call__

    def backward(
        self,
        loss: Loss,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        tokens: int | Tensor | None = None,
    ) -> Tensor:
        """Compute and reduce the gradients of one micro-step.

        Args:
            loss: The mean loss of this micro-batch, a scalar; or (sum, count), its sum over
                `count` tokens.
            retain_graph: As for Tensor.backward.
            scale_wrt_gas: Weight the loss by the micro-batch's share of the global batch; False
                if the script has done so.
            tokens: How many tokens the mean is over. Given in every micro-step, each token of the
                global batch counts the same; otherwise each sample does.

        Returns:
            The loss as it was weighted; without the loss scale of fp16 training.
        """
        weighted = self._micro_steps.weigh(loss, tokens, by_share=scale_wrt_gas)
        with peers_may_vanish(self._link):
            self._micro_steps.backward(weighted, retain_graph=retain_graph)
        return weighted.share

    def scale(self, loss: Loss, *, tokens: int | Tensor | None = None) -> Tensor:
        """The loss, weighted and scaled, for a `.backward()` of the script's own.

        `engine.scale(loss).backward()` does what `engine.backward(loss)` does.
        """
        return self._micro_steps.await_plain_backward(self._micro_steps.weigh(loss, tokens))

    def step(self) -> None:
        """End a micro-step; at the boundary, the step: update weights, scheduler and position.

        If this worker has been asked to leave, the process may end here with a fresh checkpoint.
        """
        if self._micro_steps.without_step:
            raise EngineError("step() inside no_sync(); leave it for the last micro-step")
        if not self._micro_steps.awaits_step:
            raise EngineError("step() without backward(); call engine.backward(loss) first")
        if not self._micro_steps.at_boundary:
            self._micro_steps.end()
            return
        with peers_may_vanish(self._link):
            self._end_step()
            self._persistence.depart_if_asked()

    def _end_step(self) -> None:
        assert self._core.zero is not None
        plan, cursor = self._run.plan(), self._run.cursor
        # Everybody's notes: about leaving and saving, then those of the micro-steps.
        outcome = self._core.zero.step(
            torch.cat([self._persistence.notes(), self._micro_steps.notes()]),
            lambda notes: MicroSteps.correction(notes[:, NOTES:], plan),
        )
        self._micro_steps.clear()
        self._last = outcome
        self.mean_loss = MicroSteps.mean_loss(outcome.notes[:, NOTES:], plan)
        if outcome.applied and self.lr_scheduler is not None:
            self.lr_scheduler.step()
        cursor.step, cursor.samples, cursor.micro = cursor.step + 1, plan.position + plan.samples, 0
        if not outcome.applied:
            self._report_skip(outcome)
        elif outcome.scaling and self.global_rank == 0:
            _log.info("step %d: %s", cursor.step, outcome.scaling)
        if self._run.ledger is not None:
            self._run.ledger.end_step(cursor.step)
        self._persistence.hear(outcome.notes[:, :NOTES])
        self._link.progress(cursor.step, cursor.samples, self.mean_loss)
        self._print_step(outcome)

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
            raise EngineError(
                f"{what}, the last {state.unanswered} of them in a row: look at the data of these "
                "steps and at that parameter, lower the learning rate, or raise "
                "elastic.max_skipped_steps"
            )

    def _print_step(self, outcome: StepOutcome) -> None:
        every, step = self._config.steps_per_print, self._run.cursor.step
        if every and self.global_rank == 0 and step % every == 0:
            rates = ", ".join(f"{rate:g}" for rate in self.get_lr())
            _log.info(
                "step %d: loss %.6g, norm %.4g, lr %s", step, self.mean_loss, outcome.norm, rates
            )

    # ---- accumulation and data ----

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-steps without `step()`, for scripts that accumulate by themselves.

        Gradients are exchanged all the same: leaf by leaf is how the result stays one.

        Raises:
            EngineError: At stages 2 and 3, as in DeepSpeed.
        """
        if self._core.stage.shards_gradients:
            raise EngineError(
                f"no_sync() does not go with divided gradients, stage {self._core.stage.number}; "
                "leave it out, or use stage 0 or 1"
            )
        with self._micro_steps.no_sync():
            yield

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the coming micro-steps end a step.

        The global batch decides that here, so that the samples of a step do not depend on the
        world; what is said is checked at the next backward.
        """
        self._micro_steps.declared_boundary = is_boundary

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step, from the next step on.

        Raises:
            ConfigError: Not a multiple of the micro-batch size.
            EngineError: In the middle of a step.
        """
        micro_batch = self._run.batch.micro_batch
        if train_batch_size < 1 or train_batch_size % micro_batch:
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}): not a multiple of the micro-batch "
                f"size {micro_batch}"
            )
        if self._run.cursor.micro or self._micro_steps.awaits_step:
            raise EngineError("set_train_batch_size() in the middle of a step; call it after one")
        leaves = train_batch_size // micro_batch
        self._run.adopt_batch(BatchShape(leaves=leaves, micro_batch=micro_batch))

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Collate | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader: for "train" the engine's own order, for "eval" this rank's plain share.

        `pin_memory` is for DeepSpeed's scripts: batches are pinned where there is a GPU.

        Raises:
            ConfigError: A training batch of another size than the config's, or in another order,
                or another route.
        """
        del pin_memory
        run, workers = self._run, num_local_io_workers or 0
        if route in ("eval", "predict"):
            return evaluation_loader(run, dataset, batch_size, data_sampler, collate_fn, workers)
        if route != "train":
            raise ConfigError(f'deepspeed_io: route {route!r} is not "train", "eval" or "predict"')
        if data_sampler is not None:
            raise ConfigError(
                "deepspeed_io: the engine orders training data; leave data_sampler out"
            )
        if batch_size not in (None, run.batch.micro_batch):
            raise ConfigError(
                f"deepspeed_io: batch_size {batch_size} is not the micro-batch size "
                f"{run.batch.micro_batch}; change train_micro_batch_size_per_gpu"
            )
        run.loader = training_loader(self._config, run, dataset, collate_fn, workers)
        self.training_dataloader = run.loader
        return run.loader

    # ---- checkpoints ----

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        client_sd: Mapping[str, Any] | None = None,
        exclude_frozen_parameters: bool = False,
        blocking: bool | None = None,
    ) -> bool:
        """Save at this step's boundary; every rank calls it.

        In the background, training goes on as soon as the state is copied. A failure is then
        reported by the next `step()`, and the checkpoints there are stay as they are.

        Args:
            save_dir: On storage that all ranks share.
            tag: A name; by default global_step<N>.
            client_state: The script's own JSON, given back by `load_checkpoint`.
            client_sd: The name that DeepSpeed's tutorials use for it.
            exclude_frozen_parameters: Leave out what is not trained: whoever loads the
                checkpoint keeps the weights that the script has given these parameters.
            blocking: Return when it is published; None: as the config's checkpoint.async says.
                A worker that leaves always waits.

        Returns:
            Whether it was published, or in the background: begun. False if this worker's round
            is over, or if the save before is in flight and checkpoint.when_busy is "skip".

        Raises:
            CheckpointError: A rank failed, or the client state is not JSON; nothing was saved.
        """
        if self._micro_steps.awaits_step:
            raise EngineError("save_checkpoint() between backward() and step(); call step() first")
        with peers_may_vanish(self._link):
            return self._persistence.save(
                Path(save_dir),
                tag,
                client_state or client_sd or {},
                blocking=blocking,
                exclude_frozen=exclude_frozen_parameters,
            )

    def wait_for_checkpoint(self) -> bool:
        """Wait for the save in flight, if any.

        Returns:
            Whether the last save was published.

        Raises:
            CheckpointError: It has failed, and no `step()` has said so yet.
        """
        with peers_may_vanish(self._link):
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
            tag: Only a checkpoint of this name.
            load_module_strict: False: parameters and buffers that are only here or only there
                are no error.
            load_optimizer_states: False: the optimizer stays as it is.
            load_lr_scheduler_states: False: the scheduler stays as it is.
            load_module_only: Neither optimizer, nor scheduler, nor the position in the data.

        Returns:
            Its path and the client state, or (None, {}) if there is none yet.

        Raises:
            DamagedCheckpoint: There are checkpoints, and none is whole.
            ModelMismatch: It is another model's.
        """
        with peers_may_vanish(self._link):
            options = LoadOptions(
                strict=load_module_strict,
                optimizer=load_optimizer_states,
                scheduler=load_lr_scheduler_states,
                module_only=load_module_only,
            )
            return self._persistence.load(Path(load_dir), tag, options)

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

    def weight_hash(self) -> str:
        """SHA-256 of the weights: the same at every world size and stage. Every rank calls it."""
        with peers_may_vanish(self._link):
            return weight_hash(self._core.units)

    def module_state_dict(self) -> dict[str, Tensor]:
        """The module's whole state_dict on the CPU, at any stage. Every rank calls it."""
        with peers_may_vanish(self._link):
            core = self._core
            return module_state_dict(core.module, core.units, core.aliases)

    def get_fp32_state_dict(self) -> dict[str, Tensor]:
        """The module's whole state_dict in the highest precision, frozen parameters included."""
        with peers_may_vanish(self._link):
            core = self._core
            return module_state_dict(core.module, core.units, core.aliases, highest=True)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the state_dict, in the dtype of the model; every rank calls it.

        Args:
            save_dir: Made if it is not there.
            save_filename: With the suffix .safetensors in that format, else as torch.save.
            exclude_frozen_parameters: Leave out what is not trained.

        Returns:
            True: the file is there, at every stage.

        Raises:
            CheckpointError: It could not be written.
        """
        whole = self.module_state_dict()
        if exclude_frozen_parameters:
            whole = without_frozen(whole, self.module)
        path, problem = Path(save_dir) / save_filename, ""
        if self.global_rank == 0:
            problem = write_weights(whole, path)
        failed = torch.tensor([float(bool(problem))], device=self.device)
        with peers_may_vanish(self._link):
            self._core.collectives.broadcast(failed, f"whether {path} was written")
        if failed.item():
            raise CheckpointError(problem or f"{path} was not written: rank 0 says why")
        return True

    save_fp16_model = save_16bit_model

    def destroy(self) -> None:
        """Finish a save in flight; close the ledger and the connection to the agent."""
        self._persistence.close()
        if self._run.ledger is not None:
            self._run.ledger.close()
        self._link.close()
