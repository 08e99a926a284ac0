"""The checkpoint from which a Trainer resumes when its job is restarted, and its batch.

A library's loop begins at step 0 unless its script resumes it, and its global batch grows and
shrinks with the ranks. Under `zero-agent` a script is started once per round, so the decisions of
the first start of a run are kept in its output directory, in `zero_run.json`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import is_zipfile

from zero_contract.decoding import decode
from zero_contract.errors import ConfigError, ZeroError

RECORD = "zero_run.json"
STATE = "trainer_state.json"
"""The file that the Trainer writes last into a checkpoint."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_ROUNDING = 1e-3
"""Of a step, in an epoch that a float counts."""
_RUN_OF_A_COMMAND = re.compile(r"(.+-[0-9a-f]{8})\.\d+")
"""The name of an unnamed job: its command, and the number of its start."""


class CannotGoOn(ZeroError):
    """This run cannot resume as it began: the message has the reason and the remedy."""


# ---- the run, from its first start on ----


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """One start of the script by its agent."""

    job: str
    round: int
    world: int

    @property
    def run(self) -> str:
        """The name of the run, equal for a command that was interrupted and is entered again."""
        unnamed = _RUN_OF_A_COMMAND.fullmatch(self.job)
        return unnamed[1] if unnamed else self.job


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The decisions of the first start of a run."""

    run: str
    samples: int
    """The samples of one optimizer step, over all ranks."""
    micro_batch: int
    world: int
    steps: int
    """The steps of the whole run."""
    others: Mapping[str, int] = field(default_factory=dict)
    """Checkpoints of other runs in the directory: name -> time of the last write, in ns."""
    finished: bool = False

    def is_begun_by(self, start: RunStart) -> bool:
        """Whether this start resumes the run."""
        # In a later round the script was perhaps killed behind the training, in an evaluation.
        return self.run == start.run and (start.round > 1 or not self.finished)

    def write(self, directory: Path) -> None:
        """Write the record to the output directory, whole or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        # Every start of the run reads it: half of one would let it begin again at step 0.
        partial = directory / f"{RECORD}.{os.getpid()}"
        with partial.open("w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(directory / RECORD)


def record_of(directory: Path, start: RunStart) -> RunRecord | None:
    """The record of the run that this start resumes; None if it begins one."""
    try:
        record = decode(RunRecord, (directory / RECORD).read_bytes(), "record of the run")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise CannotGoOn(
            f"{directory / RECORD} cannot be read ({error}): it says which checkpoints here are "
            "this run's. Put it back, or give another output_dir"
        ) from error
    return record if record.is_begun_by(start) else None


# ---- the batch ----


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The division of a step's samples over the ranks, and its reason."""

    micro_batch: int
    accumulation: int
    reason: str


def share(record: RunRecord, start: RunStart) -> Batch:
    """Divide the run's samples per step over the ranks of this start.

    Raises:
        CannotGoOn: The samples cannot be divided equally.
    """
    per_rank, rest = divmod(record.samples, start.world)
    if rest or not per_rank:
        raise CannotGoOn(
            f"a step of this run takes {record.samples} samples, which {start.world} ranks cannot "
            f"share equally. Let their number divide {record.samples}: set --nnodes, --node-unit "
            "or --nproc-per-node; or begin a new run with another batch in another output_dir"
        )
    # As large as it was, if that is possible: kernels of another size round differently.
    micro_batch = max(m for m in range(1, record.micro_batch + 1) if per_rank % m == 0)
    accumulation = per_rank // micro_batch
    reason = (
        f"a step keeps its {record.samples} samples on {start.world} ranks, as on {record.world} "
        f"at first: gradient_accumulation_steps is {accumulation}"
    )
    if micro_batch != record.micro_batch:
        reason += (
            f", per_device_train_batch_size {micro_batch} instead of {record.micro_batch}, so "
            "that results may differ by rounding"
        )
    return Batch(micro_batch=micro_batch, accumulation=accumulation, reason=reason)


def check_schedule(record: RunRecord, start: RunStart, *, steps: int, samples: int) -> None:
    """Check that the run has the steps of its first start, with their samples.

    Raises:
        CannotGoOn: The steps or the samples per step differ.
    """
    if samples != record.samples:
        raise CannotGoOn(
            f"a step of this run takes {record.samples} samples, and would take {samples} on "
            f"{start.world} ranks. Let TrainingArguments have output_dir from the beginning, so "
            "that they set gradient_accumulation_steps, and change nothing of the batch afterwards"
        )
    if steps != record.steps:
        raise CannotGoOn(
            f"this run has {record.steps} steps on {record.world} ranks and would have {steps} on "
            f"{start.world}: its schedule, and the samples of each step, would change on the way. "
            "Give max_steps, leave dataloader_drop_last out, keep the data as it was, or keep the "
            "number of ranks (--nnodes)"
        )


def short_step(samples: int, of_a_step: int, micro_batch: int, world: int) -> str:
    """The reason why the last step of an epoch depends on the number of ranks; empty: it does not.

    From the samples of an epoch, of a step over all ranks, and of a micro-batch of one rank.
    """
    rest = samples % of_a_step
    if rest % (micro_batch * world) == 0:
        return ""
    return (
        f"the last step of each epoch has {rest} samples, which are no multiple of {micro_batch} "
        f"(the micro-batch) times {world} (the ranks): accelerate then fills it with samples of "
        "the epoch's beginning, so the weights depend on the number of ranks. Let "
        f"the data have a multiple of {of_a_step} samples (now {samples}), or keep the number of "
        "ranks (--nnodes)"
    )


def place_in_stream(epoch: float, step: int, steps: int) -> tuple[int, int]:
    """The epoch and its step at which a checkpoint was made in a stream of unknown length.

    Raises:
        CannotGoOn: The state says of no step where it was.
    """
    # The Trainer counts the steps of each epoch as parts of all `steps` of the run, so that the
    # `epoch` of its state says both.
    whole, part = divmod(epoch, 1)
    within = part * steps
    if abs(within - round(within)) > _ROUNDING or round(within) > step:
        raise CannotGoOn(
            f"the checkpoint of step {step} says that its epoch was {epoch}, which is not the end "
            f"of a step of a run of {steps} steps: the samples of its epoch that were used cannot "
            "be skipped. Begin a new run in another output_dir, or set ignore_data_skip, and train "
            "on some samples again"
        )
    return int(whole), round(within)


# ---- the checkpoints ----


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One checkpoint of a Trainer in its output directory."""

    path: Path
    step: int
    written_ns: int
    """The time at which its last file was written; 0: the file is incomplete."""
    flaw: str
    """Why it cannot be resumed from; empty: it is whole."""
    weights_only: bool = False


def look(directory: Path) -> list[Seen]:
    """The checkpoints of an output directory, newest first."""
    entries = list(directory.iterdir()) if directory.is_dir() else []
    named = [(path, _CHECKPOINT.fullmatch(path.name)) for path in entries if path.is_dir()]
    seen = [_examine(path, int(name[1])) for path, name in named if name]
    return sorted(seen, key=lambda checkpoint: checkpoint.step, reverse=True)


def _examine(path: Path, step: int) -> Seen:
    state = path / STATE
    try:
        written_ns = state.stat().st_mtime_ns
        json.loads(state.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Seen(path=path, step=step, written_ns=0, flaw=f"{STATE} is not whole")
    if not any(path.glob("step-*/MANIFEST.json")):
        flaw = "it holds weights alone"
        return Seen(path=path, step=step, written_ns=written_ns, flaw=flaw, weights_only=True)
    # torch.save writes the directory of a zip file last.
    torn = [file.name for file in sorted(path.glob("*.pt*")) if not is_zipfile(file)]
    flaw = f"{', '.join(torn)}: not whole" if torn else ""
    return Seen(path=path, step=step, written_ns=written_ns, flaw=flaw)


@dataclass(frozen=True, kw_only=True)
class BatchChoice:
    """The checkpoint to resume from, and the reason."""

    path: str | None
    """None: training begins at step 0."""
    reason: str = ""
    """Empty: as the script says."""


def choose(asked: str | bool | None, record: RunRecord | None, seen: Sequence[Seen]) -> BatchChoice:
    """Choose the checkpoint to resume from, of those in the output directory, newest first.

    Without a record of the run this start begins it.

    Raises:
        CannotGoOn: The run has checkpoints, and none that it can resume from.
    """
    if record is not None:
        # Not those of other runs, which were here when this one began. By the time as well: this
        # run may have written another one of the same name.
        own = [one for one in seen if record.others.get(one.path.name) != one.written_ns]
        return _newest(own) or _anew(asked, "this run has no complete checkpoint yet")
    if asked is True:
        return _newest(seen) or _anew(asked, "there is no checkpoint yet")
    if not asked and (whole := [one for one in seen if not one.flaw]):
        return BatchChoice(
            path=None,
            reason=f"training begins at step 0, beside {whole[0].path} of another run: to resume "
            "from that, call train(resume_from_checkpoint=True), which does no harm where there "
            "is none yet",
        )
    return BatchChoice(path=asked or None)


def others(seen: Sequence[Seen], goes_on_from: int) -> dict[str, int]:
    """The checkpoints at a first start that do not belong to the run."""
    return {one.path.name: one.written_ns for one in seen if one.step > goes_on_from}


def _newest(own: Sequence[Seen]) -> BatchChoice | None:
    whole = [one for one in own if not one.flaw]
    if whole:
        newer = "".join(
            f"; {one.path.name} is passed over: {one.flaw}"
            for one in own
            if one.step > whole[0].step
        )
        return BatchChoice(
            path=str(whole[0].path), reason=f"training resumes from {whole[0].path}{newer}"
        )
    # It does not begin again over its own checkpoints.
    if any(one.weights_only for one in own):
        raise CannotGoOn(
            f"training cannot resume from {own[0].path}: the checkpoints there hold weights alone "
            "(save_only_model), and it would begin again at step 0. Set save_only_model to False; "
            "to begin again all the same, give another output_dir"
        )
    return None


def _anew(asked: str | bool | None, why: str) -> BatchChoice:
    if isinstance(asked, str):
        return BatchChoice(
            path=asked, reason=f"{why}: training resumes from {asked}, as the script says"
        )
    return BatchChoice(path=None, reason=f"{why}: training begins at step 0")


# ---- other loops of accelerate ----


def check_loop(round: int, committed: int, loaded: int | None, samples: int) -> None:
    """Check a loop that saves and loads by itself, before its first backward.

    `committed` is the step of the job's newest checkpoint before it; `loaded` and `samples` are the
    samples of a step, in the run of the checkpoint that it has loaded (None: none), and now.

    Raises:
        CannotGoOn: The loop should resume from a checkpoint and does not, or with another batch.
    """
    if round <= 1 or not committed:
        return
    if loaded is None:
        raise CannotGoOn(
            f"round {round} of the job begins to train without its checkpoint: one of step "
            f"{committed} is published, and its steps would be done again and written over. Call "
            "accelerator.load_state(DIR) after prepare() where DIR is there; to begin again, start "
            "a new job (--rdzv-id)"
        )
    if loaded not in (0, samples):
        raise CannotGoOn(
            f"a step took {loaded} samples when the checkpoint was made, and takes {samples} now "
            "that the number of ranks has changed: schedule and position in the data would change. "
            "Let the script set Accelerator(gradient_accumulation_steps=...) to the samples per "
            "step, divided by the micro-batch and by WORLD_SIZE; or keep the number of ranks "
            "(--nnodes)"
        )


OWN_ORDER = (
    "accelerate shuffles this DataLoader in another order on one rank than on several: give "
    "Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))"
)
OWN_SCHEDULE = (
    "a scheduler that accelerate has prepared steps as often in a step as there are ranks, so the "
    "learning rate follows their number: leave it out of prepare(), give it to "
    "accelerator.register_for_checkpointing(), and step it where accelerator.sync_gradients is True"
)
OWN_EPOCH = (
    "the loaded checkpoint has used {consumed} samples, more than the {size} of this DataLoader, "
    "which begins with the order of epoch 0: call loader.set_epoch(epoch) in each epoch, and "
    "accelerator.skip_first_batches(loader, n) in the first"
)
"""Why the result of a loop depends on the number of ranks, or on a restart, and the remedy."""


def engine_missing(*, asked: bool, made: bool) -> str:
    """A warning that an Accelerator has no engine; empty if it has one.

    Raises:
        ConfigError: It has dropped the plugin that it got; stock DDP would be trained.
    """
    if asked and not made:
        raise ConfigError(
            "accelerate has dropped the deepspeed_plugin, as Accelerator(cpu=True) does, and would "
            "train with stock DDP: no engine, no checkpoints of it, and bits that depend on the "
            "number of ranks. Leave out cpu=True; without a GPU, give "
            "kwargs_handlers=[InitProcessGroupKwargs(backend='gloo')]"
        )
    if made:
        return ""
    return (
        "this Accelerator has no deepspeed_plugin, so as_deepspeed makes no engine for it: the "
        "global batch, the schedule and the order of samples are accelerate's, and follow the "
        "number of ranks. Give Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=1)), or "
        "--deepspeed CONFIG to the Trainer"
    )
