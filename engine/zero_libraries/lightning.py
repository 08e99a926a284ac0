"""Lightning's Trainer on `zero_torch.Run`: a strategy.

    trainer = lightning.Trainer(strategy=ZeroDDP("checkpoints", microbatches=12), ...)
    trainer.fit(model, loader)             # resumes by itself
    print(trainer.strategy.run.global_step, trainer.strategy.run.weight_hash())

Lightning sees a global batch as one batch, so its step, epoch, validation and schedules do not
depend on the number of ranks. The loops' own progress, and the states of callbacks, are part of the
run's checkpoint. `ModelCheckpoint` writes what it always writes, for other uses of the weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

import zero_torch
from zero_comm.worker.agent_link import current_round
from zero_contract.errors import ConfigError
from zero_libraries.steps import GlobalBatches
from zero_libraries.versions import check_replaced

_OF_THE_RUN = ("state_dict", "optimizer_states", "hyper_parameters", "hparams_name", "hparams_type")
"""Parts of Lightning's checkpoint that the run has, or that the script gives again."""
_REPLACED = ("restore_checkpoint_after_setup", "lightning_restore_optimizer", "setup", "teardown",
             "load_model_state_dict", "load_checkpoint", "lightning_module_state_dict",
             "optimizer_state", "process_dataloader", "training_step", "backward",
             "optimizer_step", "on_train_start")  # fmt: skip
"""Methods of a strategy in whose place a run's are."""
_AVERAGES = "WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging"
_REFUSED: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda it: it.accumulate_grad_batches != 1,
     "accumulate_grad_batches: leave it out; microbatches takes its place"),
    (lambda it: _has(it, ["GradientAccumulationScheduler"]),
     "GradientAccumulationScheduler: leave it out; microbatches is that of all steps"),
    (lambda it: not it.lightning_module.automatic_optimization,
     "automatic_optimization=False: call zero_torch.protect() in the module"),
    (lambda it: getattr(it.precision_plugin, "scaler", None) is not None,
     "precision='16-mixed' has a scaler of its own: give 'bf16-mixed'"),
    (lambda it: it.overfit_batches,
     "overfit_batches: the epochs of a run go on where the one before ended: give the DataLoader "
     "Subset(dataset, range(n)) of the samples to overfit, and shuffle=False"),
    (lambda it: not it.fast_dev_run and repr(it.limit_train_batches) != "1.0",
     "limit_train_batches: an epoch of a run has each sample once: give Trainer(max_steps=n), or "
     "the DataLoader Subset(dataset, range(n)) of the samples to train on"),
    (lambda it: it.reload_dataloaders_every_n_epochs,
     "reload_dataloaders_every_n_epochs: a run has one DataLoader for all epochs: leave it out, "
     "and let the dataset have the samples of all of them"),
    (lambda it: len(it.lr_scheduler_configs) > 1,
     "configure_optimizers() gives several schedulers, of which the state of one would be saved: "
     "give one scheduler, such as SequentialLR or ChainedScheduler of them"),
    (lambda it: any(each.reduce_on_plateau for each in it.lr_scheduler_configs),
     "ReduceLROnPlateau: Lightning leaves out its step when an epoch was resumed: give a schedule "
     "that needs no metric, or train in a loop of your own by zero_torch.protect()"),
    (lambda it: _has(it, _AVERAGES),
     f"{', '.join(_AVERAGES)}: the average would not be in the run's checkpoint: give the strategy "
     "stateful={'average': torch.optim.swa_utils.AveragedModel(module)}, and call its "
     "update_parameters(module) in on_train_batch_end() of a callback"),
)  # fmt: skip
"""What of a Trainer is refused, and the reason with the remedy."""


