"""transformers' Trainer, and what derives from it, on `zero_torch.Run`.

    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    zero_libraries.transformers.protect(trainer, microbatches=12)
    trainer.train()                        # resumes by itself
    print(trainer.run.global_step, trainer.run.weight_hash())

The Trainer sees a global batch as one batch of its loader, whatever the number of ranks, so its
count of steps and epochs, its schedule and its state are those of the run. Must always hold: the
Trainer's own state is part of the run's checkpoint, and of no other file.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

import zero_torch
from zero_comm.worker.agent_link import current_round, note_total_steps
from zero_contract.errors import ConfigError
from zero_data.lanes.adapters import reads_lanes
from zero_libraries.accelerate import hand_over, unprepared
from zero_libraries.steps import GlobalBatches
from zero_libraries.versions import check_replaced

_log = logging.getLogger(__name__)
_REPLACED = ("train", "get_train_dataloader", "_init_training_state", "_prepare_for_training",
             "training_step", "floating_point_ops", "_maybe_log_save_evaluate",
             "_save_checkpoint")  # fmt: skip
"""Methods of a Trainer in whose place a run's are."""
_SET = (
    "average_tokens_across_devices", "save_only_model", "restore_callback_states_from_checkpoint"
)  # fmt: skip
"""Arguments of it that a run decides."""
_REFUSED = (
    ("gradient_accumulation_steps", lambda value: value != 1,
     "is 1: microbatches is the number of micro-batches in a step, over all ranks"),
    ("auto_find_batch_size", bool, "changes the micro-batch, which belongs to the run"),
    ("enable_jit_checkpoint", bool, "is not needed: a protected Trainer leaves with a checkpoint"),
    ("deepspeed", bool, "trains with an engine: leave protect() out, and run the script with "
     "python -m zero_deepspeed.as_deepspeed"),
    ("loss_type", lambda value: value in ("cispo", "dapo", "vespo"),
     "divides by the tokens of all ranks of one micro-step: give 'grpo', 'bnpo' or 'dr_grpo'"),
    ("scale_rewards", lambda value: value == "batch",
     "compares the rewards of a micro-step: give 'group'"),
    ("include_num_input_tokens_seen", lambda value: value not in (False, "no"),
     "counts padding: leave it out; run.tokens has the tokens that were trained on"),
)  # fmt: skip
"""An argument of the Trainer, what of it is refused, and the reason with the remedy."""
_LOADS = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
          "persistent_workers", "multiprocessing_context")  # fmt: skip
"""How a DataLoader loads its batches, whatever they are."""


