"""transformers' Trainer under an agent: resumes by itself, keeps its batch, leaves with a save.

The amended methods of `TrainingArguments` and `Trainer` change nothing without `zero-agent`, for a
Trainer without DeepSpeed, and in a hyperparameter search. Imported after transformers.trainer;
`resuming` decides.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import has_length

from zero_comm.exchange.objects import gather_objects_of_group
from zero_comm.worker.agent_link import current_job, current_round, note_total_steps
from zero_deepspeed.as_deepspeed.accelerator import exempt
from zero_deepspeed.as_deepspeed.resuming import (
    BatchChoice,
    CannotGoOn,
    RunRecord,
    RunStart,
    check_schedule,
    choose,
    look,
    others,
    place_in_stream,
    record_of,
    share,
    short_step,
)

_log = logging.getLogger(__name__)

_FINDS_PLACE = "_init_training_state"
"""The method that says where in an epoch training resumes; older versions do not have it."""
_BY_LENGTH = frozenset({"group_by_length", "batch_rebalance"})
"""Orders of the samples that depend on the number of ranks."""


def install() -> None:
    """Amend the methods, once."""
    for kind, name, amend in _AMENDED:
        if hasattr(kind, name):
            setattr(kind, name, amend(getattr(kind, name)))


def _start() -> RunStart | None:
    """This start of the script; None without an agent."""
    job = current_job()
    if job is None:
        return None
    return RunStart(job=job, round=current_round(), world=int(os.environ["WORLD_SIZE"]))


def _record(args: Any, start: RunStart) -> RunRecord | None:
    """The record of the run that this start resumes; None if it begins one."""
    if start.round <= 1 and getattr(args, "overwrite_output_dir", False):
        return None
    return record_of(Path(args.output_dir), start)


# ---- the batch ----


def _settling(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """The `__post_init__` of the arguments, after the batch is set to that of the first start."""

    @wraps(original)
    def post_init(args: Any) -> None:
        start = _start()
        if start is not None and args.output_dir:
            _keep_batch(args, start)
        original(args)  # writes the batch into DeepSpeed's config

    return post_init


def _keep_batch(args: Any, start: RunStart) -> None:
    record = _record(args, start)
    config = args.accelerator_config
    splits = isinstance(config, dict) and config.get("split_batches")
    if record is None or splits:  # the split batch is that of the step in every world
        return
    by_length = getattr(args, "group_by_length", False) or (
        getattr(args, "train_sampling_strategy", None) in _BY_LENGTH
    )
    if by_length and start.world != record.world:
        raise CannotGoOn(
            "with train_sampling_strategy (group_by_length) the order of the samples follows from "
            f"the number of ranks: this run cannot resume with {start.world} instead of "
            f"{record.world} ranks. Keep their number (--nnodes), or sample at random"
        )
    ours = args.per_device_train_batch_size * args.gradient_accumulation_steps * start.world
    if ours != record.samples:
        batch = share(record, start)
        args.per_device_train_batch_size = batch.micro_batch
        args.gradient_accumulation_steps = batch.accumulation
        if os.environ["RANK"] == "0":
            _log.warning("%s", batch.reason)


# ---- the checkpoint ----


def _going_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """The Trainer's `train`, which resumes a run that has begun."""

    @wraps(original)
    def train(
        self: Any,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        # Other loops are checked at their first backward: this one resumes by itself.
        exempt("Trainer")
        start = _start()
        if start is None or trial is not None or not self.is_deepspeed_enabled:
            return original(self, resume_from_checkpoint, trial, *more, **named)
        guide = _Guide(self, start, resume_from_checkpoint)
        self.add_callback(guide)
        try:
            result = original(self, guide.choice.path, trial, *more, **named)
        finally:
            self.remove_callback(guide)
        guide.finish()
        return result

    return train


def _finding_place(original: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    """The Trainer's `_init_training_state`, which looks for the place of a stream in its epoch.

    Behind the last step there is no further epoch.
    """

    @wraps(original)
    def init_training_state(
        self: Any,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        *more: Any,
    ) -> tuple[int, int]:
        found = original(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *more)
        args, state, start = self.args, self.state, _start()
        if start is None or not state.global_step:
            return found
        # The Trainer runs a step before it looks whether there is one left. A training that was
        # stopped early is over in the rounds of its job; in a job of its own it may go on.
        control = state.stateful_callbacks.get("TrainerControl", {}).get("args", {})
        stopped = start.round > 1 and control.get("should_training_stop", False)
        if stopped or state.global_step >= max_steps:
            return num_train_epochs, 0
        if has_length(self.train_dataset) or args.ignore_data_skip:
            return found
        # The Trainer takes a stream for a single epoch, skips more than it has, and so would train
        # on the samples of its second epoch again.
        epoch, step = place_in_stream(state.epoch, state.global_step, max_steps)
        return epoch, step * args.gradient_accumulation_steps

    return init_training_state


class _Guide(TrainerCallback):
    """Guides one call of `train`."""

    def __init__(self, trainer: Any, start: RunStart, asked: str | bool | None) -> None:
        """Choose the checkpoint to resume from; every rank calls it.

        Raises:
            CannotGoOn: The run cannot resume.
        """
        self._trainer = trainer
        self._start = start
        self._record: RunRecord | None = None
        self._others: dict[str, int] = {}
        self._substeps = 0
        self._warned = False
        self.choice = BatchChoice(**self._agree(lambda: asdict(self._choose(asked))))
        self._warn(self.choice.reason)

    @property
    def _is_first(self) -> bool:
        return bool(self._trainer.args.process_index == 0)

    @property
    def _directory(self) -> Path:
        return Path(self._trainer.args.output_dir)

    def _choose(self, asked: str | bool | None) -> BatchChoice:
        self._record = _record(self._trainer.args, self._start)
        seen = look(self._directory)
        choice = choose(asked, self._record, seen)
        steps = {str(one.path.resolve()): one.step for one in seen}
        origin = str(Path(choice.path).resolve()) if choice.path else ""
        self._others = others(seen, steps.get(origin, 0))
        return choice

    def _agree(self, decide: Callable[[], Any]) -> Any:
        """The decision of rank 0, as JSON; raises on every rank if rank 0 raises CannotGoOn."""
        verdict: dict[str, Any] = {}
        # Rank 0 alone reads the output directory, so that all ranks go by one look at it.
        if self._is_first:
            try:
                verdict = {"decided": decide()}
            except CannotGoOn as problem:
                verdict = {"problem": str(problem)}
        if dist.is_initialized():
            verdict = gather_objects_of_group(verdict, "what rank 0 decides")[0]
        if "problem" in verdict:
            raise CannotGoOn(verdict["problem"])
        return verdict["decided"]

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Check the schedule, which is known now, before the first step."""
        self._agree(lambda: self._settle(state.max_steps))
        note_total_steps(state.max_steps)
        if self._streams and (state.epoch or 0) >= 1 and not hasattr(Trainer, _FINDS_PLACE):
            raise CannotGoOn(
                "this version of transformers skips no samples in the second epoch of a stream, "
                "and would train on some again. Install transformers 5.23 or newer"
            )
        if not self._streams:
            size, world = len(self._trainer.train_dataset), self._start.world
            self._warn(short_step(size, *self._batch, world))

    def _warn(self, text: str) -> None:
        if self._is_first and text:
            _log.warning("%s", text)

    @property
    def _streams(self) -> bool:
        return not has_length(self._trainer.train_dataset)

    @property
    def _batch(self) -> tuple[int, int]:
        """The samples of a step over all ranks, and of a micro-batch of one rank."""
        trainer, ranks = self._trainer, self._start.world
        micro_batch = trainer._train_batch_size
        if trainer.accelerator.split_batches:  # the loader's batch is divided over the ranks
            ranks = 1
        return micro_batch * trainer.args.gradient_accumulation_steps * ranks, micro_batch

    def _settle(self, steps: int) -> None:
        """Check the schedule against that of the first start, or record it at the first start."""
        args, known = self._trainer.args, self._record
        micro_batch = self._trainer._train_batch_size
        samples = micro_batch * args.gradient_accumulation_steps * self._start.world
        if known is not None and not args.auto_find_batch_size:  # it restarts with a smaller batch
            splits = self._trainer.accelerator.split_batches  # the loader's batch is the step's
            samples = known.samples if splits else samples
            check_schedule(known, self._start, steps=steps, samples=samples)
            return
        self._record = RunRecord(
            run=self._start.run,
            samples=samples,
            micro_batch=micro_batch,
            world=self._start.world,
            steps=steps,
            others=known.others if known is not None else self._others,
        )
        self._record.write(self._directory)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Save if this worker is asked to leave; not after the last step."""
        self._substeps = 0
        if self._engine.asked_to_leave and not control.should_training_stop:
            control.should_save = True

    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A micro-batch that does not end a step."""
        self._substeps += 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Warn once of a stream whose epoch ends within a step."""
        if self._substeps and self._streams and not self._warned:
            self._warned = True
            self._warn(
                f"the stream ended after {self._substeps} of {args.gradient_accumulation_steps} "
                f"micro-batches of step {state.global_step + 1}, which has those of the next epoch "
                "as well: the Trainer does not know the end of a stream, and so from there on the "
                "weights differ from those at another number of ranks. Let an epoch of the stream "
                f"have a multiple of {self._batch[0]} samples, or keep the number of ranks "
                "(--nnodes)"
            )

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Leave, now that the checkpoint is whole, if this worker is asked to."""
        if self._engine.asked_to_leave and not control.should_training_stop:
            self._engine.leave_group()

    @property
    def _engine(self) -> Any:
        return self._trainer.deepspeed

    def finish(self) -> None:
        """Record that the run has finished."""
        if self._is_first and self._record is not None:
            self._record = replace(self._record, finished=True)
            self._record.write(self._directory)


_AMENDED = (
    (TrainingArguments, "__post_init__", _settling),
    (Trainer, "train", _going_on),
    (Trainer, _FINDS_PLACE, _finding_place),
)