class _Protected:
    """The methods of a strategy that a run takes over; before the strategy that wraps the model.

    Attributes:
        run: The run, from the begin of `fit` on.
    """

    run: zero_torch.Run

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *more: Any,
        microbatches: int,
        stateful: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        """Set up a strategy.

        Args:
            directory: Of the checkpoints from which the run resumes.
            *more: As for the strategy of Lightning, as are `named`.
            microbatches: Those of a global batch, over all ranks; the batches of the script's
                DataLoader are micro-batches.
            stateful: As for `zero_torch.protect`, as is `config`.
            config: See `stateful`.
            **named: See `more`.
        """
        super().__init__(*more, **named)
        self._directory = directory
        self._microbatches = microbatches
        self._stateful = stateful
        self._config = config
        self._batches: GlobalBatches | None = None
        self._micro_batch: Any = None
        """The one whose turn it is, of the step that Lightning has given."""
        self._step: list[Any] = []

    # ---- begin and end ----

    @property
    def _fits(self) -> bool:
        module = self.lightning_module  # type: ignore[attr-defined]
        return module is None or module.trainer.state.fn == "fit"

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The run loads the weights once they are wrapped."""
        return self._fits or super().restore_checkpoint_after_setup  # type: ignore[misc]

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The run restores it."""
        return False

    def setup(self, trainer: pl.Trainer) -> None:
        """Make the run, and load its newest checkpoint."""
        super().setup(trainer)  # type: ignore[misc]
        if not self._fits:
            return
        check(trainer)
        if hasattr(self, "run"):
            raise ConfigError("fit() was called before: make another strategy for another run")
        # The loop would do it when it begins, and the run needs the loader now. Samplers that
        # Lightning would wrap in one of a rank are the run's to divide, or to refuse.
        connector: Any = trainer._data_connector
        wraps = connector._requires_distributed_sampler
        vars(connector)["_requires_distributed_sampler"] = lambda it: _is_plain(it) and wraps(it)
        trainer.fit_loop.setup_data()
        del connector._requires_distributed_sampler
        run = self._begin()
        its: Any = trainer
        its.precision_plugin.clip_grad_by_norm = lambda _, norm: run.clip_grad_norm_(float(norm))
        for loop in trainer.fit_loop, trainer.fit_loop.epoch_loop:
            vars(loop)["on_advance_end"] = partial(self._end, trainer, loop, loop.on_advance_end)

    def _begin(self) -> zero_torch.Run:
        if not hasattr(self, "run"):
            its: Any = self
            trainer, batches = its.lightning_module.trainer, self._batches
            if batches is None or len(its.optimizers) != 1:
                raise ConfigError("Zero's strategy takes one DataLoader of torch and one optimizer")
            schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
            self.run = zero_torch.protect(
                its.model,
                its.optimizers[0],
                batches.given,
                microbatches=self._microbatches,
                scheduler=schedulers[0] if schedulers else None,
                stateful=self._stateful,
                config=self._config,
            )
            self.run.keep_client_state(self.state)
            if self.run.load(self._directory) is not None:
                trainer.num_sanity_val_steps = 0  # made when the run began
                # In a job of its own, a training that was stopped early may go on.
                stopped = self.run.client_state.get("should_stop", False)
                trainer.should_stop = stopped and current_round() > 1
                # Lightning restores loops and callbacks from it; the run has restored the rest.
                trainer._checkpoint_connector._loaded_checkpoint = {
                    **self.run.client_state,
                    "state_dict": {},
                    "lr_schedulers": [],
                }
        return self.run

    def load_model_state_dict(self, *more: Any, **named: Any) -> None:
        """Do nothing in `fit`: the run has loaded it."""
        if not self._fits:
            super().load_model_state_dict(*more, **named)  # type: ignore[misc]

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Refuse another checkpoint than the newest one of the run, in `fit`."""
        if not self._fits:
            return super().load_checkpoint(checkpoint_path, weights_only)  # type: ignore[misc]
        raise ConfigError(
            f"fit(ckpt_path={str(checkpoint_path)!r}): a run resumes by itself, from the newest "
            f"checkpoint in {self._directory}; leave ckpt_path out. To begin with other weights, "
            "load them into the module first"
        )

    def _end(self, trainer: pl.Trainer, loop: Any, ends: Callable[..., None], *given: Any) -> None:
        """End a batch or an epoch, with all that the script does there; save and leave, if due."""
        ends(*given)
        # Lightning does not come back to the end of an epoch: so, once all of that is done.
        is_last = trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        if is_last == (loop is trainer.fit_loop):
            self.run.save_if_due(self._directory)

    def on_train_start(self) -> None:
        """See Lightning; between two epochs there is no batch behind which to go on."""
        super().on_train_start()  # type: ignore[misc]
        its: Any = self
        loop = its.lightning_module.trainer.fit_loop
        epochs = loop.epoch_progress.current
        if epochs.ready == epochs.completed:
            loop.epoch_loop.restarting = False

    def state(self) -> dict[str, Any]:
        """Lightning's part of a checkpoint: progress, callbacks, what hooks add."""
        its: Any = self
        trainer = its.lightning_module.trainer
        connector = trainer._checkpoint_connector
        # The connector asks the strategy for weights and optimizer, which the run saves by itself.
        self._dumps = True
        try:
            whole = connector.dump_checkpoint(weights_only=False)
        finally:
            self._dumps = False
        kept = {key: whole[key] for key in whole.keys() - {*_OF_THE_RUN, "lr_schedulers"}}
        return {**kept, "should_stop": trainer.should_stop}

    _dumps = False
    """Whether `state` asks, which wants no tensors of the run."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """See Lightning."""
        return {} if self._dumps else super().lightning_module_state_dict()  # type: ignore[misc]

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See Lightning."""
        return {} if self._dumps else super().optimizer_state(optimizer)  # type: ignore[misc]

    def teardown(self) -> None:
        """Finish the last save."""
        if hasattr(self, "run"):
            self.run.close()
        super().teardown()  # type: ignore[misc]

    # ---- data ----

    def process_dataloader(self, dataloader: Any) -> Any:
        """The training loader, as global batches; others as they are."""
        its: Any = self
        if not its.lightning_module.trainer.training:
            return super().process_dataloader(dataloader)  # type: ignore[misc]
        if not isinstance(dataloader, DataLoader):
            raise ConfigError(
                f"fit() got a {type(dataloader).__name__} to train on: give a DataLoader of torch, "
                "whose batches are micro-batches"
            )
        self._batches = GlobalBatches(dataloader, self._microbatches)
        self._batches.begin = self._begin
        return self._batches

    # ---- a step ----

    def training_step(self, batch: Any, *more: Any, **named: Any) -> Any:
        """The step of the script, on the micro-batch whose turn it is."""
        # Lightning gives it the whole step; `optimizer_step` asks for the rest.
        self._step = batch
        mine = batch[0] if self._micro_batch is None else self._micro_batch
        return super().training_step(mine, *more, **named)  # type: ignore[misc]

    def backward(self, closure_loss: Tensor, optimizer: Any, *_: Any, **__: Any) -> Tensor:
        """The backward of the run, between the hooks of the script."""
        its: Any = self
        module, precision = its.lightning_module, its.precision_plugin
        closure_loss = precision.pre_backward(closure_loss, module)
        self.run.backward(closure_loss)
        return precision.post_backward(closure_loss, module)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **_: Any,
    ) -> Any:
        """Run all micro-batches of the step; the last one acts."""
        its: Any = self
        # A closure is forward and backward of the script's step, on the micro-batch that is noted.
        result = closure()
        for micro_batch in self._step[1:]:
            self._micro_batch = micro_batch
            self.run.step()
            result = closure()
        self._micro_batch = None
        # Behind the closures, as in Lightning: it clips, and calls the script's hook.
        its.precision_plugin._after_closure(model or its.lightning_module, optimizer)
        optimizer.step()
        return result