def protect(
    trainer: Trainer,
    *,
    microbatches: int,
    stateful: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Give a Trainer the same bits at every world size, and a resume by itself.

    `trainer.run` is the `zero_torch.Run` from the begin of `train()` on. Its checkpoints are in
    `output_dir`/run, and `checkpoint-N` has the model alone, for `from_pretrained`.

    Args:
        trainer: A Trainer, or one of a class that derives from it.
        microbatches: Those of a global batch, of `per_device_train_batch_size` samples, over all
            ranks.
        stateful: As for `zero_torch.protect`: what has tensors that no callback's state can hold.
        config: As for `zero_torch.protect`; `elastic.seed` is that of the Trainer by default.

    Raises:
        ConfigError: The Trainer has an argument that cannot be kept; names it.
    """
    args: Any = trainer.args
    check_replaced("transformers", trainer, _REPLACED)
    check_replaced("transformers", args, _SET)
    for name, refused, why in _REFUSED:
        if refused(getattr(args, name, None)):
            raise ConfigError(f"TrainingArguments({name}={getattr(args, name)!r}): {name} {why}")
    args.average_tokens_across_devices = False  # the run weighs tokens, over all ranks
    # The rest is in the run's checkpoint: from two, a resume could take parts of different steps.
    args.save_only_model = True
    # Else one that counts, as EarlyStoppingCallback does, would begin anew with each restart.
    args.restore_callback_states_from_checkpoint = True
    elastic = {"seed": args.seed, **(config or {}).get("elastic", {})}
    kind, its = type(trainer), cast(Any, trainer)
    # Derived from the script's class, so that `super()` in a method here is what the script wrote.
    its.__class__ = type(kind.__name__, (_Protected, kind), {})
    its._zero_microbatches = microbatches
    its._zero_stateful = stateful
    its._zero_config = {**(config or {}), "elastic": elastic}
    its._zero_steps = _Steps(its)
    # First: the others read the loss and the epoch that it notes.
    its.callback_handler.callbacks.insert(0, its._zero_steps)


def whole_groups(loader: DataLoader[Any], generations: int = 1) -> DataLoader[Any]:
    """A loader of TRL that repeats each prompt, as one of prompts whose batches repeat them.

    So a group of completions, whose rewards are compared, is always on one rank.

    Args:
        loader: Of the Trainer.
        generations: The completions of a prompt.

    Raises:
        ConfigError: A group is not in one micro-batch, or completions are used in several steps;
            or the prompts are a stream.
    """
    if generations > 1 and reads_lanes(loader.dataset):
        raise ConfigError(
            "train_dataset is a stream, in which TRL repeats each prompt and drops those that fill "
            "no step at this number of ranks: give a Dataset, such as "
            "Dataset.from_list(list(stream))"
        )
    sampler: Any = loader.sampler
    if type(sampler).__name__ != "RepeatSampler":
        return loader
    times, size = sampler.mini_repeat_count, loader.batch_size or 1
    if sampler.repeat_count != 1:
        raise ConfigError("give GRPOConfig(steps_per_generation=1) and num_iterations=1")
    if size % times:
        raise ConfigError(
            f"num_generations={times} does not divide per_device_train_batch_size={size}: a group "
            "of completions must be in one micro-batch"
        )
    return DataLoader(
        loader.dataset,
        batch_size=size // times,
        shuffle=sampler.shuffle,
        drop_last=True,  # as TRL: its ranks gather rewards, equally many of each
        collate_fn=_Repeat(loader.collate_fn, times),
        **{name: getattr(loader, name) for name in _LOADS},
    )


@dataclasses.dataclass(frozen=True)
class _Repeat:
    """Collates samples of which each stands several times."""

    collate: Callable[[list[Any]], Any]
    times: int

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate([each for each in samples for _ in range(self.times)])


class _Steps(TrainerCallback):
    """Tells the Trainer the loss of each step, and its epoch after a resume."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._noted = 0
        """The last step that is in the numbers of the Trainer."""
        self._epoch = 0
        self._of_epoch = 0
        """Of the epoch under way: its number, and the steps that are done."""
        self._over = False
        """Whether the end of the epoch has come."""
        self._logged: list[float] = [0.0, 0.0, 0]
        """The sums of losses, and the step of the last log, with which training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Go on with the sums of the checkpoint."""
        trainer = self._trainer
        loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = self._logged
        trainer._tr_loss += loss
        # The sums are of all steps of the run: the Trainer divides by the steps since this number.
        trainer._initial_global_step = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin an epoch, or go on in that of the checkpoint."""
        self._over = False
        if self._epoch != (epoch := self._trainer.run.loader.epoch):
            self._epoch, self._of_epoch = epoch, 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note the end of an epoch, behind which a checkpoint has all of it."""
        self._over = True

    @property
    def epoch_is_to_end(self) -> bool:
        """Whether the last step of the epoch is done, and not what comes behind it."""
        return self._of_epoch >= self._trainer._zero_steps_in_epoch and not self._over

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End the step of the run, so that all ranks know its loss."""
        self._trainer.run.due()
        self._note()

    def _note(self) -> None:
        """Note the step that has ended, once; the Trainer has counted it."""
        trainer, run = self._trainer, self._trainer.run
        if self._noted == run.global_step:
            return
        self._noted = run.global_step
        self._of_epoch += 1
        trainer.state.epoch = self._epoch + self._of_epoch / trainer._zero_steps_in_epoch
        if math.isfinite(run.loss) or not trainer.args.logging_nan_inf_filter:
            trainer._tr_loss += run.loss

    def state(self) -> dict[str, Any]:
        """The Trainer's part of a checkpoint, as of the last step of the run."""
        self._note()
        trainer = self._trainer
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        kept: Any = [each for each in callbacks if isinstance(each, ExportableState)]
        # A list of states where callbacks have one name; the Trainer's own save would lengthen it.
        trainer.state.stateful_callbacks |= TrainerState(stateful_callbacks=kept).stateful_callbacks
        return {
            "trainer": json.dumps(dataclasses.asdict(trainer.state)),
            "place": [self._epoch, self._of_epoch],
            "logged": [
                trainer._tr_loss.item(),
                trainer._total_loss_scalar,
                trainer._globalstep_last_logged,
            ],
        }

    def adopt(self, state: Mapping[str, Any]) -> TrainerState:
        """The Trainer's state in a checkpoint; the rest follows when training begins."""
        self._epoch, self._of_epoch = state["place"]
        self._logged = state["logged"]
        found = TrainerState(**json.loads(state["trainer"]))
        self._noted = found.global_step
        return found


class _Protected(Trainer):
    """The methods of a Trainer that a run takes over; comes before the class of the script."""

    run: zero_torch.Run
    _zero_microbatches: int
    _zero_stateful: Mapping[str, Any] | None
    _zero_config: dict[str, Any]
    _zero_steps: _Steps
    _zero_loader: GlobalBatches
    _zero_steps_in_epoch: int
    _zero_ready: Any
    _zero_waits = False
    """Whether a save is due where all of the step, or of the epoch, is done."""

    @property
    def _zero_directory(self) -> Path:
        return Path(self.args.output_dir or ".") / "run"

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, *more: Any, **named: Any
    ) -> Any:
        """Train on from the newest checkpoint of the run, or from the begin."""
        if trial is not None or hasattr(self, "run"):
            raise ConfigError(
                "a protected Trainer trains once, and searches no hyperparameters: make another "
                "Trainer, with another output_dir, for each run"
            )
        if isinstance(resume_from_checkpoint, str):
            _log.warning(
                "resume_from_checkpoint=%s is not used: a protected Trainer resumes from the "
                "newest checkpoint in %s",
                resume_from_checkpoint,
                self._zero_directory,
            )
        result = super().train(None, None, *more, **named)
        self.run.close()
        return result

    def get_train_dataloader(self) -> Any:
        """The script's loader, as global batches."""
        with unprepared(self.accelerator):
            generations = getattr(self, "num_generations", 1)
            loader = whole_groups(super().get_train_dataloader(), generations)
        self._zero_loader = GlobalBatches(loader, self._zero_microbatches)
        return self._zero_loader

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, *_: Any
    ) -> tuple[int, int]:
        """Make the run here, where the Trainer asks at which epoch to begin."""
        super()._init_training_state(max_steps, steps_per_epoch, epochs, None, None)
        self._zero_steps_in_epoch = steps_per_epoch
        # The Trainer would do this next; but the epoch to begin with is known behind the load,
        # which needs the wrapped model and its optimizer.
        self._zero_ready = super()._prepare_for_training(max_steps, self._zero_loader, None)
        self.run = zero_torch.protect(
            self.model_wrapped,
            cast(torch.optim.Optimizer, self.optimizer),
            self._zero_loader.given,
            microbatches=self._zero_microbatches,
            scheduler=self.lr_scheduler,
            scaler=self.accelerator.scaler,
            stateful=self._zero_stateful,
            config=self._zero_config,
        )
        self._zero_loader.begin = lambda: self.run
        hand_over(self.accelerator, self.run)
        if "ram" in self._zero_config.get("checkpoint", {}):
            self.run.keep_client_state(self._zero_steps.state)
        # Without in-memory checkpoints a worker leaves after the Trainer's own save, behind the
        # log of the step.
        stopped = False
        if self.run.load(self._zero_directory) is not None:
            self.state = self._zero_steps.adopt(self.run.client_state)
            # In a job of its own, a training that was stopped early may go on.
            control: Any = cast(Any, self.state.stateful_callbacks)["TrainerControl"]
            stopped = control["args"]["should_training_stop"] and current_round() > 1
            self._load_callback_state()
            self.state.compute_steps(self.args, max_steps)
            self.state.init_training_references(self, max_steps, epochs, None)
        note_total_steps(max_steps)
        # The Trainer counts epochs, and takes one without a batch for the end of the training.
        self.run.loader.leave()
        # An epoch that is begun has a step: a run that has all of its steps begins none.
        is_over = stopped or self.state.global_step >= max_steps
        return (epochs if is_over else self.run.loader.epoch), 0

    def _prepare_for_training(self, *_: Any) -> Any:
        return self._zero_ready

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run the micro-batches of a step, each as the script's class does."""
        accelerator, run = self.accelerator, self.run
        weigh = run.backward
        for each in inputs:
            tokens = self._get_num_items_in_batch([each], self.args.device)
            if tokens is not None:
                tokens = max(int(tokens), 1)  # without a label there is no mean
            # The script's class may have a `training_step` of its own, which calls it.
            accelerator.backward = partial(weigh, tokens=tokens)
            super().training_step(model, each, tokens)
            # The last one ends with the step of the optimizer, which the Trainer calls.
            if not run.last:
                run.step()
        return torch.zeros((), device=self.args.device)  # `_Steps` adds the loss

    def floating_point_ops(self, inputs: Any) -> int:
        """The operations of all micro-batches of this rank."""
        # Within the generator `super()` would take its iterator for the Trainer.
        return sum(super(_Protected, self).floating_point_ops(each) for each in inputs)

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **named)
        self._zero_waits = self.run.due() or self._zero_waits
        # Behind callbacks and evaluations, of the end of an epoch too: no resume does them again.
        if self._zero_waits and not self._zero_steps.epoch_is_to_end:
            self._zero_waits = False
            self.run.save(self._zero_directory, client_state=self._zero_steps.state())

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self._zero_waits = True