def check(trainer: pl.Trainer) -> None:
    """Check the arguments of a Trainer.

    Raises:
        ConfigError: One of them cannot be kept; names it.
    """
    check_replaced("lightning", pl.strategies.Strategy, _REPLACED)
    check_replaced("lightning", trainer.precision_plugin, ("clip_grad_by_norm",))
    check_replaced("lightning", trainer._checkpoint_connector, ("_loaded_checkpoint",))
    check_replaced("lightning", trainer._data_connector, ("_requires_distributed_sampler",))
    check_replaced("lightning", trainer.fit_loop, ("on_advance_end", "epoch_progress"))
    needs = "on_advance_end", "_num_ready_batches_reached", "restarting"
    check_replaced("lightning", trainer.fit_loop.epoch_loop, needs)
    for refused, why in _REFUSED:
        if refused(trainer):
            raise ConfigError(why)


def _is_plain(loader: DataLoader[Any]) -> bool:
    plain = isinstance(loader.sampler, RandomSampler | SequentialSampler)
    return plain and loader.batch_size is not None


def _has(trainer: Any, kinds: Sequence[str]) -> bool:
    # By name: older versions of Lightning have not all of these callbacks.
    bases = {base.__name__ for each in trainer.callbacks for base in type(each).__mro__}
    return not bases.isdisjoint(kinds)


class ZeroDDP(_Protected, DDPStrategy):
    """DistributedDataParallel whose bits do not depend on the number of ranks."""


class ZeroFSDP2(_Protected, ModelParallelStrategy):
    """FSDP2, as `configure_model` of the module shards it."""


StrategyRegistry.register("zero_ddp", ZeroDDP)
